from __future__ import annotations

import tracemalloc

import pytest

from neuroshard.network.libp2p.address_book import HEARSAY_DIALS, MAX_ADDRESSES, MAX_HEARSAY, PeerAddressBook
from neuroshard.network.libp2p.addresses import Scope, parse_address, scope_of
from neuroshard.types import NodeId
from tests.worlds.claims import identity_of

ME, BOB, RELAY = (identity_of(number).node_id for number in (1, 2, 3))
PUBLIC = "8.8.4.4"


def at(host: str, port: int = 4001, peer: NodeId = BOB) -> str:
    kind = "ip6" if ":" in host else "ip4" if host[0].isdigit() else "dns4"
    return f"/{kind}/{host}/tcp/{port}/p2p/{peer}"


def texts(contacts: PeerAddressBook, peer: NodeId = BOB) -> list[str]:
    return [address.text for address in contacts.of(peer)]


def test_what_others_say_replaces_neither_experience_nor_a_peers_own_word() -> None:
    contacts = PeerAddressBook(ME)
    contacts.note_worked(parse_address(at("1.1.1.1")))
    contacts.learn_texts(BOB, [at("1.1.1.2"), at("1.1.1.3")])
    for port in range(1, 100):
        contacts.hear_texts(BOB, [at("9.9.9.9", port)], PUBLIC)
    assert texts(contacts)[:3] == [at("1.1.1.1"), at("1.1.1.2"), at("1.1.1.3")]
    assert len(texts(contacts)) == 3 + MAX_HEARSAY
    assert [address.text for address in contacts.vouched(BOB)] == texts(contacts)[:3]


def test_hearsay_that_fails_makes_room_for_other() -> None:
    contacts = PeerAddressBook(ME)
    contacts.hear_texts(BOB, [at("9.9.9.9", port) for port in (1, 2, 3)], PUBLIC)
    assert texts(contacts) == [at("9.9.9.9", 1), at("9.9.9.9", 2)]
    contacts.note_failed(parse_address(at("9.9.9.9", 1)))
    contacts.hear_texts(BOB, [at("1.1.1.1")], PUBLIC)
    assert texts(contacts) == [at("9.9.9.9", 2), at("1.1.1.1")]
    contacts.note_worked(parse_address(at("1.1.1.1")))
    assert texts(contacts) == [at("1.1.1.1"), at("9.9.9.9", 2)]


def test_of_hearsay_one_direct_and_one_relayed_way_are_kept() -> None:
    contacts = PeerAddressBook(ME)
    relayed = f"{at(PUBLIC, peer=RELAY)}/p2p-circuit/p2p/{BOB}"
    contacts.hear_texts(BOB, [at("9.9.9.9", 1), at("9.9.9.9", 2), relayed], PUBLIC)
    assert texts(contacts) == [at("9.9.9.9", 1), relayed]


@pytest.mark.parametrize(
    ("teller", "believed"),
    [
        (PUBLIC, {"9.9.9.9"}),
        (None, {"9.9.9.9"}),  # behind a relay
        ("192.168.1.7", {"9.9.9.9", "10.0.0.7", "fd00::7"}),
        ("169.254.7.7", {"9.9.9.9", "10.0.0.7", "fd00::7"}),
        ("127.0.0.1", {"9.9.9.9", "10.0.0.7", "fd00::7", "127.0.0.1", "::ffff:127.0.0.1", "name.example"}),
    ],
)
def test_nobody_far_away_makes_this_node_dial_what_is_near(teller: str | None, believed: set[str]) -> None:
    told: set[str] = set()
    nowhere = ("169.254.169.254", "fe80::1", "224.0.0.1", "ff02::1", "0.0.0.0", "::", "255.255.255.255")
    for host in (*nowhere, "9.9.9.9", "10.0.0.7", "fd00::7", "127.0.0.1", "::ffff:127.0.0.1", "name.example"):
        contacts = PeerAddressBook(ME)
        contacts.hear_texts(BOB, [at(host)], teller)
        told |= {address.host for address in contacts.of(BOB)}
    assert told == believed


@pytest.mark.parametrize(
    ("scope", "hosts"),
    [
        (Scope.WORLD, ("8.8.8.8", "2606:4700::1", "172.32.0.1", "100.128.0.1", "64:ff9b::808:808")),
        (Scope.NETWORK, ("10.1.2.3", "172.16.0.1", "192.168.0.1", "100.64.0.1", "fc00::1", "fd00:ec2::254")),
        (Scope.NETWORK, ("64:ff9b::a00:1", "2002:a00:1::", "::ffff:192.168.0.1")),  # IPv4 addresses inside
        (Scope.COMPUTER, ("127.9.9.9", "::1", "localhost", "name.example", "64:ff9b::7f00:1")),
        (
            Scope.NOWHERE,
            ("169.254.169.254", "fe80::1", "224.0.0.1", "ff02::1", "0.0.0.0", "::", "0.1.2.3", "240.0.0.1"),
        ),
        (Scope.NOWHERE, ("::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "255.255.255.255")),
    ],
)
def test_scopes(scope: Scope, hosts: tuple[str, ...]) -> None:
    assert {host: scope_of(host) for host in hosts} == dict.fromkeys(hosts, scope)


def test_only_so_much_hearsay_is_dialled_a_minute() -> None:
    contacts = PeerAddressBook(ME)
    peers = [identity_of(number).node_id for number in range(10, 70)]
    for peer in peers:
        contacts.hear_texts(peer, [at("9.9.9.9", port, peer) for port in (1, 2)], PUBLIC)
    dials = sum(len(contacts.to_dial(peer, now=0.0)) for _ in range(3) for peer in peers)
    assert dials == HEARSAY_DIALS
    assert sum(len(contacts.to_dial(peer, now=10.0)) for peer in peers) == 10
    contacts.learn_texts(peers[0], [at("1.1.1.1", 1, peers[0])])
    assert [address.host for address in contacts.to_dial(peers[0], now=10.0)] == ["1.1.1.1"]


@pytest.mark.parametrize(
    ("teller", "has_neighbours", "followed"),
    [
        (PUBLIC, False, {"9.9.9.9"}),
        (None, False, {"9.9.9.9"}),  # through a relay, or in a signed record
        ("192.168.1.7", False, {"9.9.9.9", "10.0.0.7"}),
        ("127.0.0.1", False, {"9.9.9.9", "10.0.0.7", "127.0.0.1", "::1", "name.example"}),
        (None, True, {"9.9.9.9", "10.0.0.7", "127.0.0.1", "::1", "name.example"}),
    ],
)
def test_who_is_elsewhere_cannot_make_this_node_dial_its_own_computer_or_network(
    teller: str | None, has_neighbours: bool, followed: set[str]
) -> None:
    hosts = ("127.0.0.1", "::1", "name.example", "10.0.0.7", "9.9.9.9")
    ways = [at(host) for host in hosts] + [f"{at(host, peer=RELAY)}/p2p-circuit/p2p/{BOB}" for host in hosts]
    contacts = PeerAddressBook(ME, has_neighbours=has_neighbours)
    for way in ways:
        contacts.learn_texts(BOB, [way], host=teller)
        assert (texts(contacts) == [way]) == (parse_address(way).host in followed)


def test_an_address_that_was_told_near_by_may_be_repeated_from_far_away() -> None:
    """Two nodes of one local network also find each other's signed record at a node far away."""
    contacts = PeerAddressBook(ME)
    near, other = parse_address(at("192.168.1.7")), parse_address(at("192.168.1.8"))
    assert not contacts.may_follow(near)
    contacts.learn_texts(BOB, [near.text], host="192.168.1.7")
    assert contacts.may_follow(near)
    assert not contacts.may_follow(other)
    contacts.learn_texts(BOB, [other.text, near.text])
    assert texts(contacts) == [near.text]


def test_a_peers_newest_word_of_itself_counts() -> None:
    contacts = PeerAddressBook(ME)
    contacts.learn_texts(BOB, [at("1.1.1.1")], 100.0)
    contacts.learn_texts(BOB, [at("1.1.1.2")], 50.0)  # an old record
    assert texts(contacts) == [at("1.1.1.1")]
    contacts.learn_texts(BOB, [at("1.1.1.3")], 101.0)
    contacts.learn_texts(BOB, ["nonsense", at("1.1.1.4", peer=RELAY)], 102.0)
    assert texts(contacts) == [at("1.1.1.3")]
    contacts.learn_texts(BOB, [at("1.1.1.1", port) for port in range(1, 50)], 103.0)
    assert len(texts(contacts)) == MAX_ADDRESSES


@pytest.mark.parametrize("kind", ["longest", "usual"])
def test_the_book_takes_no_more_memory_than_it_may(kind: str) -> None:
    most = 1_000_000
    peers = [identity_of(number).node_id for number in range(300 if kind == "longest" else 1500)]
    contacts = PeerAddressBook(ME, most, has_neighbours=True)  # which takes names, the longest addresses there are
    tracemalloc.start()
    try:
        for peer in peers:
            end = f"/tcp/65535/p2p/{peer}"
            long = [f"/dns4/{number:02}{('.' + 62 * 'a') * 3}"[: 256 - len(end)] + end for number in range(14)]
            told = long if kind == "longest" else [at("1.1.1.1", port, peer) for port in (1, 2)]
            contacts.learn_texts(peer, told[:8])
            for text in told[8:12]:
                contacts.note_worked(parse_address(text))
            contacts.hear_texts(peer, told[12:], PUBLIC)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()
    assert texts(contacts, peers[-1])  # the last ones stay
    assert len(contacts) > (40 if kind == "longest" else 400)


def test_the_book_is_bounded_and_experience_outlives_hearsay() -> None:
    contacts = PeerAddressBook(ME, max_bytes=32_000)
    contacts.note_worked(parse_address(at("1.1.1.1")))
    for number in range(10, 40):
        peer = identity_of(number).node_id
        contacts.hear_texts(peer, [at("9.9.9.9", 1, peer)], PUBLIC)
    assert 5 < len(contacts) < 15
    assert texts(contacts) == [at("1.1.1.1")]
    contacts.hear_texts(ME, [at("9.9.9.9", 1, ME)], PUBLIC)
    assert contacts.of(ME) == ()
