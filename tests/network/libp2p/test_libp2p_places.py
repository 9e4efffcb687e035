"""Dials belong to networks, not to names: the policy in virtual time, and real sockets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import anyio
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from neuroshard.network import PeerUnreachableError
from neuroshard.network.libp2p import ConnectionLimits
from neuroshard.network.libp2p.addresses import PeerAddress, parse_address
from neuroshard.network.libp2p.places import MAX_TARGETS, DialBudget, network_of
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of
from tests.worlds.network_nodes import LOOPBACK, address_of, nodes, run

LIMITS = ConnectionLimits()
PEERS = tuple(identity_of(number).node_id for number in range(100, 150))


def at(host: str, port: int = 4001, peer: NodeId = PEERS[0]) -> PeerAddress:
    return parse_address(f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}/p2p/{peer}")


def test_networks() -> None:
    assert network_of("8.8.4.4") == network_of("8.8.4.200") == network_of("::ffff:8.8.4.7") == "8.8.4.0/24"
    assert network_of("8.8.4.4", 16) == network_of("8.8.200.4", 16) != network_of("8.9.4.4", 16)
    assert network_of("2606:4700:0:1::1") == network_of("2606:4700:0:1:ffff::") != network_of("2606:4700:0:2::1")
    assert network_of("2606:4700:0:1::1", 16, 48) == network_of("2606:4700:0:2::1", 16, 48)
    assert network_of("2002:808:404:1::", 32) == network_of("2002:808:404:2::", 32) == network_of("8.8.4.4", 32)
    assert network_of("name.example") == "name.example"


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 65_535), st.sampled_from(PEERS)), max_size=200))
def test_no_names_and_ports_make_more_than_ten_dials_a_minute_to_a_host(
    claims: list[tuple[float, int, NodeId]],
) -> None:
    budget, now, dialled = DialBudget(), 0.0, list[float]()
    for pause, port, peer in claims:
        now += pause
        if budget.take(at("8.8.4.4", port, peer), now):
            dialled.append(now)
    for start in dialled:
        assert sum(start <= moment < start + 60 for moment in dialled) <= LIMITS.dials_of_host


def test_hosts_do_not_take_each_others_dials() -> None:
    budget = DialBudget()
    for port in range(1, 100):
        budget.take(at("8.8.4.4", port), 0.0)
        budget.take(at("2606:4700::1", port), 0.0)
    assert not budget.take(at("8.8.4.4"), 59.0)
    assert not budget.take(at("2606:4700::2"), 59.0)  # the same household
    assert budget.take(at("8.8.4.5"), 59.0)
    assert budget.take(at("2606:4700:0:1::1"), 59.0)
    assert budget.take(at("8.8.4.4"), 61.0)


def test_addresses_that_worked_or_come_from_the_owner_are_not_starved() -> None:
    budget = DialBudget()
    worked, from_owner = at("8.8.4.4", 1), at("8.8.4.4", 2)
    assert budget.take(worked, 0.0)
    budget.note_worked(worked, 0.0)
    budget.trust(from_owner)
    for _ in range(3):
        assert sum(budget.take(at("8.8.4.4", port), 100.0) for port in range(3, 100)) in (LIMITS.dials_of_host, 0)
        assert budget.take(worked, 100.0)
        assert budget.take(from_owner, 100.0)
        budget.note_failed(from_owner)
    assert not budget.take(at("8.8.4.4", 1, PEERS[1]), 100.0)  # another name at a port that worked
    budget.note_failed(worked)
    assert not budget.take(worked, 100.0)
    assert budget.take(from_owner, 1e9)


def test_many_nodes_of_one_host_that_answer_are_all_reached() -> None:
    budget = DialBudget()
    for port in range(1, 200):
        assert budget.take(at("8.8.4.4", port), 1.0)
        budget.note_worked(at("8.8.4.4", port), 1.0)


def test_other_hosts_do_not_make_a_count_forgotten() -> None:
    budget = DialBudget()
    assert [budget.take(at("8.8.4.4", port), 0.0) for port in range(1, 12)] == [True] * 10 + [False]
    others = [f"9.{number >> 8}.{number & 255}.1" for number in range(MAX_TARGETS + 100)]
    assert sum(budget.take(at(host), 1.0) for host in others) == MAX_TARGETS - 1
    assert not budget.take(at("8.8.4.4"), 59.0)
    assert budget.take(at("8.8.4.4"), 61.0)
    assert budget.take(at(others[-1]), 62.0)


@pytest.mark.parametrize("is_asked_by_request", [True, False])
def test_a_thousand_names_with_a_victims_address_cause_ten_dials_a_minute(is_asked_by_request: bool) -> None:
    """Real sockets on loopback, where dials count here as elsewhere; the minute is virtual."""
    options = replace(LOOPBACK, limits=ConnectionLimits(is_loopback_free=False))

    async def scenario() -> None:
        accepted = list[float]()

        async def accept(stream: trio.SocketStream) -> None:
            accepted.append(trio.current_time())
            await stream.aclose()

        async with nodes(1, options) as (node,), nodes(1, first=2) as (honest,), trio.open_nursery() as nursery:
            (listener,) = await nursery.start(partial(trio.serve_tcp, accept, 0, host="127.0.0.1"))
            port = listener.socket.getsockname()[1]
            names = [identity_of(number).node_id for number in range(1000, 2000)]
            limiter = anyio.CapacityLimiter(20)

            async def dial(name: NodeId) -> None:
                connections, address = node.transport._connections, f"/ip4/127.0.0.1/tcp/{port}/p2p/{name}"
                way = connections.to(name) if is_asked_by_request else node.transport.connect(address)
                async with limiter:
                    with pytest.raises(PeerUnreachableError):
                        await way

            for name in names:  # as from a signed record
                node.transport._connections._contacts.learn_texts(name, [f"/ip4/127.0.0.1/tcp/{port}/p2p/{name}"], 1.0)
            async with anyio.create_task_group() as tasks:
                for name in names:
                    tasks.start_soon(dial, name)
            assert len(accepted) == LIMITS.dials_of_host
            assert trio.current_time() - accepted[0] < 60
            with pytest.raises(PeerUnreachableError, match="too often"):
                await node.transport.connect(address_of(honest))
            assert await node.transport.connect(address_of(honest), is_given=True) == honest.transport.local_id
            nursery.cancel_scope.cancel()

    run(scenario, clock=MockClock(autojump_threshold=0.1))
