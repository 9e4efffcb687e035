""""""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
import trio

from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import Network, PeerRefusedError, PeerUnreachableError, RequestRefusedError, RequestTimeoutError
from neuroshard.network.libp2p import NetworkParts
from neuroshard.network.libp2p.bodies import CONNECT_KIND, dialled, upgraded_for_bodies
from neuroshard.network.limits import UploadPacer
from neuroshard.network.pool import NotDeliveredError, PeerTraffic
from neuroshard.network.pool.greeting import greet_as_dialler
from neuroshard.network.pool.options import ConnectionLostError
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import LOOPBACK, address_of, echo, nodes, port_of, run, upgrader_of
from tests.worlds.processes import Program, program

MIB = 1024 * 1024
LIMITS = FrameLimits(max_body_bytes=32 * MIB)
SLOW = 24 * MIB  # bytes a second: slow enough to die in the middle


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _hold(_: NodeId, __: Frame) -> Frame:
    _say("asked")
    await anyio.sleep_forever()
    raise AssertionError


async def _live(arguments: Sequence[str]) -> None:
    number, port = map(int, arguments)
    async with nodes(1, replace(LOOPBACK, port=port, upload_bytes_per_second=SLOW), first=number) as (here,):
        here.transport.serve("echo", echo, LIMITS)
        here.transport.serve("hold", _hold, LIMITS)
        _say(address_of(here))
        await anyio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


PROGRAM = Path(__file__)
WITHOUT_CONNECTIONS = replace(LOOPBACK, body_connections=False)


def frame_of(size: int) -> Frame:
    return Frame("echo", {}, (TensorPart(TensorSpec("x", "uint8", (size,)), bytes(range(256)) * (size // 256)),))


async def there_and_back(asker: Network, asked: Network, size: int) -> None:
    frame = frame_of(size)
    reply = await asker.transport.request(asked.transport.local_id, frame, reply=LIMITS, timeout_seconds=20)
    assert bytes(reply.tensors[0].data) == bytes(frame.tensors[0].data)


def test_large_tensors_take_direct_connections_and_small_ones_do_not() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            a.transport.serve("echo", echo, LIMITS)
            await b.transport.connect(address_of(a))
            await a.transport.connect(address_of(b))
            reply = await b.transport.request(a.transport.local_id, Frame("echo"), timeout_seconds=60)
            assert reply.tensors == ()
            assert b.transport.connections()[0].bulk_connections == 0
            await there_and_back(b, a, 8 * MIB)
            (connection,) = b.transport.connections()
            assert connection.bulk_connections > 0
            assert connection.bytes_sent > 8 * MIB
            assert connection.bytes_received > 8 * MIB

    run(scenario)


def test_a_connection_counts_as_used_while_bodies_go_over_others() -> None:
    """Otherwise a newcomer could take the place of a peer that sends bodies and nothing else."""

    async def scenario() -> None:
        async with nodes(2) as (a, b):

            async def slow(asker: NodeId, frame: Frame) -> Frame:
                streams = a.transport._connections.of(asker)
                before = streams.used_at
                await until(lambda: streams.used_at > before)
                return frame

            a.transport.serve("echo", slow, LIMITS)
            await b.transport.connect(address_of(a))
            await there_and_back(b, a, MIB)
            assert a.transport.connections()[0].bulk_connections > 0

    run(scenario)


def test_refusals_come_through_the_pool_too() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):

            async def refuse(_: NodeId, frame: Frame) -> Frame:
                raise RequestRefusedError("not today")

            a.transport.serve("echo", refuse, LIMITS)
            await b.transport.connect(address_of(a))
            with pytest.raises(PeerRefusedError, match="not today"):
                await there_and_back(b, a, MIB)

    run(scenario)


@pytest.mark.parametrize("who", ["asker", "asked", "both"])
def test_without_a_pool_large_tensors_take_the_connection_there_is(who: str) -> None:
    async def scenario() -> None:
        first = WITHOUT_CONNECTIONS if who != "asker" else LOOPBACK
        second = WITHOUT_CONNECTIONS if who != "asked" else LOOPBACK
        async with nodes(1, first) as (a,), nodes(1, second, first=2) as (b,):
            a.transport.serve("echo", echo, LIMITS)
            await b.transport.connect(address_of(a))
            await there_and_back(b, a, 4 * MIB)
            assert b.transport.connections()[0].bulk_connections == 0
            assert b.transport.connections()[0].bytes_sent > 4 * MIB

    run(scenario)


def test_who_was_dialled_asks_the_other_to_dial_again() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            b.transport.serve("echo", echo, LIMITS)
            await b.transport.connect(address_of(a))
            await there_and_back(a, b, 8 * MIB)
            for network in (a, b):
                (connection,) = network.transport.connections()
                assert connection.bulk_connections > 0

    run(scenario)


def test_a_peer_that_only_says_that_it_dialled_gets_streams() -> None:
    async def scenario() -> None:
        async with nodes(1, WITHOUT_CONNECTIONS) as (a,), nodes(1, first=2) as (b,):

            async def lie(_: NodeId, frame: Frame) -> Frame:
                return frame

            a.transport.serve("echo", echo, LIMITS)
            a.transport.serve(CONNECT_KIND, lie)
            await a.transport.connect(address_of(b))
            await there_and_back(b, a, MIB)
            assert b.transport.connections()[0].bulk_connections == 0

    run(scenario)


def test_the_upload_limit_holds_for_everything_that_is_sent() -> None:
    async def scenario() -> None:
        pacer = UploadPacer(4 * MIB)
        async with (
            nodes(1, WITHOUT_CONNECTIONS) as (a,),
            nodes(1, WITHOUT_CONNECTIONS, lambda _: NetworkParts(pacer=pacer), 2) as (b,),
        ):
            taken = anyio.Event()

            async def take(_: NodeId, frame: Frame) -> Frame:
                taken.set()
                return Frame("take")

            a.transport.serve("take", take, LIMITS)
            await b.transport.connect(address_of(a))
            began = trio.current_time()
            body = frame_of(6 * MIB).tensors
            await b.transport.request(a.transport.local_id, Frame("take", {}, body), timeout_seconds=20)
            assert 1.0 < trio.current_time() - began < 5
            await until(taken.is_set)

    run(scenario)


def test_who_has_no_connection_for_streams_gets_none_for_bodies() -> None:
    async def scenario() -> None:
        async with nodes(1) as (a,):
            place = ("127.0.0.1", port_of(a))
            stranger = identity_of(9)
            stream = await upgraded_for_bodies(upgrader_of(stranger), a.transport.local_id, await dialled(place))
            with pytest.raises(ConnectionLostError):
                await greet_as_dialler(stream, 0)
            stream.close()
            async with nodes(1, first=9) as (b,):
                await b.transport.connect(address_of(a))
                stream = await upgraded_for_bodies(upgrader_of(stranger), a.transport.local_id, await dialled(place))
                await greet_as_dialler(stream, 0)
                stream.close()

    run(scenario)


@pytest.mark.parametrize("header", [{}, {"port": 4001}, {"port": 0}, {"port": "x"}, {"host": "1.2.3.4"}])
def test_nobody_makes_a_node_dial_where_it_has_not_dialled(header: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            await b.transport.connect(address_of(a))
            with pytest.raises(PeerRefusedError):
                await b.transport.request(a.transport.local_id, Frame(CONNECT_KIND, header), timeout_seconds=60)

    run(scenario)


class ScriptedPool:
    """Fails every request."""

    def __init__(self, error: PeerUnreachableError) -> None:
        self.error = error
        self.tried = 0

    def traffic(self) -> dict[NodeId, PeerTraffic]:
        return {}

    def connections_with(self, _: NodeId) -> int:
        return 0

    async def request(self, *_: object, timeout_seconds: float) -> Frame:
        await anyio.lowlevel.checkpoint()
        self.tried += 1
        raise self.error


@asynccontextmanager
async def failing(error: PeerUnreachableError) -> AsyncGenerator[tuple[Network, Network, ScriptedPool]]:
    """An asker whose pool fails, and a connected peer."""
    async with nodes(2) as (a, b):
        a.transport.serve("echo", echo, LIMITS)
        await b.transport.connect(address_of(a))
        transport: Any = b.transport
        transport._bodies.pool = pool = ScriptedPool(error)
        yield b, a, pool


@pytest.mark.parametrize("error", [PeerUnreachableError("it may have been handled"), RequestTimeoutError("too late")])
def test_what_may_have_been_handled_is_not_sent_again_another_way(error: PeerUnreachableError) -> None:
    async def scenario() -> None:
        async with failing(error) as (asker, asked, pool):
            with pytest.raises(PeerUnreachableError) as raised:
                await there_and_back(asker, asked, MIB)
            assert str(raised.value) == str(error)
            assert pool.tried == 1

    run(scenario)


def test_a_peer_without_connections_for_bodies_is_asked_over_streams_for_a_while() -> None:
    async def scenario() -> None:
        async with failing(NotDeliveredError("nobody listens")) as (asker, asked, pool):
            await there_and_back(asker, asked, MIB)
            await there_and_back(asker, asked, MIB)
            assert pool.tried == 1

    run(scenario)


def test_connections_that_came_back_are_used_at_once() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            a.transport.serve("echo", echo, LIMITS)
            await b.transport.connect(address_of(a))
            await there_and_back(b, a, MIB)
            transport: Any = b.transport
            transport._bodies._avoid(a.transport.local_id)  # as after a dial that failed
            before = transport._pool.traffic()[a.transport.local_id].bytes_sent
            await there_and_back(b, a, MIB)
            assert transport._pool.traffic()[a.transport.local_id].bytes_sent > before + MIB

    run(scenario)


@pytest.mark.parametrize("hosts", [("127.0.0.1", "::1"), ("::1", "127.0.0.1")], ids=["to IPv6", "to IPv4"])
def test_bodies_go_on_when_a_peer_comes_back_with_the_other_address_family(hosts: tuple[str, str]) -> None:
    """The one that stays listens on IPv4 only. The other one moves, and dials it; later it is dialled there."""

    async def scenario() -> None:
        async with nodes(1) as (stays,):
            stays.transport.serve("echo", echo, LIMITS)
            for host in hosts:
                async with nodes(1, replace(LOOPBACK, host=host), first=2) as (moves,):
                    moves.transport.serve("echo", echo, LIMITS)
                    await moves.transport.connect(address_of(stays))
                    await there_and_back(moves, stays, 4 * MIB)
                    await there_and_back(stays, moves, 4 * MIB)
                    assert stays.transport.connections()[0].bulk_connections > 0
                    peer = moves.transport.local_id
                    await until(lambda peer=peer: bool(stays.transport._connections._contacts.to_dial(peer, 1.0)))
                    await stays.transport._connections.close_peer(peer)
                    await until(lambda: not moves.transport.connections())
                    await until(lambda peer=peer: not stays.transport._pool.connections_with(peer))
                    await there_and_back(stays, moves, 4 * MIB)
                    (connection,) = stays.transport.connections()
                    assert connection.is_outbound
                    assert f"/{host}/" in connection.address
                await until(lambda: not stays.transport.connections())

    run(scenario)


LATER_PHASES = ("before", "while handling", "while answering")


@pytest.mark.parametrize(
    "phase", ["while asking", *(pytest.param(phase, marks=pytest.mark.long) for phase in LATER_PHASES)]
)
def test_a_process_that_is_killed_is_unreachable_within_3_seconds_and_found_again(phase: str) -> None:
    async def scenario() -> None:
        options = replace(LOOPBACK, upload_bytes_per_second=SLOW)
        async with nodes(1, options) as (a,), trio.open_nursery() as tasks:
            async with program(PROGRAM, 2, 0) as victim:
                address = await victim.line()
                peer = await a.transport.connect(address)
                await a.transport.request(peer, frame_of(MIB), reply=LIMITS, timeout_seconds=20)
                killed_at: list[float] = []
                tasks.start_soon(_kill, phase, a, victim, killed_at)
                if phase == "before":
                    await until(lambda: bool(killed_at))
                frame = frame_of(24 * MIB)
                question = Frame("hold", {}, frame.tensors) if phase == "while handling" else frame
                with pytest.raises(PeerUnreachableError) as raised:
                    await a.transport.request(peer, question, reply=LIMITS, timeout_seconds=30)
                assert not isinstance(raised.value, RequestTimeoutError)
                assert trio.current_time() - killed_at[0] < 3.0
            async with program(PROGRAM, 2, address.split("/")[4]) as restarted:
                assert await restarted.line() == address
                await a.transport.request(peer, frame_of(MIB), reply=LIMITS, timeout_seconds=20)
                assert a.transport.connections()[0].bulk_connections > 0

    run(scenario)


async def _kill(phase: str, asker: Network, victim: Program, killed_at: list[float]) -> None:
    (before,) = asker.transport.connections()
    match phase:
        case "while asking":
            await until(lambda: asker.transport.connections()[0].bytes_sent > before.bytes_sent + 8 * MIB)
        case "while handling":
            assert await victim.line() == "asked"
        case "while answering":
            await until(lambda: asker.transport.connections()[0].bytes_received > before.bytes_received + 8 * MIB)
    killed_at.append(trio.current_time())
    victim.kill()


if __name__ == "__main__":
    trio.run(_live, sys.argv[1:])
