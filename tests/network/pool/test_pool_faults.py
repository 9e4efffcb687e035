"""Connections that break, lines that go silent, nodes that leave: transfers go on where they stopped."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from random import Random

import anyio
import psutil
import pytest

from neuroshard.messages import Frame, encode
from neuroshard.network import PeerUnreachableError, RequestTimeoutError, TransportClosedError
from neuroshard.network.limits import UploadPacer
from neuroshard.network.pool import PoolOptions
from neuroshard.network.pool.transfers import PacketKind
from neuroshard.types import NodeId
from tests.worlds.clock import until
from tests.worlds.network_nodes import (
    LIMITS,
    MIB,
    POOL_LOOPBACK,
    Line,
    Node,
    frame_of,
    line_to,
    node,
    run,
    stranger,
    two_nodes,
)

SLOW = 24 * MIB  # bytes a second: slow enough to be interrupted
DATA = Random(3).randbytes(24 * MIB)
LOST_ON_THE_WAY = 9 * MIB  # what buffers of two sockets, a line and TLS may hold of each connection


@asynccontextmanager
async def nodes_with_a_line(connections: int) -> AsyncGenerator[tuple[Node, Node, Line]]:
    options = replace(POOL_LOOPBACK, fixed_connections=connections)
    async with (
        node(1, options, pacer=UploadPacer(SLOW)) as a,
        node(2, options, pacer=UploadPacer(SLOW)) as b,
        line_to(b.door.endpoint()) as line,
    ):
        yield a, b, line


def test_a_transfer_goes_on_when_its_only_connection_breaks() -> None:
    async def scenario() -> None:
        async with nodes_with_a_line(1) as (a, b, line), anyio.create_task_group() as tasks:

            async def cut_twice() -> None:
                for part in (8, 16):
                    await until(lambda part=part: line.bytes_there > part * MIB)
                    line.cut()

            tasks.start_soon(cut_twice)
            answer = await a.ask(b, frame_of(DATA, "swallow"), via=line.endpoint)
            assert answer.kind == "answer"
            assert len(b.heard) == 1
            assert line.connections == 3
            assert len(DATA) < line.bytes_there < len(DATA) + LOST_ON_THE_WAY

    run(scenario)


def test_an_answer_goes_on_too() -> None:
    async def scenario() -> None:
        async with nodes_with_a_line(1) as (a, b, line), anyio.create_task_group() as tasks:

            async def cut() -> None:
                await until(lambda: line.bytes_back > 12 * MIB)
                line.cut()

            tasks.start_soon(cut)
            answer = await a.ask(b, frame_of(DATA), via=line.endpoint)
            assert answer.tensors[0].data == DATA
            assert len(b.heard) == 1
            assert line.bytes_there < len(DATA) + MIB
            assert line.bytes_back < len(DATA) + LOST_ON_THE_WAY

    run(scenario)


def test_one_of_four_connections_breaks() -> None:
    async def scenario() -> None:
        async with nodes_with_a_line(4) as (a, b, line), anyio.create_task_group() as tasks:

            async def cut() -> None:
                await until(lambda: line.bytes_there > 12 * MIB and line.connections == 4)
                line.cut(2)

            tasks.start_soon(cut)
            answer = await a.ask(b, frame_of(DATA), via=line.endpoint)
            assert answer.tensors[0].data == DATA
            assert line.bytes_there < len(DATA) + LOST_ON_THE_WAY

    run(scenario)


@pytest.mark.parametrize("fault", ["dies", "stalls"])
def test_one_of_sixteen_connections(fault: str) -> None:
    async def scenario() -> None:
        # The stalled one is closed 12 s after the last piece, or 22 s if it also got the second repeated offer.
        # The receiver gives up after 36 s, as 66 s and 148 s by default.
        options = replace(POOL_LOOPBACK, fixed_connections=16, grace_seconds=4.0, min_bytes_per_second=32 * 1024)
        async with (
            node(1, options, pacer=UploadPacer(SLOW)) as a,
            node(2, options, pacer=UploadPacer(SLOW)) as b,
            line_to(b.door.endpoint()) as line,
            anyio.create_task_group() as tasks,
        ):
            await a.ask(b, frame_of(bytes(MIB), "swallow"), via=line.endpoint)
            await until(lambda: a.pool.connection_count == 16)
            before = line.bytes_there

            async def break_one() -> None:
                await until(lambda: line.bytes_there > before + 8 * MIB)
                if fault == "dies":
                    line.cut(7)
                else:
                    line.stalled = {7}

            tasks.start_soon(break_one)
            answer = await a.ask(b, frame_of(DATA), via=line.endpoint)
            assert answer.tensors[0].data == DATA
            assert [frame.kind for frame in b.heard] == ["swallow", "echo"]
            assert line.bytes_there - before < len(DATA) + LOST_ON_THE_WAY
            assert not a.reputation.banned_peers()
            assert not b.reputation.banned_peers()

    run(scenario)


def test_one_of_sixteen_connections_lies() -> None:
    """Its chunk ends the transfer and is blamed once. The other connections carry the next one."""

    async def scenario() -> None:
        async with node(2) as b, AsyncExitStack() as open_ones:
            peers = [await open_ones.enter_async_context(stranger(b)) for _ in range(16)]
            body = DATA[: 16 * MIB]
            parts = [body[start : start + MIB] for start in range(0, len(body), MIB)]
            for number, lie in ((1, 7), (2, None)):
                await peers[0].send(PacketKind.OFFER, number, encode(frame_of(body, "swallow")).head)
                assert (await peers[0].receive())[0].kind is PacketKind.ACCEPT
                order = [part for part in range(16) if part != lie] + ([] if lie is None else [lie])
                for part in order:
                    data = bytes(MIB) if part == lie else parts[part]
                    await peers[part].send(PacketKind.PIECE, number, data, extra=part * MIB)
                teller = peers[0 if lie is None else lie]
                header, _ = await teller.receive()
                assert header.transfer == number
                assert header.kind is (PacketKind.DONE if lie is None else PacketKind.REFUSE)
            await until(lambda: [frame.kind for frame in b.heard] == ["swallow"])
            assert b.reputation.refused() == (("digest_mismatch", 1),)
            assert b.pool.connection_count == 16

    run(scenario)


def test_the_line_is_down_for_a_while() -> None:
    async def scenario() -> None:
        async with nodes_with_a_line(2) as (a, b, line), anyio.create_task_group() as tasks:

            async def break_and_mend() -> None:
                await until(lambda: line.bytes_there > 12 * MIB)
                line.is_down = True
                line.cut()
                await anyio.sleep(1.0)
                line.is_down = False

            tasks.start_soon(break_and_mend)
            answer = await a.ask(b, frame_of(DATA), via=line.endpoint)
            assert answer.tensors[0].data == DATA
            assert line.bytes_there < len(DATA) + 2 * LOST_ON_THE_WAY

    run(scenario)


def test_half_a_transfer_of_a_peer_that_is_gone_is_kept_for_a_while_and_then_forgotten() -> None:
    async def scenario() -> None:
        options = replace(POOL_LOOPBACK, resume_seconds=1.0)
        async with node(2, options) as b:
            async with node(1, options, pacer=UploadPacer(SLOW)) as a, anyio.create_task_group() as tasks:
                tasks.start_soon(_ask_in_vain, a, b)
                await until(lambda: b.budget.used == len(DATA))
                await anyio.sleep(0.1)
                a.pool.close()
            await anyio.sleep(0.3)
            assert b.budget.used == len(DATA)
            await until(lambda: b.budget.used == 0)
            assert b.heard == []

    run(scenario)


async def _ask_in_vain(a: Node, b: Node) -> None:
    with pytest.raises(TransportClosedError):
        await a.ask(b, frame_of(DATA, "swallow"))


def test_a_peer_that_is_gone_for_good_is_unreachable() -> None:
    async def scenario() -> None:
        options = replace(POOL_LOOPBACK, resume_seconds=0.5)
        async with (
            node(1, options, pacer=UploadPacer(SLOW)) as a,
            node(2, options) as b,
            line_to(b.door.endpoint()) as line,
            anyio.create_task_group() as tasks,
        ):

            async def break_down() -> None:
                await until(lambda: line.bytes_there > MIB)
                line.is_down = True
                line.cut()

            tasks.start_soon(break_down)
            started = anyio.current_time()
            with pytest.raises(PeerUnreachableError):
                await a.ask(b, frame_of(DATA), via=line.endpoint)
            assert anyio.current_time() - started < 10

    run(scenario)


def test_a_node_that_was_started_again_is_asked_again() -> None:
    async def scenario() -> None:
        async with node(1) as a:
            async with node(2) as b:
                await a.ask(b, frame_of(b"first"))
                port = b.door.endpoint()[1]
            async with node(2, port=port) as again:
                assert (await a.ask(again, frame_of(b"second"))).tensors[0].data == b"second"

    run(scenario)


def test_a_silent_line_ends_in_a_timeout() -> None:
    async def scenario() -> None:
        async with nodes_with_a_line(1) as (a, b, line):
            await a.ask(b, frame_of(b"x"), via=line.endpoint)
            line.is_silent = True
            with pytest.raises(RequestTimeoutError):
                await a.ask(b, frame_of(b"x"), via=line.endpoint, timeout=0.5)
            line.is_silent = False
            await a.ask(b, frame_of(b"x"), via=line.endpoint)

    run(scenario)


def test_a_line_that_is_silent_for_a_while_is_waited_for() -> None:
    """Longer than a closed port is: silence does not tell that the peer is gone."""

    async def scenario() -> None:
        async with nodes_with_a_line(1) as (a, b, line), anyio.create_task_group() as tasks:

            async def silence() -> None:
                await until(lambda: line.bytes_there > 12 * MIB)
                line.is_silent = True
                line.cut()
                await anyio.sleep(3.0)
                line.is_silent = False

            tasks.start_soon(silence)
            answer = await a.ask(b, frame_of(DATA), via=line.endpoint)
            assert answer.tensors[0].data == DATA
            assert len(b.heard) == 1
            assert line.bytes_there < len(DATA) + LOST_ON_THE_WAY

    run(scenario)


def test_giving_up_tells_the_peer_and_frees_its_memory() -> None:
    async def scenario() -> None:
        async with nodes_with_a_line(2) as (a, b, line):
            with anyio.move_on_after(0.4):
                await a.ask(b, frame_of(DATA), via=line.endpoint)
            await until(lambda: b.budget.used == 0)
            assert (await a.ask(b, frame_of(b"next"), via=line.endpoint)).tensors[0].data == b"next"
            assert [frame.kind for frame in b.heard] == ["echo"]

    run(scenario)


def test_idle_connections_are_closed() -> None:
    async def scenario() -> None:
        async with two_nodes(PoolOptions(fixed_connections=3, idle_seconds=2.0)) as (a, b):
            await a.ask(b, frame_of(bytes(4 * MIB)))
            await until(lambda: a.pool.connection_count == 3)
            await until(lambda: a.pool.connection_count == 0)
            await until(lambda: b.pool.connection_count == 0)

    run(scenario)


def test_ending_in_the_middle_leaves_no_socket() -> None:
    def sockets() -> int:
        return len(psutil.Process().net_connections())

    before = sockets()

    async def never(_: NodeId, __: Frame) -> Frame:
        await anyio.sleep_forever()
        raise AssertionError

    async def scenario() -> None:
        async with nodes_with_a_line(8) as (a, b, line), anyio.create_task_group() as tasks:
            b.server.serve("never", never, LIMITS, 4)
            for kind in ("echo", "swallow", "never"):
                tasks.start_soon(_ask_until_cancelled, a, b, line, kind)
            await until(lambda: line.connections == 8)
            tasks.cancel_scope.cancel()

    run(scenario)
    assert sockets() == before


async def _ask_until_cancelled(a: Node, b: Node, line: Line, kind: str) -> None:
    await a.ask(b, frame_of(DATA, kind), via=line.endpoint)
