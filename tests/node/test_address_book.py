from __future__ import annotations

from pathlib import Path

import pytest

from neuroshard.membership.connectivity import (
    GIVEN_AGAIN_SECONDS,
    LONGEST_RETRY_SECONDS,
    MAX_ADDRESSES,
    KnownAddresses,
    remember_addresses,
    remembered_addresses,
)
from neuroshard.types import NodeId

OWN = NodeId("me")


def address(node: str, host: str = "10.0.0.1") -> str:
    return f"/ip4/{host}/tcp/4001/p2p/{node}"


def due(book: KnownAddresses, now: float = 0.0, connected: tuple[str, ...] = ()) -> list[str]:
    return [known.text for known in book.due(now, [NodeId(name) for name in connected])]


def test_given_addresses_come_first_and_connected_nodes_are_left_alone() -> None:
    book = KnownAddresses(OWN)
    book.add([address("a"), address("b")])
    book.add([address("c")], is_given=True)
    assert due(book) == [address("c"), address("a"), address("b")]
    assert due(book, connected=("c", "a")) == [address("b")]


def test_own_and_malformed_addresses_are_passed_over() -> None:
    book = KnownAddresses(OWN)
    book.add([address("me"), "/ip4/10.0.0.1/tcp/1/p2p/", "x" * 300 + "/p2p/a"], is_given=True)
    assert due(book) == []


def test_an_address_that_fails_is_tried_later_and_later_but_within_minutes() -> None:
    book = KnownAddresses(OWN)
    book.add([address("a")])
    now, pauses = 0.0, []
    for _ in range(12):
        book.note_failure(address("a"), now)
        assert due(book, now) == []
        pause = 0.0
        while not due(book, now + pause):
            pause += 1.0
        pauses.append(pause)
        now += pause
    assert pauses[:3] == [2, 4, 8]
    assert pauses[-1] == LONGEST_RETRY_SECONDS
    book.try_all_again()
    assert due(book, now) == [address("a")]


def test_a_flood_of_addresses_is_bounded_and_pushes_out_only_what_never_worked() -> None:
    book = KnownAddresses(OWN)
    book.add([address("given")], is_given=True)
    book.add([address("remembered")], is_remembered=True)
    book.add([address("works"), address("failed")])
    book.note_success(address("works"), 0.0)
    book.add(address(f"n{number}") for number in range(2 * MAX_ADDRESSES))
    assert len(due(book)) == MAX_ADDRESSES
    assert {address("given"), address("remembered"), address("works"), address("n511")} <= set(due(book))
    book.note_failure(address("n511"), 0.0)
    book.add([address("late")])
    now = 2 * LONGEST_RETRY_SECONDS
    assert address("late") in due(book, now)
    assert address("n511") not in due(book, now)


def test_strangers_push_out_no_address_that_works() -> None:
    book = KnownAddresses(OWN)
    for number in range(MAX_ADDRESSES):
        book.add([address(f"n{number}")])
        book.note_success(address(f"n{number}"), 0.0)
    book.add([address("late")])
    assert address("late") not in due(book)
    book.note_failure(address("n3"), 0.0)
    book.add([address("late")])
    now = 2 * LONGEST_RETRY_SECONDS
    assert address("late") in due(book, now)
    assert address("n3") not in due(book, now)


def test_what_worked_survives_a_restart_and_what_was_only_told_does_not(tmp_path: Path) -> None:
    """Also the address of a node that is off now: it comes back tomorrow."""
    file = tmp_path / "network" / "peers.json"
    assert remembered_addresses(file) == ()
    book = KnownAddresses(OWN)
    book.add([address("earlier")], is_remembered=True)
    book.add(address(name) for name in ("a", "b", "told"))
    book.note_success(address("a"), 2.0)
    book.note_success(address("b"), 1.0)
    book.note_failure(address("b"), 3.0)
    remember_addresses(file, book.memorable())
    assert remembered_addresses(file) == (address("a"), address("b"), address("earlier"))


def test_a_node_that_dialled_this_one_is_remembered_at_its_newest_address() -> None:
    book = KnownAddresses(OWN)
    old, new = "/ip4/10.0.0.1/tcp/1/p2p/a", "/ip4/10.0.0.1/tcp/2/p2p/a"
    book.add([old], is_remembered=True)
    book.add([address("told")])
    book.note_failure(old, 1.0)
    assert book.memorable() == (old,)
    book.add([new])
    book.note_met({NodeId("a"): "10.0.0.1"}, 2.0)
    assert book.memorable() == (new,)


def test_what_a_connected_node_says_of_another_host_is_not_remembered() -> None:
    """A later start dials remembered addresses like those from its owner."""
    book = KnownAddresses(OWN)
    book.add([f"/ip4/{host}/tcp/22/p2p/a" for host in ("192.168.1.1", "127.0.0.1", "8.8.8.8")])
    book.note_met({NodeId("a"): "9.9.9.9"}, 2.0)
    assert book.memorable() == ()


def test_a_folder_is_made_for_them_but_no_data_folder_anew(tmp_path: Path) -> None:
    file = tmp_path / "network" / "peers.json"
    remember_addresses(file, [address("a")])
    assert remembered_addresses(file) == (address("a"),)
    remember_addresses(tmp_path / "moved" / "network" / "peers.json", [address("a")])
    assert not (tmp_path / "moved").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b'{"addresses": [1]}', b"\xff", b"[" * 100_000])
def test_a_damaged_file_is_an_empty_one_and_is_kept_aside(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "peers.json"
    file.write_bytes(content)
    assert remembered_addresses(file, on_damage="ignore") == ()
    assert file.read_bytes() == content
    assert remembered_addresses(file) == ()
    assert (tmp_path / "peers.json.damaged").read_bytes() == content


def test_with_enough_connections_given_ones_are_due_now_and_then() -> None:
    book = KnownAddresses(OWN)
    book.add([address("a")])
    book.add([address("b"), address("c")], is_given=True)

    def given_due(now: float, *connected: str) -> list[str]:
        return [known.text for known in book.given_due(now, [NodeId(name) for name in connected])]

    assert given_due(0.0, "c") == [address("b")]
    book.note_success(address("b"), 10.0)
    assert given_due(20.0, "c") == []
    assert address("b") in due(book, 20.0)  # with too few connections it is due at once
    assert given_due(10.0 + GIVEN_AGAIN_SECONDS, "c") == [address("b")]
    book.note_failure(address("b"), 700.0)
    assert given_due(700.5, "c") == []
    assert given_due(700.0 + LONGEST_RETRY_SECONDS, "c") == [address("b")]
