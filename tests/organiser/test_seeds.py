"""Seeds: joiners get addresses that mean the same place for them, the operator's first, and in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuroshard.identity.admissions import ADMISSION_SECONDS
from neuroshard.organiser.seeds import MOST_GIVEN, MOST_SEEDS, SeedBook
from tests.organiser.desks import Desk, node

FAR, NEAR, HERE = "203.0.113.9", "192.168.1.9", "127.0.0.1"


def at(number: int, host: str = "198.51.100.1", port: int = 4001) -> str:
    """A direct address of a node."""
    return f"/ip4/{host}/tcp/{port}/p2p/{node(number)}"


def relayed(number: int) -> str:
    return f"{at(0)}/p2p-circuit/p2p/{node(number)}"


def joined(book: SeedBook, number: int, *addresses: str, now: float = 0.0) -> None:
    book.note_join(node(number), addresses)
    book.note_admission(node(number), now)


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        (FAR, {"198.51.100.1"}),
        (None, {"198.51.100.1"}),
        (NEAR, {"198.51.100.1", "192.168.1.5"}),
        (HERE, {"198.51.100.1", "192.168.1.5", "127.0.0.1"}),
    ],
)
def test_a_joiner_gets_no_address_that_means_another_place_for_it(host: str | None, shown: set[str]) -> None:
    hosts = ("198.51.100.1", "192.168.1.5", "127.0.0.1", "169.254.169.254", "0.0.0.0")
    for book, seen in (
        (SeedBook([at(number, one) for number, one in enumerate(hosts)]), ()),
        (SeedBook(), [at(number, one) for number, one in enumerate(hosts)]),
        (SeedBook(joined={node(number): [at(number, one)] for number, one in enumerate(hosts)}), ()),
    ):
        found = book.seeds_for(node(9), host, 0.0, seen)
        assert {address.split("/")[2] for address in found} == shown


def test_the_operators_addresses_come_first_then_reached_nodes_and_nobody_gets_its_own() -> None:
    book = SeedBook(["/dns4/seed.example.org/tcp/4001/p2p/" + node(8), at(1)])
    joined(book, 2, at(2))
    joined(book, 3, at(3, "192.168.1.5"), relayed(3))
    book.note_check(node(3), at(3, "198.51.100.3"))  # its router forwards the port
    assert book.seeds_for(node(1), FAR, 0.0, [at(4), at(1)]) == (
        "/dns4/seed.example.org/tcp/4001/p2p/" + node(8),
        at(3, "198.51.100.3"),
        at(4),
        at(2),
    )


def test_a_node_that_was_not_reached_is_named_by_its_relay_only() -> None:
    book = SeedBook()
    joined(book, 2, at(2), relayed(2))
    assert set(book.seeds_for(node(1), FAR, 0.0)) == {at(2), relayed(2)}
    book.note_check(node(2), "")
    assert book.seeds_for(node(1), FAR, 0.0) == (relayed(2),)
    assert (book.reachable(node(2)), book.reachable(node(7))) == (False, None)


def test_joiners_get_different_nodes_and_strangers_cannot_fill_the_answer() -> None:
    book = SeedBook([at(number) for number in range(50, 60)])
    for number in range(30):
        joined(book, number, at(number), at(number, port=4002), at(number, port=4003))
    answers = [book.seeds_for(node(99), FAR, 0.0) for _ in range(5)]
    assert all(len(answer) == MOST_SEEDS for answer in answers)
    assert all(answer[:MOST_GIVEN] == tuple(at(number) for number in range(50, 53)) for answer in answers)
    named = [address for answer in answers for address in answer[MOST_GIVEN:]]
    assert len({address.rpartition("/")[2] for address in named}) >= 12


def test_only_addresses_of_nodes_with_a_live_admission_count() -> None:
    book = SeedBook()
    book.note_join(node(1), [at(1)])
    assert book.seeds_for(node(9), FAR, 0.0) == ()  # it waits
    book.note_admission(node(1), 0.0)
    joined(book, 2, at(1), "no address", "/ip4/198.51.100.1/tcp/1/p2p/" + "1" * 50)  # not its own
    assert book.seeds_for(node(9), FAR, ADMISSION_SECONDS - 1) == (at(1),)
    assert book.seeds_for(node(9), FAR, ADMISSION_SECONDS) == ()
    book.note_admission(node(1), ADMISSION_SECONDS)
    assert book.seeds_for(node(9), FAR, ADMISSION_SECONDS) == (at(1),)
    book.forget(node(1))
    assert book.seeds_for(node(9), FAR, ADMISSION_SECONDS) == ()


def test_addresses_are_known_after_a_restart_while_their_nodes_have_places(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for number in (1, 2, 3, 4):  # three places
        desk.join(number, addresses=(at(number),))
    desk.leave(2)
    desk.again()
    assert desk.database.addresses() == {node(1): (at(1),), node(3): (at(3),)}
    desk.database.free(node(1), desk.now)
    desk.leave(4)
    rows = desk.database._rows("SELECT node FROM addresses")
    assert {row[0] for row in rows} == {node(2), node(3)}


def test_a_check_counts_until_the_direct_addresses_of_the_node_change() -> None:
    book = SeedBook()
    joined(book, 2, at(2, "192.168.1.5"))
    book.note_check(node(2), "")
    joined(book, 2, at(2, "192.168.1.5"), relayed(2))
    assert book.reachable(node(2)) is False
    joined(book, 2, at(2, "192.168.1.5"), at(2))  # its router maps a port now
    assert book.reachable(node(2)) is None
    assert book.seeds_for(node(1), FAR, 0.0) == (at(2),)
    book.note_check(node(2), at(2))
    joined(book, 2, at(2, "192.168.1.5"))  # and no longer does
    assert book.reachable(node(2)) is None
    assert book.seeds_for(node(1), FAR, 0.0) == ()
