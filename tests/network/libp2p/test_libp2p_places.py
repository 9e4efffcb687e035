"""Places and dials belong to networks, not to names: the policy in virtual time, and dials through real sockets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice

import anyio
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from neuroshard.network import PeerUnreachableError
from neuroshard.network.crowds import WIDE_SHARE, network_of
from neuroshard.network.libp2p import ConnectionLimits
from neuroshard.network.libp2p.addresses import PeerAddress, parse_address
from neuroshard.network.libp2p.places import (
    MAX_TARGETS,
    PROTECTED_NEAR,
    PROTECTED_USEFUL,
    ConnectionAdmission,
    ConnectionPlace,
    DialBudget,
    NoPlaceError,
)
from neuroshard.network.libp2p.streams import RoundTrips
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
    assert network_of("") == ""
    assert network_of("fe80::1%eth0")


@dataclass(eq=False)
class Silent:
    """A socket that says nothing."""

    ip: str
    heard_at: float
    is_cut: bool = False

    def cut(self) -> None:
        self.is_cut = True


@pytest.mark.parametrize(
    "silent_ips",
    [
        ["9.9.9.9"] * LIMITS.handshakes,
        [f"9.9.9.{number}" for number in range(LIMITS.handshakes)],
        [f"9.9.{number}.1" for number in range(LIMITS.handshakes)],
        [f"9.{number}.1.1" for number in range(LIMITS.handshakes)],
        [f"2606:4700:0:{number}::1" for number in range(LIMITS.handshakes)],
        ["9.9.9.9", "8.8.8.8"] * (LIMITS.handshakes // 2),
    ],
    ids=["host", "/24", "/16", "many networks", "/48", "two hosts"],
)
def test_a_handshake_of_another_network_replaces_the_longest_silent_one_of_the_greediest(silent_ips: list[str]) -> None:
    admission = ConnectionAdmission()
    silent = [Silent(ip, float(number)) for number, ip in enumerate(silent_ips)]
    silent[0].heard_at = 1000.0  # one byte now and then
    assert all(admission.begin_handshake(one) for one in silent)
    newcomers = [Silent("1.2.3.4", 100.0), Silent("5.6.7.8", 101.0)]
    assert all(admission.begin_handshake(one) for one in newcomers)
    assert [one for one in silent if one.is_cut] == silent[1:3]
    assert admission.handshakes == LIMITS.handshakes
    assert not any(one.is_cut for one in newcomers)
    for one in (*silent, *newcomers):
        admission.end_handshake(one)
    assert admission.handshakes == 0


def test_handshakes_of_the_greediest_network_get_no_place_of_others() -> None:
    admission = ConnectionAdmission()
    honest = [Silent(f"{number}.1.1.1", 0.0) for number in range(1, 11)]
    assert all(admission.begin_handshake(one) for one in honest)
    let_in = [admission.begin_handshake(Silent("200.1.1.1", 1.0 + number)) for number in range(1000)]
    assert sum(let_in) == LIMITS.handshakes - len(honest)
    assert not any(one.is_cut for one in honest)
    assert admission.refused == {"handshakes": 1000 - sum(let_in)}


class Line:
    """The streams of a connection."""

    def __init__(self, used_at: float, round_trip: float | None) -> None:
        self.used_at = used_at
        self.round_trips = RoundTrips()
        if round_trip is not None:
            self.round_trips.add(round_trip)


class Table:
    """The connections of a node whose places are wanted."""

    def __init__(self, limits: ConnectionLimits = LIMITS) -> None:
        self.admission = ConnectionAdmission(limits)
        self.now = 0.0
        self.replaced: list[ConnectionPlace] = []
        self._names = 0

    @property
    def most(self) -> int:
        return self.admission.limits.connections // 2

    def enter(
        self, ip: str, *, used_at: float = 0.0, round_trip: float | None = 0.1, is_chosen: bool = False
    ) -> ConnectionPlace | None:
        """A connection of a new name; None if it is refused."""
        self.now += 1.0
        self._names += 1
        place = ConnectionPlace(ip, str(self._names), is_chosen, self.now)
        try:
            replaced = self.admission.enter(place)
        except NoPlaceError:
            return None
        self.admission.opened(place, Line(used_at, round_trip))
        if replaced is not None:
            self.replaced.append(replaced)
        return place

    def flood(self, ips: Iterable[str], count: int) -> list[ConnectionPlace]:
        return [place for ip in islice(cycle(ips), count) if (place := self.enter(ip, round_trip=0.2))]


def honest_ips(count: int) -> list[str]:
    return [f"{20 + number}.{number}.1.1" for number in range(count)]


FLOODS = {
    "a /64": [f"2606:4700:1:1::{number:x}" for number in range(1000)],
    "a /48": [f"2606:4700:1:{number:x}::1" for number in range(1000)],
    "a host": ["9.9.9.9"],
    "a /16": [f"9.9.{number % 250}.{number // 250}" for number in range(1000)],
    "two hosts": ["9.9.9.9", "8.8.8.8"],
    "relays": [""],
}
TELLING = ("a /48", "two hosts", "relays")  # the smaller networks are parts of larger ones


@pytest.mark.parametrize("is_attacker_first", [True, False])
@pytest.mark.parametrize(
    "attackers",
    [pytest.param(ips, id=name, marks=[] if name in TELLING else pytest.mark.long) for name, ips in FLOODS.items()],
)
def test_honest_nodes_get_and_keep_places_among_free_names(attackers: list[str], is_attacker_first: bool) -> None:
    table = Table()
    if is_attacker_first:
        table.flood(attackers, 1000)
    honest = list[ConnectionPlace | None]()
    for ip in honest_ips(100):
        honest.append(table.enter(ip))
        table.flood(attackers, 20)
    assert None not in honest
    assert not set(honest) & set(table.replaced)
    assert table.admission.connections == table.most


def test_the_greediest_network_does_not_even_disturb_itself() -> None:
    table = Table()
    assert len(table.flood(["9.9.9.9"], 1000)) == table.most
    assert table.replaced == []
    assert table.admission.refused == {"connections": 1000 - table.most}


def test_a_wide_network_of_honest_nodes_is_not_greedier_than_one_host() -> None:
    table = Table()
    provider = [table.enter(f"20.20.{number}.1") for number in range(WIDE_SHARE * 10)]
    table.flood(["9.9.9.9"], 1000)
    for ip in honest_ips(50):
        assert table.enter(ip)
    assert not set(provider) & set(table.replaced)


def test_near_useful_and_old_connections_of_different_networks_are_protected() -> None:
    table = Table()
    old = [table.enter(f"9.9.9.{number}") for number in range(20)]
    near = [table.enter(f"9.9.8.{number}", round_trip=0.001 * number) for number in range(PROTECTED_NEAR)]
    useful = [table.enter(f"9.9.7.{number}", used_at=1e6 + number) for number in range(PROTECTED_USEFUL)]
    different = [table.enter(ip) for ip in honest_ips(30)]
    table.flood([f"9.9.6.{number}" for number in range(200)], 1000)
    assert table.admission.connections == table.most
    for ip in [f"200.{number}.1.1" for number in range(60)]:
        assert table.enter(ip)
    assert len(table.replaced) == 60
    kept = {*old, *near, *useful, *different}
    assert not kept & set(table.replaced)
    assert {network_of(place.ip) for place in table.replaced} == {"9.9.6.0/24"}
    assert [place.entered_at for place in table.replaced] == sorted(
        (place.entered_at for place in table.replaced), reverse=True
    )  # the youngest first


def test_requests_of_a_new_connection_do_not_protect_it() -> None:
    table = Table()
    for _ in range(1000):
        table.enter("9.9.9.9", used_at=table.now + 2.0, round_trip=None)
    youngest = max(table.admission._places, key=lambda place: place.entered_at)
    assert table.enter("1.2.3.4")
    assert table.replaced == [youngest]


def test_half_of_the_places_are_for_peers_that_this_node_chose() -> None:
    table = Table()
    table.flood([f"{number}.1.1.1" for number in range(1, 200)], 2000)
    assert table.admission.connections == table.most
    chosen = [table.enter(ip, is_chosen=True) for ip in honest_ips(100) for _ in range(3)]
    assert sum(place is not None for place in chosen) == LIMITS.connections - table.most
    table.flood([f"{number}.2.1.1" for number in range(1, 200)], 2000)
    assert not set(chosen) & set(table.replaced)


def test_a_handshake_that_can_get_no_connection_is_refused_before_it_costs_time() -> None:
    table = Table()
    table.flood(["9.9.9.9"], 1000)
    assert not table.admission.begin_handshake(Silent("9.9.9.9", 0.0))
    assert table.admission.begin_handshake(Silent("1.2.3.4", 0.0))
    assert table.admission.handshakes == 1


def test_connections_of_one_peer_are_bounded_wherever_it_is() -> None:
    admission = ConnectionAdmission()
    places = [ConnectionPlace(f"{number}.1.1.1", "a", number % 2 == 0, float(number)) for number in range(1, 10)]
    for place in places[: LIMITS.connections_of_peer]:
        admission.enter(place)
    with pytest.raises(NoPlaceError, match="of peer"):
        admission.enter(places[-1])
    admission.leave(places[0])
    admission.leave(places[0])  # closed, after it was replaced
    assert admission.enter(places[-1]) is None
    assert admission.connections == LIMITS.connections_of_peer


def test_a_connection_that_is_still_negotiated_is_not_replaced() -> None:
    admission = ConnectionAdmission(ConnectionLimits(connections=8))
    for number in range(4):
        admission.enter(ConnectionPlace("9.9.9.9", str(number), False, float(number)))
    with pytest.raises(NoPlaceError):
        admission.enter(ConnectionPlace("1.2.3.4", "other", False, 10.0))


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


def test_the_hosts_of_one_network_share_its_dials() -> None:
    budget = DialBudget()
    for hosts in ([f"8.8.4.{number}" for number in range(250)], [f"2606:4700:1:{n:x}::1" for n in range(250)]):
        assert sum(budget.take(at(host), 0.0) for host in hosts) == LIMITS.dials_of_network
    assert budget.take(at("8.8.5.1"), 0.0)


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
    assert sum(budget.take(at(host), 1.0) for host in others) == MAX_TARGETS // 2 - 1
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
