"""Connections for bodies with peers that lie, flood, were banned or evicted, or with too few resources here."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import trio

from neuroshard.network import Network
from neuroshard.network.libp2p.tls import TLS_PROTOCOL, signed_key
from neuroshard.network.pool import PoolOptions
from neuroshard.network.reputation import ScoreReason
from tests.network.libp2p.test_libp2p_bulk import LIMITS, MIB, there_and_back
from tests.network.libp2p.test_libp2p_tls import certificate_of, hostile, key_of_unknown_kind
from tests.worlds.clock import until
from tests.worlds.network_nodes import address_of, echo, nodes, run

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
            pool = inside(judge)._pool
            with anyio.fail_after(IDLE_SECONDS / 2):  # later they would be closed because nobody uses them
                await until(lambda: not judge.transport.connections() and not pool.connection_count)

    run(scenario)
