"""Connections for bodies with peers that lie, flood, were banned or evicted, or with too few resources here."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import anyio
import pytest
import trio
from trio.testing import MockClock

from neuroshard.messages import Frame
from neuroshard.network import Network, PeerRefusedError, PeerUnreachableError, RequestTimeoutError
from neuroshard.network.libp2p.bodies import CONNECT_KIND, BodyStream, dialled, upgraded_for_bodies
from neuroshard.network.libp2p.peer_limits import ConnectionLimits
from neuroshard.network.libp2p.places import DIAL_WINDOW_SECONDS
from neuroshard.network.libp2p.tls import TLS_PROTOCOL, signed_key
from neuroshard.network.pool import PoolOptions, pool
from neuroshard.network.pool.greeting import receive_bytes
from neuroshard.network.pool.options import MOST_CONNECTIONS, ConnectionLostError
from neuroshard.network.reputation import ScoreReason
from neuroshard.types import NodeId
from tests.network.libp2p.test_libp2p_bulk import LIMITS, MIB, WITHOUT_CONNECTIONS, frame_of, there_and_back
from tests.network.libp2p.test_libp2p_tls import certificate_of, hostile, key_of_unknown_kind
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import LOOPBACK, address_of, echo, line_to, nodes, port_of, run, upgrader_of

IDLE_SECONDS = PoolOptions().idle_seconds


def inside(network: Network) -> Any:
    """What a node does not show."""
    return network.transport


def upgrader_in(network: Network) -> Any:
    return inside(network)._connections._swarm._node_upgrader


def test_an_odd_certificate_on_a_further_connection_does_not_end_the_node() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            a.transport.serve("echo", echo, LIMITS)
            await b.transport.connect(address_of(a))
            odd = hostile(certificate_of(lambda own: signed_key(key_of_unknown_kind(own), b"x")))
            upgrader_in(a).security_multistream.transports[TLS_PROTOCOL] = odd
            await there_and_back(b, a, MIB)
            assert b.transport.connections()[0].bulk_connections == 0

    run(scenario)


def test_a_node_without_a_free_socket_uses_the_connection_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    async def scenario() -> None:
        async with nodes(2) as (a, b):
            a.transport.serve("echo", echo, LIMITS)
            await b.transport.connect(address_of(a))
            with monkeypatch.context() as patch:
                patch.setattr(trio.socket, "socket", refuse)
                await there_and_back(b, a, MIB)
            assert b.transport.connections()[0].bulk_connections == 0

    run(scenario)


@pytest.mark.parametrize("who", ["the peer that dialled", "the peer that was dialled"])
def test_a_ban_closes_all_connections_whoever_reported_it(who: str) -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            a.transport.serve("echo", echo, LIMITS)
            await b.transport.connect(address_of(a))
            await there_and_back(b, a, MIB)
            judge, judged = (a, b) if who == "the peer that dialled" else (b, a)
            peer = judged.transport.local_id
            while not judge.reputation.is_banned(peer):
                judge.reputation.report(peer, ScoreReason.BROKEN_WORD)
            used = inside(judge)._pool
            with anyio.fail_after(IDLE_SECONDS / 2):  # later they would be closed because nobody uses them
                await until(lambda: not judge.transport.connections() and not used.connection_count)

    run(scenario)


async def _ask_again_and_again(asker: Network, peer: NodeId) -> None:
    while True:
        with suppress(PeerUnreachableError, PeerRefusedError):
            await asker.transport.request(peer, Frame(CONNECT_KIND), timeout_seconds=60)
        await anyio.sleep(0.01)


def test_a_peer_that_wants_connections_and_does_not_take_them_delays_no_other() -> None:
    async def scenario() -> None:
        async with (
            nodes(1, WITHOUT_CONNECTIONS) as (liar,),
            nodes(2, first=2) as (victim, honest),
            line_to(("127.0.0.1", port_of(liar))) as line,
            trio.open_nursery() as tasks,
        ):
            silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
            victim.transport.serve("echo", echo, LIMITS)
            await victim.transport.connect(address_of(honest))
            place = f"/ip4/127.0.0.1/tcp/{line.endpoint[1]}/p2p/{liar.transport.local_id}"
            await victim.transport.connect(place)
            line.target = silent[0].socket.getsockname()
            for _ in range(24):
                tasks.start_soon(_ask_again_and_again, liar, victim.transport.local_id)
            await until(lambda: line.connections > MOST_CONNECTIONS - 1)
            await there_and_back(honest, victim, MIB)
            assert honest.transport.connections()[0].bulk_connections > 0
            assert line.connections == 1 + MOST_CONNECTIONS
            tasks.cancel_scope.cancel()
            await silent[0].aclose()

    run(scenario)


def test_sockets_for_which_there_is_no_room_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MOST_REFUSED", 4)

    async def scenario() -> None:
        async with nodes(1) as (a,), nodes(1, first=9) as (b,), AsyncExitStack() as stack:
            await b.transport.connect(address_of(a))
            opened: list[BodyStream] = []
            for _ in range(MOST_CONNECTIONS + pool.MOST_REFUSED + 1):
                raw = await dialled(("127.0.0.1", port_of(a)))
                opened.append(await upgraded_for_bodies(upgrader_of(identity_of(9)), a.transport.local_id, raw))
                stack.callback(opened[-1].close)
            with anyio.fail_after(PoolOptions().handshake_seconds / 2), pytest.raises(ConnectionLostError):
                await receive_bytes(opened[-1], 1)

    run(scenario)


def test_a_peer_that_is_away_for_a_while_can_be_dialled_when_it_is_back() -> None:
    async def scenario() -> None:
        strict = replace(LOOPBACK, limits=ConnectionLimits(is_loopback_free=False, dials_of_host=4))
        async with nodes(1, strict) as (b,):
            async with nodes(1, first=2) as (a,):
                a.transport.serve("echo", echo, LIMITS)
                port = port_of(a)
                await b.transport.connect(address_of(a))
                await there_and_back(b, a, MIB)
            await until(lambda: not b.transport.connections())
            await anyio.sleep(DIAL_WINDOW_SECONDS / 2)
            async with nodes(1, replace(LOOPBACK, port=port), first=2) as (a,):
                a.transport.serve("echo", echo, LIMITS)
                await there_and_back(b, a, MIB)

    run(scenario, clock=MockClock(autojump_threshold=0.1))


def test_without_a_connection_for_streams_a_peer_keeps_none_for_bodies() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b):
            a.transport.serve("echo", echo, LIMITS)
            await b.transport.connect(address_of(a))
            await there_and_back(b, a, MIB)
            await inside(b)._connections.close_peer(a.transport.local_id)
            used = inside(a)._pool
            with anyio.fail_after(IDLE_SECONDS / 2):  # later they would be closed because nobody uses them
                await until(lambda: not used.connection_count)

    run(scenario)


def test_a_request_survives_the_end_of_the_connection_for_streams() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b), trio.open_nursery() as tasks:
            asked, may_answer = list[Frame](), trio.Event()

            async def echo_later(_: NodeId, frame: Frame) -> Frame:
                asked.append(frame)
                await may_answer.wait()
                return frame

            a.transport.serve("echo", echo_later, LIMITS)
            await b.transport.connect(address_of(a))
            tasks.start_soon(there_and_back, b, a, 4 * MIB)
            await until(lambda: bool(asked))
            before = a.transport.connections()[0].address
            await inside(b)._connections.close_peer(a.transport.local_id)
            # it is dialled again because the other one closed those for bodies
            await until(lambda: any(one.address != before for one in a.transport.connections()))
            may_answer.set()
        assert len(asked) == 1

    run(scenario)


def test_after_a_hanging_dial_short_requests_use_streams() -> None:
    async def scenario() -> None:
        async with nodes(2) as (a, b), line_to(("127.0.0.1", port_of(a))) as line:
            silent = await trio.open_tcp_listeners(0, host="127.0.0.1")
            a.transport.serve("echo", echo, LIMITS)
            await b.transport.connect(f"/ip4/127.0.0.1/tcp/{line.endpoint[1]}/p2p/{a.transport.local_id}")
            line.target = silent[0].socket.getsockname()  # as when the router has forgotten a mapping
            seconds = PoolOptions().handshake_seconds / 2
            frame = frame_of(MIB // 16)
            with pytest.raises(RequestTimeoutError):
                await b.transport.request(a.transport.local_id, frame, reply=LIMITS, timeout_seconds=seconds)
            await anyio.sleep(2 * seconds)
            await b.transport.request(a.transport.local_id, frame, reply=LIMITS, timeout_seconds=seconds)
            assert b.transport.connections()[0].bulk_connections == 0
            await silent[0].aclose()

    run(scenario, clock=MockClock(autojump_threshold=0.2))
