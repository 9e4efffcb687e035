"""A run of friends over real sockets: nodes without a pass get nothing by any protocol, and take nothing away."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import anyio
import pytest

from neuroshard.membership.connectivity import WANTED_CONNECTIONS, Networking
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import Network, PeerRefusedError
from neuroshard.network.libp2p.gossip_messages import Item, ItemKind, topic_id
from neuroshard.network.libp2p.gossip_router import MOST_DEGREE, GossipRouter
from neuroshard.network.membership_gate import MembershipGate
from neuroshard.network.pool.transfers import BLOCK_BYTES, EAGER_BLOCKS
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import LOOPBACK, address_of, nodes, run

TOPIC, LARGE = "reports", 4 << 20
NO_PASS = "it has not shown a pass"


def close_to(network: Network, strangers: set[NodeId]) -> None:
    network.gate.close(lambda peer: NO_PASS if peer in strangers else "")


def test_a_node_without_a_pass_gets_no_answer_no_bytes_and_no_gossip() -> None:
    async def scenario() -> None:
        async with nodes(3) as (a, b, stranger):
            come, tried = list[NodeId](), list[NodeId]()

            async def take(sender: NodeId, request: Frame) -> Frame:
                await anyio.lowlevel.checkpoint()
                come.append(sender)
                return Frame(request.kind)

            def check(sender: NodeId, _data: bytes) -> bool:
                tried.append(sender)
                return True

            heard = defaultdict[NodeId, list[bytes]](list)
            for network in (a, b):
                close_to(network, {stranger.transport.local_id})
                network.transport.serve("part", take, FrameLimits(max_body_bytes=LARGE))
            subscriptions = {one.transport.local_id: one.gossip.subscribe(TOPIC, check) for one in (a, b, stranger)}
            for one, other in ((a, b), (stranger, a), (stranger, b)):
                await one.transport.connect(address_of(other))

            async def listen(node: NodeId) -> None:
                while True:
                    data = await subscriptions[node].receive()
                    heard[node].append(data)

            async with anyio.create_task_group() as tasks:
                for node in subscriptions:
                    tasks.start_soon(listen, node)
                for size in (10, LARGE):
                    frame = Frame("part", {}, (TensorPart(TensorSpec("x", "uint8", (size,)), bytes(size)),))
                    await b.transport.request(a.transport.local_id, frame, timeout_seconds=20)
                    with pytest.raises(PeerRefusedError, match=NO_PASS):
                        await stranger.transport.request(a.transport.local_id, frame, timeout_seconds=20)
                (line,) = [one for one in a.transport.connections() if one.peer == stranger.transport.local_id]
                assert line.bytes_received < EAGER_BLOCKS * BLOCK_BYTES + (256 << 10)
                assert set(come) == {b.transport.local_id}
                for number in range(3):
                    await stranger.gossip.publish(TOPIC, b"lie %d" % number)
                    await a.gossip.publish(TOPIC, b"report %d" % number)
                await until(lambda: len(heard[b.transport.local_id]) == 3)
                await anyio.sleep(2.5)  # two heartbeats: ids would be offered by then
                tasks.cancel_scope.cancel()
            assert heard == {b.transport.local_id: [b"report %d" % number for number in range(3)]}
            assert set(tried) == {a.transport.local_id}

    run(scenario)


def test_no_number_of_strangers_takes_a_gossip_link_from_a_friend() -> None:
    """They subscribe and ask for links again and again, before and after the friends come."""
    topic, gate = topic_id(TOPIC), MembershipGate()
    strangers = [NodeId(f"stranger {number:03d}") for number in range(200)]
    friends = [NodeId(f"friend {number}") for number in range(3)]
    gate.close(lambda peer: NO_PASS if peer in strangers else "")
    router = GossipRouter(Random(1), gate=gate)
    router.subscribe(topic, 0.0)

    def ask(peers: list[NodeId], now: float) -> None:
        for peer in peers:
            router.join(peer)
            for kind in (ItemKind.SUBSCRIBE, ItemKind.GRAFT):
                router.handle(peer, Item(kind, topic), now, lambda *_: True)

    for now in range(1, 40):
        ask(strangers, float(now))
        if now == 10:
            ask(friends, 10.0)
        router.heartbeat(now + 0.5)
        links = router.links(topic)
        assert len(links) <= MOST_DEGREE + len(friends)
        if now > 10:
            assert set(friends) <= set(links)
            messages = [peer for peer, item in router.publish(topic, b"%d" % now, now + 0.6) if item.payload]
            assert {peer for peer in messages if peer not in strangers} == set(friends)


@asynccontextmanager
async def opened(network: Network) -> AsyncGenerator[Network]:
    yield network


def test_strangers_that_connect_keep_a_node_from_no_friend(tmp_path: Path) -> None:
    """As many of them as it wants connections."""

    async def scenario() -> None:
        async with nodes(WANTED_CONNECTIONS + 2, LOOPBACK) as (one, friend, *strangers):
            for stranger in strangers:
                await stranger.transport.connect(address_of(one))
            networking = Networking(
                identity_of(1).node_id, lambda: opened(one), peers_file=tmp_path / "peers", loopback_only=True
            )
            networking.close_to_others(lambda peer: "" if peer == friend.transport.local_id else NO_PASS)
            networking.book.add([address_of(friend)])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(networking.run)
                with anyio.fail_after(30):
                    await until(lambda: friend.transport.local_id in one.transport.peers())
                tasks.cancel_scope.cancel()

    run(scenario)
