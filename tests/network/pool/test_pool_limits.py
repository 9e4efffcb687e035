"""Memory, upload and numbers of connections stay within their limits, and what waits for them is served."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from itertools import cycle, islice

import anyio
import pytest
import trio

from neuroshard.messages import Frame, encode
from neuroshard.network import PeerRefusedError
from neuroshard.network.libp2p.bodies import upgraded_for_bodies
from neuroshard.network.libp2p.sockets import SocketBytes
from neuroshard.network.limits import ByteBudget, UploadPacer
from neuroshard.network.pool import PoolOptions
from neuroshard.network.pool.greeting import GreetingVerdict, greet_as_dialler
from neuroshard.network.pool.options import ConnectionLostError, PeerFullError
from neuroshard.network.pool.transfers import PacketKind
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import (
    LIMITS,
    MIB,
    POOL_LOOPBACK,
    Node,
    Stranger,
    before_greeting,
    frame_of,
    node,
    run,
    stranger,
    two_nodes,
    upgrader_of,
)


def test_frames_wait_for_memory_and_all_arrive() -> None:
    data = [bytes([number]) * (3 * MIB) for number in range(10)]
    most = 0

    async def scenario() -> None:
        budget = ByteBudget(8 * MIB, 4 * MIB)
        async with node(1) as a, node(2, budget=budget) as b, anyio.create_task_group() as tasks:

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, b.budget.used)
                    await anyio.sleep(0)

            tasks.start_soon(watch)
            async with anyio.create_task_group() as asking:
                for one in data:
                    asking.start_soon(_echo, a, b, one)
            tasks.cancel_scope.cancel()
            assert b.budget.used == 0

    run(scenario)
    assert most == 3 * MIB


async def _echo(a: Node, b: Node, data: bytes) -> None:
    assert (await a.ask(b, frame_of(data))).tensors[0].data == data


def test_what_came_before_there_was_memory_is_asked_for_again() -> None:
    async def scenario() -> None:
        budget = ByteBudget(2 * MIB, 2 * MIB)
        async with node(2, budget=budget) as b, stranger(b) as peer:
            held = await budget.reserve(NodeId("other"), 2 * MIB)
            data = bytes(range(256)) * (2 * MIB // 256)
            await peer.send(PacketKind.OFFER, 1, encode(frame_of(data, "swallow")).head)
            await peer.send(PacketKind.PIECE, 1, data[:MIB], extra=0)
            assert (await peer.receive())[0].kind is PacketKind.WAIT
            held.release()
            header, dropped = await peer.receive()
            assert (header.kind, dropped) == (PacketKind.ACCEPT, b"\xff\xff\0\0")
            await peer.send(PacketKind.PIECE, 1, data[MIB:], extra=MIB)
            await peer.send(PacketKind.PIECE, 1, data[:MIB], extra=0)
            assert (await peer.receive())[0].kind is PacketKind.DONE
            await until(lambda: len(b.heard) == 1)

    run(scenario)


def test_two_nodes_that_wait_for_each_others_memory_do_not_stop_each_other() -> None:
    async def scenario() -> None:
        async with (
            node(1, budget=ByteBudget(4 * MIB, 4 * MIB)) as a,
            node(2, budget=ByteBudget(4 * MIB, 4 * MIB)) as b,
            anyio.create_task_group() as tasks,
        ):
            for number in range(8):
                tasks.start_soon(_echo, a, b, bytes([number]) * (3 * MIB))
                tasks.start_soon(_echo, b, a, bytes([number]) * (3 * MIB))

    run(scenario)


def test_a_frame_above_the_peers_memory_is_refused() -> None:
    async def scenario() -> None:
        async with node(1) as a, node(2, budget=ByteBudget(2 * MIB, MIB)) as b:
            with pytest.raises(PeerRefusedError, match="above the limit"):
                await a.ask(b, frame_of(bytes(MIB + 1)))

    run(scenario)


def test_the_upload_limit_holds() -> None:
    async def scenario() -> None:
        async with node(1, pacer=UploadPacer(4 * MIB)) as a, node(2) as b:
            started = anyio.current_time()
            await a.ask(b, frame_of(bytes(6 * MIB), "swallow"))
            seconds = anyio.current_time() - started
            assert seconds > (6 * MIB - 2 * MIB) / (4 * MIB)
            assert seconds < 10

    run(scenario)


async def _welcomed(b: Node, numbers: Iterable[int], places: ExitStack) -> list[bool]:
    """Whether each of these identities got one more connection."""
    answers = list[bool]()
    for number in numbers:
        stream = await before_greeting(b, number)
        places.callback(stream.close)
        try:
            await greet_as_dialler(stream, 0)
        except PeerFullError:
            answers.append(False)
        else:
            answers.append(True)
    return answers


def test_a_peer_gets_so_many_connections_and_no_more() -> None:
    async def scenario() -> None:
        async with node(2, replace(POOL_LOOPBACK, max_connections_per_peer=3)) as b:
            with ExitStack() as places:
                assert await _welcomed(b, [9] * 6, places) == [True] * 3 + [False] * 3
            await until(lambda: b.pool.connection_count == 0)
            async with stranger(b, 9):
                pass

    run(scenario)


def test_all_peers_together_get_so_many_connections_and_no_more() -> None:
    async def scenario() -> None:
        async with node(2, replace(POOL_LOOPBACK, max_connections=16)) as b:
            with ExitStack() as places:
                assert await _welcomed(b, range(10, 30), places) == [True] * 16 + [False] * 4

    run(scenario)


class SilentStream:
    """A connection from any address that greets and then says nothing."""

    def __init__(self, ip: str) -> None:
        self.ip = ip
        self.heard_at = trio.current_time()
        self.has_verdict = trio.Event()
        self._verdict: int | None = None
        self._greeting = b"\1" * 8
        self._closed = trio.Event()

    async def receive_some(self, memory: memoryview) -> int:
        if not self._greeting:
            await self._closed.wait()
            raise ConnectionLostError("it was closed")
        count = len(self._greeting)
        memory[:count], self._greeting = self._greeting, b""
        return count

    async def send_all(self, *views: bytes | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        self._verdict = views[0][0]
        self.has_verdict.set()

    def close(self) -> None:
        self._closed.set()

    def tcp_info(self) -> None:
        return None

    @property
    def is_welcome(self) -> bool:
        return self._verdict == GreetingVerdict.WELCOME and not self._closed.is_set()


GREEDY = {
    "a host": ["9.9.9.9"],
    "a /24": [f"9.9.9.{number}" for number in range(250)],
    "a /16": [f"9.9.{number}.1" for number in range(250)],
    "a /64": [f"2606:4700:1:1::{number:x}" for number in range(250)],
    "a /48": [f"2606:4700:1:{number:x}::1" for number in range(250)],
    "relays": [""],
}


@pytest.mark.parametrize("ips", GREEDY.values(), ids=GREEDY.keys())
def test_a_network_that_holds_every_place_leaves_some_to_others(ips: list[str]) -> None:
    async def scenario() -> None:
        async with node(2, replace(POOL_LOOPBACK, max_connections=64)) as b, anyio.create_task_group() as tasks:

            async def knock(ip: str, number: int) -> SilentStream:
                stream = SilentStream(ip)
                tasks.start_soon(b.pool.welcome, identity_of(number).node_id, stream)
                await stream.has_verdict.wait()
                return stream

            greedy = [await knock(ip, 100 + number // 16) for number, ip in enumerate(islice(cycle(ips), 200))]
            assert [one.is_welcome for one in greedy] == [True] * 64 + [False] * 136
            assert b.pool.has_room_for(identity_of(50).node_id, 0)  # for one that this node dials
            greedy[0].heard_at += 1000.0
            honest = [await knock(f"{20 + number}.1.1.1", 50 + number) for number in range(10)]
            assert all(one.is_welcome for one in honest)
            assert [one.is_welcome for one in greedy[:64]] == [True] + [False] * 10 + [True] * 53
            again = [await knock(ip, 200 + number // 16) for number, ip in enumerate(islice(cycle(ips), 200))]
            assert not any(one.is_welcome for one in again)
            assert all(one.is_welcome for one in honest)
            await until(lambda: b.pool.connection_count == 64)
            tasks.cancel_scope.cancel()

    run(scenario)


async def _from_another_network(peer: Node) -> SocketBytes:
    """A connection from 127.9.9.9."""
    sock = trio.socket.socket()
    await sock.bind(("127.9.9.9", 0))
    await sock.connect(peer.door.endpoint())
    return SocketBytes(trio.SocketStream(sock))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux uses all of 127.0.0.0/8 for itself")
def test_a_body_arrives_while_another_network_holds_every_place() -> None:
    """Real sockets: 127.0.0.0/24 takes all places, and a sender from 127.9.9.0/24 delivers."""

    async def scenario() -> None:
        async with node(2, replace(POOL_LOOPBACK, max_connections=16)) as b, AsyncExitStack() as places:
            for number in range(10, 26):
                greedy = await places.enter_async_context(stranger(b, number))
                await greedy.send(PacketKind.OFFER, 1, encode(frame_of(bytes(MIB), "swallow")).head)
            with pytest.raises(PeerFullError):
                await places.enter_async_context(stranger(b, 26))
            raw = await _from_another_network(b)
            stream = await upgraded_for_bodies(upgrader_of(identity_of(9)), b.id, raw)
            places.callback(stream.close)
            await greet_as_dialler(stream, 0)
            honest = Stranger(stream)
            body = bytes(range(256)) * (MIB // 256)
            await honest.send(PacketKind.OFFER, 1, encode(frame_of(body, "swallow")).head)
            await honest.send(PacketKind.PIECE, 1, body, extra=0)
            await until(lambda: len(b.heard) == 1)

    run(scenario)


def test_a_listener_with_few_places_is_used_with_few_connections() -> None:
    async def scenario() -> None:
        few = replace(POOL_LOOPBACK, max_connections_per_peer=2)
        async with two_nodes(PoolOptions(fixed_connections=8), few) as (a, b):
            await _echo(a, b, bytes(8 * MIB))
            await anyio.sleep(0.5)
            await _echo(a, b, bytes(8 * MIB))
            assert b.pool.connection_count <= 2

    run(scenario)


def test_a_busy_kind_does_not_hold_up_another() -> None:
    async def wait(_: NodeId, __: Frame) -> Frame:
        await anyio.sleep_forever()
        raise AssertionError

    async def scenario() -> None:
        async with two_nodes() as (a, b), anyio.create_task_group() as tasks:
            b.server.serve("wait", wait, LIMITS, 1)
            for _ in range(3):
                tasks.start_soon(_ask, a, b, frame_of(bytes(MIB), "wait"))
            await anyio.sleep(0.05)
            await _echo(a, b, b"quick")
            tasks.cancel_scope.cancel()

    run(scenario)


async def _ask(a: Node, b: Node, frame: Frame) -> None:
    await a.ask(b, frame)
