"""Memory for bodies belongs to networks: free names of one network cannot keep it from others. Time is virtual."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import anyio
import pytest
import trio
from trio.testing import MockClock

from neuroshard.messages import Frame, encode
from neuroshard.network import Reputation
from neuroshard.network.limits import CONTESTED_GRACE_SECONDS, ByteBudget, PeerStanding
from neuroshard.network.pool import BulkPool, bulk_pool
from neuroshard.network.pool.greeting import greet_as_dialler
from neuroshard.network.pool.options import ConnectionLostError
from neuroshard.network.pool.transfers import BLOCK_BYTES, PacketKind
from neuroshard.network.serving import RequestServer
from neuroshard.types import NodeId
from tests.worlds.clock import until
from tests.worlds.network_nodes import LIMITS, Stranger, frame_of, run

SHARE = 3 * BLOCK_BYTES  # little enough to be verified without a thread
NAMES = 16
SOON = CONTESTED_GRACE_SECONDS + 2  # the pool looks around once a second
GREEDY = {
    "a host": ["9.9.9.9"] * NAMES,
    "a /24": [f"9.9.9.{number}" for number in range(NAMES)],
    "a /16": [f"9.9.{number}.1" for number in range(NAMES)],
    "a /64": [f"2606:4700:1:1::{number:x}" for number in range(NAMES)],
    "a /48": [f"2606:4700:1:{number:x}::1" for number in range(NAMES)],
    "relays": [""] * NAMES,
}


class End:
    """One end of a connection in memory; the node sees `ip` at the other end."""

    def __init__(self, ip: str, send: trio.MemorySendChannel[bytes], receive: trio.MemoryReceiveChannel[bytes]) -> None:
        self.ip, self.heard_at = ip, trio.current_time()
        self._send, self._receive = send, receive
        self._left = b""

    async def receive_some(self, memory: memoryview) -> int:
        while not self._left:
            try:
                self._left = await self._receive.receive()
            except (trio.EndOfChannel, trio.ClosedResourceError):
                raise ConnectionLostError("closed") from None
        amount = min(len(memory), len(self._left))
        memory[:amount], self._left = self._left[:amount], self._left[amount:]
        return amount

    async def send_all(self, *views: bytes | memoryview) -> None:
        try:
            await self._send.send(b"".join(views))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ConnectionLostError("closed") from None

    def close(self) -> None:
        self._send.close()
        self._receive.close()

    def tcp_info(self) -> None:
        return None


@dataclass
class Victim:
    pool: BulkPool
    budget: ByteBudget
    tasks: anyio.abc.TaskGroup
    heard: list[NodeId]
    ips: dict[NodeId, str] = field(default_factory=dict[NodeId, str])
    members: set[NodeId] = field(default_factory=set[NodeId])
    names: count[int] = field(default_factory=count)

    def standing_of(self, peer: NodeId) -> PeerStanding:
        return PeerStanding(self.ips[peer], peer in self.members)

    async def offered(self, ip: str, name: str = "", size: int = SHARE) -> tuple[Stranger, PacketKind]:
        """A new peer that has offered a body, and the node's answer."""
        peer = NodeId(name or f"name {next(self.names)}")
        self.ips[peer] = ip
        there, back = trio.open_memory_channel[bytes](64), trio.open_memory_channel[bytes](64)
        near = End("", there[0], back[1])
        self.tasks.start_soon(self.pool.welcome, peer, End(ip, back[0], there[1]))
        await greet_as_dialler(near, 0)
        stranger = Stranger(near)
        await stranger.send(PacketKind.OFFER, 1, encode(frame_of(bytes(size), "swallow")).head)
        return stranger, (await stranger.receive())[0].kind

    async def seconds_to_deliver(self, ip: str, name: str, size: int = SHARE) -> float:
        """How long an honest body takes."""
        began = trio.current_time()
        sender, kind = await self.offered(ip, name, size)
        while kind is PacketKind.WAIT:
            kind = (await sender.receive())[0].kind
        assert kind is PacketKind.ACCEPT
        await sender.send(PacketKind.PIECE, 1, bytes(size), extra=0)
        await until(lambda: NodeId(name) in self.heard)
        sender.stream.close()
        return trio.current_time() - began


@asynccontextmanager
async def victim() -> AsyncGenerator[Victim]:
    """A node with memory for four bodies."""
    server, budget, heard = RequestServer(), ByteBudget(4 * SHARE, SHARE), list[NodeId]()

    async def swallow(peer: NodeId, _: Frame) -> Frame:
        heard.append(peer)
        return Frame("answer")

    async def unreachable(_: NodeId) -> End:
        raise ConnectionLostError("nobody knows where it listens")

    server.serve("swallow", swallow, LIMITS, 16)
    reputation = Reputation(anyio.current_time)
    async with (
        bulk_pool(NodeId("victim"), server, unreachable, budget=budget, reputation=reputation) as pool,
        anyio.create_task_group() as tasks,
    ):
        made = Victim(pool, budget, tasks, heard)
        budget.share_by(made.standing_of)
        yield made
        tasks.cancel_scope.cancel()


def in_virtual_time(scenario: Callable[[Victim], Awaitable[None]]) -> None:
    async def main() -> None:
        async with victim() as node:
            await scenario(node)

    run(main, clock=MockClock(autojump_threshold=0.001))


async def _reserve_and_stall(node: Victim, ip: str) -> None:
    """Offer a body and send nothing, with a new name after each loss."""
    while True:
        stranger, _ = await node.offered(ip)
        try:
            while True:
                await stranger.receive()
        except ConnectionLostError:
            stranger.stream.close()


async def _besieged(node: Victim, ips: list[str]) -> None:
    """Take all memory for names that send nothing."""
    for ip in ips:
        node.tasks.start_soon(_reserve_and_stall, node, ip)
    await until(lambda: node.budget.waiting == len(ips) - 4)
    assert node.budget.used == 4 * SHARE


@pytest.mark.parametrize("ips", GREEDY.values(), ids=GREEDY.keys())
def test_names_of_one_network_that_hold_all_memory_and_stall_do_not_keep_it_from_others(ips: list[str]) -> None:
    async def scenario(node: Victim) -> None:
        await _besieged(node, ips)
        for number in range(5):
            assert await node.seconds_to_deliver(f"{20 + number}.1.1.1", f"honest {number}") <= SOON

    in_virtual_time(scenario)


def test_a_second_host_of_a_greedy_network_gets_memory() -> None:
    async def scenario(node: Victim) -> None:
        await _besieged(node, GREEDY["a host"])
        assert await node.seconds_to_deliver("9.9.9.7", "honest") <= SOON

    in_virtual_time(scenario)


@pytest.mark.parametrize("ips", [["9.9.9.9"] * NAMES, [""] * NAMES, [f"{n}.1.1.1" for n in range(20, 20 + NAMES)]])
def test_a_member_is_served_before_strangers_wherever_they_are(ips: list[str]) -> None:
    async def scenario(node: Victim) -> None:
        node.members.add(NodeId("member"))
        await _besieged(node, ips)
        assert await node.seconds_to_deliver(ips[0], "member") <= SOON

    in_virtual_time(scenario)


def test_what_was_reserved_over_a_connection_that_ended_goes_to_others() -> None:
    async def scenario(node: Victim) -> None:
        for number in range(4):
            stranger, kind = await node.offered(f"9.9.9.{number}")
            assert kind is PacketKind.ACCEPT
            stranger.stream.close()
        assert await node.seconds_to_deliver("20.1.1.1", "honest") <= SOON

    in_virtual_time(scenario)


def test_a_network_alone_uses_all_memory_and_may_pause() -> None:
    async def scenario(node: Victim) -> None:
        peers = [await node.offered(f"9.9.9.{number}") for number in range(4)]
        assert [kind for _, kind in peers] == [PacketKind.ACCEPT] * 4
        await anyio.sleep(2 * CONTESTED_GRACE_SECONDS)
        for stranger, _ in peers:
            await stranger.send(PacketKind.PIECE, 1, bytes(SHARE), extra=0)
        await until(lambda: len(node.heard) == 4)

    in_virtual_time(scenario)


def test_who_moves_keeps_memory_that_others_wait_for_longer_than_who_does_not() -> None:
    async def scenario(node: Victim) -> None:
        (moving, _), *_ = [await node.offered("9.9.9.9") for _ in range(4)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.seconds_to_deliver, "20.1.1.1", "honest")
            for block in range(3):
                await anyio.sleep(0.4 * CONTESTED_GRACE_SECONDS)
                await moving.send(PacketKind.PIECE, 1, bytes(BLOCK_BYTES), extra=block * BLOCK_BYTES)
        await until(lambda: len(node.heard) == 2)

    in_virtual_time(scenario)
