"""What is said on a local network, and what is believed of it; no packet is sent here."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network, ip_network
from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from neuroshard.config.settings import Settings
from neuroshard.network.lan_runs import FORGOTTEN_SECONDS, MAX_RUNS, UNWATCHED_SECONDS, LanRuns, WatchedLanRuns
from neuroshard.network.limits import TokenBucket
from neuroshard.network.mdns import (
    MAX_ADDRESSES,
    MAX_COMPUTERS,
    MAX_FOUND,
    MAX_NAME_CHARACTERS,
    NEW_ADDRESSES,
    SERVICE,
    DiscoveredAddresses,
    LanInterface,
    MdnsDiscovery,
    MdnsMessage,
    ReachableInterface,
    RunNotice,
    announcement,
    lan_interfaces,
    open_socket,
    places_of,
    question,
    read_packet,
)
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.types import NodeId, RunId
from tests.worlds.claims import identity_of
from tests.worlds.lan import network_at

ME, OTHER = (identity_of(number).node_id for number in (1, 2))
LAN: Sequence[IPv4Network] = (IPv4Network("192.168.1.0/24"),)


def understood(packet: bytes) -> tuple[str, ...]:
    return read_packet(packet, ME, LAN).addresses


def test_a_node_that_says_where_it_is_is_understood() -> None:
    packet = announcement(OTHER, ["192.168.1.7"], 4001)
    assert len(packet) < 512
    assert read_packet(packet, ME, LAN) == MdnsMessage(addresses=(f"/ip4/192.168.1.7/tcp/4001/p2p/{OTHER}",))


def test_addresses_of_the_sixth_version_are_understood() -> None:
    packet = announcement(OTHER, ["192.168.1.7", "fd00::7"], 4001)
    both = read_packet(packet, ME, (*LAN, ip_network("fd00::/64"))).addresses
    assert both == (f"/ip4/192.168.1.7/tcp/4001/p2p/{OTHER}", f"/ip6/fd00::7/tcp/4001/p2p/{OTHER}")


def test_a_good_bye_tells_no_address() -> None:
    assert understood(announcement(OTHER, ["192.168.1.7"], 4001, is_goodbye=True)) == ()


def test_a_question_is_for_everybody_but_who_asks() -> None:
    assert read_packet(question(OTHER), ME, LAN) == MdnsMessage(is_question=True)
    assert read_packet(question(ME), ME, LAN) == MdnsMessage()


def test_a_question_about_something_else_is_not_answered() -> None:
    name = b"".join(bytes([len(part)]) + part for part in (b"_printer", b"_tcp", b"local")) + b"\0"
    packet = struct.pack("!6H", 0, 0, 1, 0, 0, 0) + name + struct.pack("!2H", 12, 1)
    assert read_packet(packet, ME, LAN) == MdnsMessage()


@pytest.mark.parametrize("host", ["8.8.8.8", "127.0.0.1", "192.168.2.7", "224.0.0.251", "0.0.0.0"])
def test_nobody_is_sent_to_another_network(host: str) -> None:
    assert understood(announcement(OTHER, [host], 4001)) == ()


@pytest.mark.parametrize(
    "node_id", ["", "12D3KooW", "x" * 52, f"{OTHER}x", OTHER.replace("1", "0", 1), f"{OTHER}/p2p-circuit"]
)
def test_a_wrong_node_id_is_passed_over(node_id: str) -> None:
    right = announcement(OTHER, ["192.168.1.7"], 4001)
    said, meant = b"id=" + node_id.encode(), b"id=" + OTHER.encode()
    was, is_now = (struct.pack("!HB", len(text) + 5, 3) + b"v=1" + bytes([len(text)]) + text for text in (meant, said))
    assert was in right
    assert understood(right.replace(was, is_now)) == ()


def test_another_version_of_the_form_and_port_0_are_passed_over() -> None:
    right = announcement(OTHER, ["192.168.1.7"], 4001)
    assert understood(right) != ()
    assert understood(right.replace(b"v=1", b"v=2")) == ()
    assert understood(announcement(OTHER, ["192.168.1.7"], 0)) == ()


def test_one_packet_tells_few_addresses() -> None:
    many = announcement(OTHER, [f"192.168.1.{number}" for number in range(1, 200)], 4001)
    assert len(understood(many)) == MAX_ADDRESSES


def test_a_packet_above_the_limit_is_not_read() -> None:
    packet = announcement(OTHER, ["192.168.1.7"], 4001)
    assert understood(packet + bytes(9000 - len(packet))) != ()
    assert understood(packet + bytes(9001 - len(packet))) == ()


@given(st.binary(max_size=2000))
def test_any_bytes_are_heard_without_an_error(packet: bytes) -> None:
    assert read_packet(packet, ME, LAN).addresses == ()


@given(st.data())
def test_a_damaged_packet_tells_at_most_well_formed_addresses(data: st.DataObject) -> None:
    packet = bytearray(announcement(OTHER, ["192.168.1.7"], 4001))
    for _ in range(data.draw(st.integers(1, 4))):
        packet[data.draw(st.integers(0, len(packet) - 1))] = data.draw(st.integers(0, 255))
    for address in understood(bytes(packet)):
        assert address.startswith("/ip4/192.168.1.")
        assert len(address.rpartition("/p2p/")[2]) == 52


def test_an_allowance_is_spent_and_comes_back() -> None:
    allowance = TokenBucket(3, 0.5)
    assert [allowance.take(10.0) for _ in range(4)] == [True, True, True, False]
    assert not allowance.take(11.0)
    assert allowance.take(12.0)
    assert [allowance.take(1000.0) for _ in range(4)] == [True, True, True, False]


def test_new_addresses_come_slowly_and_known_ones_at_once() -> None:
    told: list[str] = []
    findings = DiscoveredAddresses(ME, told.extend)
    findings.add([f"/ip4/192.168.1.7/tcp/{port}/p2p/{OTHER}" for port in range(1, 10_000)], 0.0)
    assert len(told) == NEW_ADDRESSES
    findings.add(told[:5], 0.0)
    assert told[NEW_ADDRESSES:] == told[:5]
    findings.add([f"/ip4/192.168.1.7/tcp/4001/p2p/{ME}"], 100.0)
    assert len(told) == NEW_ADDRESSES + 5


def test_what_was_told_is_remembered_up_to_a_limit() -> None:
    told: list[str] = []
    findings = DiscoveredAddresses(ME, told.extend)
    for second in range(10_000):
        findings.add([f"/ip4/192.168.1.7/tcp/{second + 1}/p2p/{OTHER}"], float(second))
    assert len(told) == 10_000
    assert len(findings._reported) == MAX_FOUND


def test_a_place_is_where_the_node_is_dialled_from_an_interface() -> None:
    home = LanInterface("lan", "192.168.1.5", ("192.168.1.5", "fd00::5"), LAN)
    other = LanInterface("docker", "172.17.0.1", ("172.17.0.1",), ())
    addresses = [
        f"/ip4/1.2.3.4/tcp/9/p2p/{ME}",
        f"/ip4/192.168.1.5/tcp/4001/p2p/{ME}",
        f"/ip4/192.168.1.5/tcp/4001/p2p/{OTHER}/p2p-circuit/p2p/{ME}",
    ]
    assert places_of(addresses, [home, other]) == (ReachableInterface(home, ("192.168.1.5",), 4001),)
    assert places_of([f"/ip4/127.0.0.1/tcp/4001/p2p/{ME}"], lan_interfaces()) == ()


def test_loopback_is_no_interface_of_a_local_network() -> None:
    for interface in lan_interfaces():
        assert not interface.host.startswith("127.")
        assert interface.name != "lo"


def test_an_absent_multicast_route_is_told_once_and_tried_again_rarely(caplog: pytest.LogCaptureFixture) -> None:
    gone = LanInterface(
        "gone", "192.0.2.1", ("192.0.2.1",), (ip_network("192.0.2.0/24"),)
    )  # no computer has this address
    with pytest.raises(OSError, match=r"\w"):
        open_socket(gone)
    network = network_at(ME, f"/ip4/192.0.2.1/tcp/4001/p2p/{ME}")
    looks: list[float] = []

    def interfaces() -> tuple[LanInterface, ...]:
        looks.append(trio.current_time())
        return (gone,)

    def nothing(_: Iterable[str]) -> None:
        raise AssertionError("nobody can be found there")

    async def main() -> None:
        with trio.move_on_after(3600):
            await MdnsDiscovery(ME, nothing, interfaces).live(network)

    with caplog.at_level("DEBUG", "neuroshard"):
        trio.run(main, clock=MockClock(autojump_threshold=0))
    levels = [record.levelname for record in caplog.records]
    assert levels[0] == "INFO"
    assert set(levels[1:]) == {"DEBUG"}
    assert 8 <= len(levels) <= 13  # every five minutes for an hour


@pytest.mark.parametrize(
    ("settings", "works", "asks_router"),
    [
        ({}, {"MdnsDiscovery", "PortMapping"}, True),
        ({"lan_discovery": False}, {"PortMapping"}, True),
        ({"port_mapping": False}, {"MdnsDiscovery"}, False),
        ({"p2p_host": "127.0.0.1"}, set[str](), False),
        ({"p2p_host": "127.9.9.9"}, set[str](), False),
        ({"p2p_host": "::1"}, set[str](), False),
    ],
)
def test_a_node_uses_its_surroundings_as_its_owner_wants(
    tmp_path: Path, settings: dict[str, object], works: set[str], asks_router: bool
) -> None:
    peer_network = PeerNetwork.of(Settings.model_validate({"data_dir": tmp_path, **settings}), identity_of(1))
    attached = {type(getattr(work, "__self__", None)).__name__ for work in peer_network.networking._works}
    assert attached & {"MdnsDiscovery", "PortMapping"} == works
    assert (peer_network.port_mapping is not None) == asks_router


def test_the_service_has_the_name_that_others_look_for() -> None:
    assert SERVICE == "_neuroshard._tcp.local."
    assert NodeId(OTHER).encode() in announcement(OTHER, ["192.168.1.7"], 4001)


HOME = RunNotice(RunId("5" * 64), "home: \u00e4\u00f6\u00fc, 100 %", 12)


def test_a_run_that_is_announced_is_heard_with_the_addresses() -> None:
    packet = announcement(OTHER, ["192.168.1.7"], 4001, HOME)
    heard = read_packet(packet, ME, LAN)
    assert (heard.notices, heard.addresses) == ((HOME,), (f"/ip4/192.168.1.7/tcp/4001/p2p/{OTHER}",))
    longest = RunNotice(RunId("f" * 64), "\U0001f600" * MAX_NAME_CHARACTERS, MAX_COMPUTERS)
    assert read_packet(announcement(OTHER, ["192.168.1.7"], 4001, longest), ME, LAN).notices == (longest,)
    assert read_packet(announcement(OTHER, ["192.168.1.7"], 4001), ME, LAN).notices == ()
    leaving = announcement(OTHER, ["192.168.1.7"], 4001, HOME, is_goodbye=True)
    assert read_packet(leaving, ME, LAN).notices == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("run", "../../x"),
        ("run", "G" * 64),
        ("name", "x" * (MAX_NAME_CHARACTERS + 1)),
        ("name", "line\nbreak"),
        ("name", "\u202eright to left"),
        ("computers", "0"),
        ("computers", "-1"),
        ("computers", "1e99"),
        ("computers", str(MAX_COMPUTERS + 1)),
        ("computers", "9" * 200),
    ],
)
def test_a_wrong_announcement_of_a_run_is_skipped(key: str, value: str) -> None:
    wrong = RunNotice(RunId("5" * 64), "home", 1)
    msgspec.structs.force_setattr(wrong, key, value)
    heard = read_packet(announcement(OTHER, ["192.168.1.7"], 4001, wrong), ME, LAN)
    assert (heard.notices, len(heard.addresses)) == ((), 1)


def test_the_list_of_runs_is_bounded_and_follows_the_network() -> None:
    runs = LanRuns()
    runs.hear([HOME], 0.0)
    runs.hear([RunNotice(HOME.run, "Another name", 13)], 10.0)
    assert runs.current == (RunNotice(HOME.run, HOME.name, 13),)
    runs.hear((RunNotice(RunId(f"{number:064x}"), "flood", 1) for number in range(1000)), 20.0)
    assert len(runs.current) == MAX_RUNS
    assert runs.current[0].run == HOME.run
    runs.hear([], 10.0 + FORGOTTEN_SECONDS)
    assert HOME.run not in {one.run for one in runs.current}
    runs.hear([HOME], 11.0 + FORGOTTEN_SECONDS)
    assert HOME in runs.current


def test_a_running_node_asks_only_while_somebody_looks_at_the_list() -> None:
    asked = list[float]()

    def interfaces() -> tuple[LanInterface, ...]:
        asked.append(trio.current_time())
        return ()

    async def main() -> None:
        watched = WatchedLanRuns(interfaces)
        async with trio.open_nursery() as tasks:
            tasks.start_soon(watched.run)
            await trio.sleep(600)
            assert asked == []  # nobody has looked
            for _ in range(30):
                watched.look()
                await trio.sleep(4)
            looked_until = trio.current_time()
            assert 8 <= len(asked) <= 14  # at first quickly, then every 10 s
            watched._runs.hear([RunNotice(RunId("3" * 64), "home", 1)], trio.current_time())
            assert [one.name for one in watched.current] == ["home"]
            await trio.sleep(600)
            assert asked[-1] <= looked_until + UNWATCHED_SECONDS
            assert watched.current == ()
            watched.look()
            await trio.sleep(1)
            assert asked[-1] > looked_until + 500
            tasks.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))
