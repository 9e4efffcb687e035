from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import anyio
import trio
from trio.testing import MockClock

from neuroshard.network import Reputation
from neuroshard.network.libp2p.gossip import GOSSIP_PROTOCOL, STALE_SECONDS, Libp2pGossip
from neuroshard.network.libp2p.gossip_messages import Item, ItemKind, packed, topic_id
from neuroshard.network.libp2p.gossip_router import ALLOWANCE_SECONDS, ITEMS_A_SECOND, GossipRouter
from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.negotiation import accept_protocol, proposal
from neuroshard.network.membership_gate import MembershipGate
from neuroshard.types import NodeId
from tests.worlds.network_nodes import connected, run

TOPIC = "reports/run/0"
A, B = NodeId("a"), NodeId("b")


class Line:
    """A way that may stall: while it does, nothing of what A says is read."""

    def __init__(self) -> None:
        self.is_open = trio.Event()
        self.is_open.set()

    def through(self, stream: Any) -> Any:
        """The stream, whose reader waits while the line stalls."""
        read = stream.read

        async def read_when_open(n: int | None = None) -> bytes:
            data: bytes = await read(n)
            await self.is_open.wait()
            return data

        stream.read = read_when_open
        return stream


class Listener:
    """B, and what it thinks of A."""

    def __init__(self, gossip: Libp2pGossip, opinion: Reputation) -> None:
        self.gossip, self.opinion = gossip, opinion
        self.heard: list[bytes] = []

    async def listen(self) -> None:
        subscription = self.gossip.subscribe(TOPIC, lambda *_: True)
        while True:
            self.heard.append(await subscription.receive())


def knowing(muxer: BoundedMuxer) -> Any:
    return SimpleNamespace(of=lambda _: muxer)


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Libp2pGossip, Listener, Line, BoundedMuxer]]:
    """A that gossips with B over a line."""
    line, opinion = Line(), Reputation(now=trio.current_time)
    async with connected() as (of_a, of_b), anyio.create_task_group() as tasks:

        async def serve(muxer: BoundedMuxer, gossip: Libp2pGossip, peer: NodeId, wrapped: Callable[[Any], Any]) -> None:
            while True:
                stream: Any = await muxer.accept_stream()
                await accept_protocol(stream, {GOSSIP_PROTOCOL})
                known = SimpleNamespace(muxed_conn=SimpleNamespace(peer_id=peer), muxed_stream=wrapped(stream))
                tasks.start_soon(gossip.handle_stream, known)

        a = Libp2pGossip(knowing(of_a), lambda *_: None, tasks, GossipRouter(Random(1)), MembershipGate())
        b = Listener(
            Libp2pGossip(knowing(of_b), opinion.report, tasks, GossipRouter(Random(2)), MembershipGate()), opinion
        )
        tasks.start_soon(serve, of_a, a, B, lambda stream: stream)
        tasks.start_soon(serve, of_b, b.gossip, A, line.through)
        tasks.start_soon(a.run)
        tasks.start_soon(b.gossip.run)
        tasks.start_soon(b.listen)
        a.meet(B)
        b.gossip.meet(A)
        a.subscribe(TOPIC, lambda *_: True)
        await trio.sleep(3)
        yield a, b, line, of_a
        tasks.cancel_scope.cancel()


def virtual(scenario: Callable[[], Any]) -> None:
    run(scenario, clock=MockClock(autojump_threshold=0))


def test_who_was_held_up_by_a_stall_of_the_line_keeps_its_place() -> None:
    async def scenario() -> None:
        async with linked() as (a, b, line, _):
            assert b.gossip.router.links(topic_id(TOPIC)) == (A,)
            random = Random(3)
            line.is_open = trio.Event()
            said: list[bytes] = []
            for _ in range(1000):  # what a hundred nodes report in a hundred seconds
                said.append(random.randbytes(500))
                await a.publish(TOPIC, said[-1])
                await trio.sleep(0.1)
            assert b.heard == []
            line.is_open.set()
            await trio.sleep(2)
            assert b.opinion.refused() == ()
            assert b.gossip.router.links(topic_id(TOPIC)) == (A,)
            fresh = int(STALE_SECONDS / 0.1) - 10
            assert b.heard[-fresh:] == said[-fresh:]

    virtual(scenario)


def test_a_message_that_waited_too_long_is_not_sent_any_more() -> None:
    async def scenario() -> None:
        async with linked() as (a, b, line, _):
            random = Random(3)
            line.is_open = trio.Event()
            for second in range(100):
                for _ in range(10):  # 20 kB a second: the line holds 13 seconds of it
                    await a.publish(TOPIC, second.to_bytes() + random.randbytes(2000))
                await trio.sleep(1)
            line.is_open.set()
            await trio.sleep(2)
            seconds = {data[0] for data in b.heard}
            assert seconds & set(range(20, 68)) == set()
            assert seconds >= set(range(71, 100))

    virtual(scenario)


def test_who_floods_is_banned() -> None:
    async def scenario() -> None:
        async with linked() as (_, b, _, muxer):
            stream: Any = await muxer.open_stream()
            await stream.write(proposal(GOSSIP_PROTOCOL))
            for second in range(int(ALLOWANCE_SECONDS)):
                numbers = range(second * 4 * ITEMS_A_SECOND, (second + 1) * 4 * ITEMS_A_SECOND)
                items = [Item(ItemKind.MESSAGE, topic_id(TOPIC), packed(number.to_bytes(8))) for number in numbers]
                await stream.write(b"".join(item.encode() for item in items))
                await trio.sleep(1)
                assert dict(b.opinion.refused()).get("flood", 0) <= second + 1
            assert b.opinion.is_banned(A)
            assert len(b.heard) < 2 * ALLOWANCE_SECONDS * ITEMS_A_SECOND

    virtual(scenario)
