"""Hundreds of everything against the limits that a node has by default: it takes what it promises, and lives."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import trio

from neuroshard.network import Network, PeerUnreachableError
from neuroshard.network.libp2p import ConnectionLimits, NetworkOptions, libp2p_network
from neuroshard.network.libp2p.addresses import parse_address
from neuroshard.network.libp2p.peer_limits import ConnectionAdmission
from neuroshard.network.libp2p.upgrading import NodeUpgrader, key_pair_of
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import address_of, echo, lives, nodes, port_of, run

CROWD = 200  # more than each limit that it meets
LIMITS = ConnectionLimits()


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """Both ends of many connections are in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(8192, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def admission_of(network: Network) -> ConnectionAdmission:
    return network.transport._connections._admission


async def call(caller: Network, victim: Network, number: int) -> bool:
    """Whether the victim lets identity `number` in. The caller has no limits of its own."""
    dialler: Any = caller.transport._connections._dialler
    keys, nothing = key_pair_of(identity_of(number).key), ConnectionAdmission()
    dialler._swarm.upgrader = NodeUpgrader(keys, nothing, dialler._swarm.upgrader._options, lambda _: True)
    try:
        muxer = await dialler.dial(parse_address(address_of(victim)))
    except PeerUnreachableError:
        return False
    return not muxer.is_closed


def test_many_connections_of_one_peer_are_bounded() -> None:
    async def scenario() -> None:
        async with nodes(2) as (victim, attacker):
            victim.transport.serve("echo", echo)
            let_in = [await call(attacker, victim, 2) for _ in range(CROWD)]
            assert sum(let_in) == LIMITS.connections_of_peer
            assert admission_of(victim).connections == LIMITS.connections_of_peer
            assert admission_of(victim).refused == {"connections of peer": CROWD - LIMITS.connections_of_peer}
            async with nodes(1, first=3) as (other,):
                await lives(other, victim)

    run(scenario)


def test_many_sockets_that_say_nothing_are_bounded() -> None:
    async def scenario() -> None:
        async with nodes(1) as (victim,), AsyncExitStack() as stack:
            victim.transport.serve("echo", echo)
            for _ in range(CROWD):
                stream = await trio.open_tcp_stream("127.0.0.1", port_of(victim))
                stack.push_async_callback(stream.aclose)
            await until(lambda: admission_of(victim).refused["handshakes"] >= CROWD - LIMITS.handshakes)
            assert admission_of(victim)._handshakes.total() <= LIMITS.handshakes
            await stack.aclose()
            await until(lambda: admission_of(victim)._handshakes.total() == 0)
            async with nodes(1, first=3) as (other,):
                await lives(other, victim)

    run(scenario)


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        (replace(LIMITS, identities_of_loopback=LIMITS.identities_of_ip), LIMITS.identities_of_ip),  # as from outside
        (LIMITS, LIMITS.connections),  # as from this computer, where a demo may have many nodes
    ],
)
def test_many_identities_from_one_address_are_bounded(limits: ConnectionLimits, most: int) -> None:
    async def scenario() -> None:
        options = NetworkOptions(host="127.0.0.1", limits=limits)
        async with libp2p_network(identity_of(1), options) as victim:
            victim.transport.serve("echo", echo)
            async with nodes(1, first=2) as (attacker,):
                let_in = [await call(attacker, victim, 100 + number) for number in range(most + CROWD)]
                assert sum(let_in) == most
                assert len(victim.transport.connections()) == most
            await until(lambda: victim.transport.connections() == ())
            async with nodes(1, first=3) as (other,):
                await lives(other, victim)

    run(scenario)
