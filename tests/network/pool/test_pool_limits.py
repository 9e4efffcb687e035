"""Memory, upload and numbers of connections stay within their limits, and what waits for them is served."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace

import anyio
import psutil
import pytest

from neuroshard.errors import NetworkRefusedError
from neuroshard.messages import Frame, encode
from neuroshard.network import PeerRefusedError
from neuroshard.network.limits import ByteBudget, UploadPacer
from neuroshard.network.pool import PoolOptions, tcp
from neuroshard.network.pool.pool import MAX_HANDSHAKES
from neuroshard.network.pool.secure_stream import GreetingVerdict, greet_as_dialler
from neuroshard.network.pool.transfers import PacketKind
from neuroshard.network.tcp_options import UNSENT_BYTES
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import (
    LIMITS,
    MIB,
    POOL_LOOPBACK,
    Node,
    digest_of,
    frame_of,
    node,
    run,
    secured,
    stranger,
    two_nodes,
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


def test_a_thousand_connections_are_bounded_and_honest_peers_still_served() -> None:
    async def scenario() -> None:
        async with two_nodes(listener_options=replace(POOL_LOOPBACK, handshake_seconds=1.0)) as (a, b):
            with ExitStack() as stack:
                for number in range(1000):
                    raw = stack.enter_context(socket.socket())
                    raw.setblocking(False)
                    raw.connect_ex(b.pool.endpoint())
                    if number % 50 == 0:  # the system itself keeps only so many that nobody accepted yet
                        await until(lambda number=number: b.pool.turned_away + MAX_HANDSHAKES >= number)
                await until(lambda: b.pool.turned_away >= 800)
                assert len(psutil.Process().net_connections()) < 1000 + MAX_HANDSHAKES + 20
                assert b.pool.connection_count == 0
                await anyio.sleep(1.2)  # those that were let in have not greeted in time
                assert (await a.ask(b, frame_of(b"fine"))).tensors[0].data == b"fine"

    run(scenario)


def test_a_peer_gets_so_many_connections_and_no_more() -> None:
    async def scenario() -> None:
        async with node(2, replace(POOL_LOOPBACK, max_connections_per_peer=3)) as b:
            streams = [await secured(b.pool.endpoint()) for _ in range(6)]
            key = identity_of(9).key
            verdicts = [(await greet_as_dialler(stream, key, b.id, digest_of(stream))).verdict for stream in streams]
            assert verdicts == [GreetingVerdict.WELCOME] * 3 + [GreetingVerdict.FULL] * 3
            for stream in streams:
                stream.close()
            await until(lambda: b.pool.connection_count == 0)
            async with stranger(b, 9):
                pass

    run(scenario)


def test_all_peers_together_get_so_many_connections_and_no_more() -> None:
    async def scenario() -> None:
        async with node(2, replace(POOL_LOOPBACK, max_connections=16)) as b:
            verdicts: list[GreetingVerdict] = []
            for number in range(10, 30):
                stream = await secured(b.pool.endpoint())
                reception = await greet_as_dialler(stream, identity_of(number).key, b.id, digest_of(stream))
                verdicts.append(reception.verdict)
                if verdicts[-1] is not GreetingVerdict.WELCOME:
                    stream.close()
                else:
                    streams.append(stream)
            assert verdicts == [GreetingVerdict.WELCOME] * 16 + [GreetingVerdict.FULL] * 4
            for stream in streams:
                stream.close()

    streams = []  # type: ignore[var-annotated]
    run(scenario)


def test_a_listener_with_few_places_is_used_with_few_connections() -> None:
    async def scenario() -> None:
        few = replace(POOL_LOOPBACK, max_connections_per_peer=2)
        async with two_nodes(PoolOptions(host="127.0.0.1", fixed_connections=8), few) as (a, b):
            await _echo(a, b, bytes(8 * MIB))
            await anyio.sleep(0.5)
            await _echo(a, b, bytes(8 * MIB))
            assert b.pool.connection_count <= 2

    run(scenario)


def test_a_port_that_is_taken_is_told() -> None:
    async def scenario() -> None:
        async with node(1) as a:
            port = a.pool.endpoint()[1]
            with pytest.RaisesGroup(pytest.RaisesExc(NetworkRefusedError, match=str(port))):
                async with node(2, replace(POOL_LOOPBACK, port=port)):
                    pass

    run(scenario)


def test_an_address_that_is_none_is_told() -> None:
    async def scenario() -> None:
        with pytest.RaisesGroup(pytest.RaisesExc(NetworkRefusedError, match="nonsense")):
            async with node(2, replace(POOL_LOOPBACK, host="nonsense")):
                pass

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


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot limit what they have not sent once")
def test_the_queue_in_front_of_a_slow_line_is_short() -> None:
    """Otherwise the answer to a peer's transfer waits until this node's own transfer has left."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as sender:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        tcp.set_up(sender, None)
        sender.setblocking(True)
        sender.connect(listener.getsockname())
        sender.setblocking(False)
        receiver, _ = listener.accept()
        with receiver:
            accepted = 0
            with suppress(BlockingIOError):
                while True:
                    accepted += sender.send(bytes(16 * 1024))
    assert 0 < accepted < 3 * UNSENT_BYTES
