"""Hundreds of everything against the limits that a node has by default: it takes what it promises, and lives."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import islice
from typing import Any

import anyio
import pytest
import trio
from trio.testing import MockClock

from neuroshard.network import Network, PeerUnreachableError
from neuroshard.network.libp2p import ConnectionLimits
from neuroshard.network.libp2p.addresses import parse_address
from neuroshard.network.libp2p.places import ConnectionAdmission
from neuroshard.network.libp2p.upgrading import HANDSHAKE_SECONDS, NodeUpgrader, key_pair_of
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


async def socket_from(source: str, port: int) -> trio.SocketStream:
    """A connection from an address of this computer; 127.0.0.0/8 has many networks."""
    sock = trio.socket.socket()
    await sock.bind((source, 0))
    await sock.connect(("127.0.0.1", port))
    return trio.SocketStream(sock)


async def call(caller: Network, victim: Network, number: int, source: str = "127.0.0.1") -> bool:
    """Whether the victim lets identity `number` in. The caller has no limits of its own."""
    dialler: Any = caller.transport._connections._dialler
    keys, nothing = key_pair_of(identity_of(number).key), ConnectionAdmission()
    dialler._swarm.upgrader = NodeUpgrader(keys, nothing, dialler._swarm.upgrader._options, lambda _: True)
    try:
        stream = await socket_from(source, port_of(victim))
        muxer = await dialler._upgraded(stream, parse_address(address_of(victim)))
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
            assert admission_of(victim).handshakes <= LIMITS.handshakes
            await stack.aclose()
            await until(lambda: admission_of(victim).handshakes == 0)
            async with nodes(1, first=3) as (other,):
                await lives(other, victim)

    run(scenario)


def test_silent_sockets_of_a_full_table_are_closed_by_the_deadline() -> None:
    async def scenario() -> None:
        async with nodes(1) as (victim,), AsyncExitStack() as stack:
            for _ in range(CROWD):
                stream = await trio.open_tcp_stream("127.0.0.1", port_of(victim))
                stack.push_async_callback(stream.aclose)
            await until(lambda: admission_of(victim).handshakes == LIMITS.handshakes)
            await trio.sleep(HANDSHAKE_SECONDS + 1)
            assert admission_of(victim).handshakes == 0

    run(scenario, clock=MockClock(autojump_threshold=0.1))


@pytest.mark.long  # two hosts with many names, and an honest node after them, are in the last test
def test_many_identities_from_one_address_are_bounded() -> None:
    async def scenario() -> None:
        async with nodes(1) as (victim,):
            victim.transport.serve("echo", echo)
            most = LIMITS.connections // 2
            async with nodes(1, first=2) as (attacker,):
                let_in = [await call(attacker, victim, 100 + number) for number in range(most + CROWD)]
                assert let_in == [True] * most + [False] * CROWD
                assert len(victim.transport.connections()) == most
            await until(lambda: victim.transport.connections() == ())
            async with nodes(1, first=3) as (other,):
                await lives(other, victim)

    run(scenario)


async def reopen_silent_sockets(source: str, port: int) -> None:
    """Keep 80 sockets open that say nothing, and open them again every 10 seconds."""
    while True:
        async with AsyncExitStack() as stack:
            for _ in range(80):
                stream = await socket_from(source, port)
                stack.push_async_callback(stream.aclose)
            await trio.sleep(10)


@pytest.mark.skipif(sys.platform != "linux", reason="needs all addresses of 127.0.0.0/8")
def test_a_newcomer_connects_at_once_and_stays_whoever_fills_the_places() -> None:
    """Silent sockets, 300 names from one /24, and two hosts that fill every place they can. Time is virtual."""

    async def scenario() -> None:
        async with nodes(1) as (victim,), nodes(1, first=2) as (attacker,), anyio.create_task_group() as tasks:
            victim.transport.serve("echo", echo)
            tasks.start_soon(reopen_silent_sockets, "127.1.0.1", port_of(victim))
            numbers = iter(range(100, 10_000))

            async def flood(count: int) -> None:
                for number in islice(numbers, count):
                    await call(attacker, victim, number, f"127.2.0.{1 + number % 250}")
                for number in islice(numbers, count):
                    await call(attacker, victim, number, f"127.{3 + number % 2}.0.1")

            await flood(LIMITS.connections // 2 + 44)  # more than there are places for names that called
            admission = admission_of(victim)
            assert admission.connections == LIMITS.connections // 2
            more = [await socket_from("127.1.0.2", port_of(victim)) for _ in range(5)]
            await until(lambda: admission.handshakes == LIMITS.handshakes)
            async with nodes(1, first=3) as (honest,):
                began = trio.current_time()
                await lives(honest, victim)
                assert trio.current_time() - began < 2
                connection = honest.transport._connections.of(victim.transport.local_id)
                await flood(40)
                await trio.sleep(15)
                await lives(honest, victim)
                assert honest.transport._connections.of(victim.transport.local_id) is connection
                assert admission.connections == LIMITS.connections // 2
            for stream in more:
                await stream.aclose()
            tasks.cancel_scope.cancel()

    run(scenario, clock=MockClock(autojump_threshold=0.1))
