"""The committee follows the rules that the model of the chain explores, and its quorums always share an honest seat."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neuroshard.consensus.committee import (
    MAX_SEATS,
    Admit,
    Bar,
    Committee,
    Entry,
    EntryRules,
    Expel,
    InvalidEntryError,
    Leave,
    MoveKey,
    Remove,
    Seat,
    tolerated_faults,
)
from neuroshard.types import NodeId, WalletId
from tests.models import chain_rules
from tests.models.chain_rules import Rules

OWNER = WalletId("w0")


def seat(number: int) -> Seat:
    return Seat(WalletId(f"w{number}"), NodeId(f"n{number}"), 0)


def admit(*numbers: int) -> list[Admit]:
    return [Admit(WalletId(f"w{number}"), NodeId(f"n{number}")) for number in numbers]


def committee_of(count: int, *, is_open: bool) -> Committee:
    return Committee.founded([seat(number) for number in range(count)], is_open=is_open)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("count", range(1, 9))
def test_two_quorums_share_more_seats_than_may_lie(count: int, is_open: bool) -> None:
    committee = committee_of(count, is_open=is_open)
    members = [each.member for each in committee.seats]
    quorums = [
        set(chosen)
        for size in range(count + 1)
        for chosen in combinations(members, size)
        if committee.is_quorum(chosen)
    ]
    assert quorums
    assert all(len(first & second) > committee.faults for first, second in combinations(quorums, 2))


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("count", range(1, MAX_SEATS + 1))
def test_the_seats_that_may_be_absent_leave_a_quorum(count: int, is_open: bool) -> None:
    """F seats of a committee that tolerates F liars, and one of three friends."""
    committee = committee_of(count, is_open=is_open)
    present = [each.member for each in committee.seats[committee.faults :]]
    assert committee.is_quorum(present)
    assert committee.faults == tolerated_faults(count, is_open=is_open)


def test_half_of_the_friends_decide_with_the_first_seat_only() -> None:
    committee = committee_of(4, is_open=False)
    first, second, third, fourth = (each.member for each in committee.seats)
    assert committee.is_quorum([first, fourth])
    assert not committee.is_quorum([second, third])
    assert not committee_of(4, is_open=True).is_quorum([first, second])


def test_members_without_a_seat_do_not_count() -> None:
    committee = committee_of(3, is_open=False)
    strangers = [seat(number).member for number in range(10, 30)]
    assert not committee.is_quorum([committee.seats[0].member, *strangers])
    moved = Seat(WalletId("w1"), NodeId("another node"), 0)
    assert not committee.is_quorum([committee.seats[0].member, moved.member])


def modelled(entry: Entry) -> chain_rules.Entry:
    assert not isinstance(entry, Bar)  # it changes no committee
    kinds = {Admit: "admit", Leave: "leave", Remove: "remove", Expel: "expel", MoveKey: "key"}
    return chain_rules.Entry(kinds[type(entry)], int(entry.wallet_id[1:]), 0)  # type: ignore[arg-type,index]


ENTRIES = st.one_of(
    st.builds(lambda number: admit(number)[0], st.integers(0, 9)),
    *(
        st.builds(lambda number, kind=kind: kind(WalletId(f"w{number}")), st.integers(0, 9))
        for kind in (Leave, Remove, Expel)
    ),
)


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 8), st.booleans(), st.lists(ENTRIES, min_size=1, max_size=4))
@example(1, True, [*admit(4, 5, 6)])
@example(4, True, [Remove(WalletId("w3")), *admit(5)])
def test_entries_change_the_committee_as_in_the_model(count: int, is_open: bool, entries: list[Entry]) -> None:
    committee = committee_of(count, is_open=is_open)
    seats = [chain_rules.Seat(number, number) for number in range(count)]
    expected = chain_rules.changed(
        Rules(), chain_rules.founded(seats, not is_open), [modelled(each) for each in entries], 0
    )
    try:
        after = EntryRules(1, OWNER).applied(committee, entries)
    except InvalidEntryError:
        assert expected is None
        return
    assert expected is not None
    assert [int(each.wallet_id[1:]) for each in after.seats] == [each.wallet for each in expected.seats]
    assert (after.faults, after.most_faults) == (expected.faults, expected.most_faults)


def test_a_leave_of_one_of_four_strangers_needs_a_replacement_in_the_same_value() -> None:
    committee, rules = committee_of(4, is_open=True), EntryRules(1, OWNER)
    with pytest.raises(InvalidEntryError, match="fewer than the 4"):
        rules.applied(committee, [Leave(WalletId("w3"))])
    after = rules.applied(committee, [*admit(8), Leave(WalletId("w3"))])
    assert after.faults == 1
    assert len(rules.applied(committee, [Expel(WalletId("w3"))].copy()).seats) == 3  # a proof needs no replacement


def test_tolerance_never_falls_and_the_owner_returns_to_the_first_seat() -> None:
    committee, rules = committee_of(7, is_open=True), EntryRules(1, OWNER)
    after = rules.applied(committee, [Expel(WalletId("w6"))])
    assert after.faults == committee.faults == 2
    friends = EntryRules(2, OWNER).applied(committee_of(2, is_open=False), [Leave(OWNER)])
    back = EntryRules(3, OWNER).applied(friends, admit(0))
    assert [each.wallet_id for each in back.seats] == ["w0", "w1"]
    assert back.seats[0].seated_at == 3


@pytest.mark.parametrize("seats", range(1, 4))
def test_strangers_get_the_first_seats_in_one_value_that_leads_to_four(seats: int) -> None:
    committee, rules, others = committee_of(seats, is_open=True), EntryRules(1, OWNER), range(4, 9)
    for count in (*range(1, 4 - seats), *range(5 - seats, 6)):
        with pytest.raises(InvalidEntryError, match=r"4 seats|an eighth"):
            rules.applied(committee, admit(*others[:count]))
    after = rules.applied(committee, admit(*others[: 4 - seats]))
    assert (len(after.seats), after.faults, after.quorum) == (4, 1, 3)
    assert after.seats[0].wallet_id == OWNER


def test_the_committee_then_grows_by_one_seat_per_value_and_its_tolerance_by_the_formula() -> None:
    committee = committee_of(4, is_open=True)
    for number in range(4, MAX_SEATS):
        with pytest.raises(InvalidEntryError):
            EntryRules(1, OWNER).applied(committee, admit(number, number + 1, number + 2))
        committee = EntryRules(1, OWNER).applied(committee, admit(number))
        assert committee.faults == (len(committee.seats) - 1) // 3
    with pytest.raises(InvalidEntryError, match="at most 16 seats"):
        EntryRules(1, OWNER).applied(committee, admit(MAX_SEATS))


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (admit(1), "has seat"),
        ([Leave(WalletId("w9"))], "has no seat"),
        (admit(8, 9), "an eighth"),
        ([Admit(WalletId("w9"), NodeId("n1"))], "once"),
        ([Leave(WalletId(f"w{number}")) for number in range(3)], "last seat"),
    ],
)
def test_what_no_value_may_carry(entries: list[Entry], reason: str) -> None:
    with pytest.raises(InvalidEntryError, match=reason):
        EntryRules(1, OWNER).applied(committee_of(3, is_open=False), entries)
