"""The rules of the chain keep agreement and progress, and each of them is needed."""

from __future__ import annotations

import pytest

from tests.models.chain import FEW, SMALL, explore_all, explore_schedules
from tests.models.chain_rounds import Boundary, Bounds, explore, start
from tests.models.chain_rules import Rules

FRIENDS, STRANGERS = start("HHH", friends=True), start("HHHL", friends=False)
EVEN = start("HHHH", friends=True)
TWO_VALUES = "two values of one height have certificates"
CONTRADICTION = "the locks of a quorum contradict each other"
STUCK = "a quorum is bound to a value that it cannot complete"


def test_the_proposed_rules_hold_within_small_bounds() -> None:
    report = explore_all(SMALL)
    assert (report.violation, report.trace) == ("", [])
    assert report.states > 5_000


def test_the_proposed_rules_hold_under_random_schedules() -> None:
    summary = explore_schedules(Rules(), range(FEW))
    assert (summary.violation, summary.seed) == ("", -1)
    assert summary.seen["calm heights"] == 10 * FEW
    assert all(summary.seen[name] > 0 for name in ("admit", "leave", "expel", "key", "foundation", "restored backup"))


@pytest.mark.parametrize(
    ("rules", "begin", "heights", "violation"),
    [
        (Rules(lock_binds=False), STRANGERS, 1, TWO_VALUES),
        (Rules(lock_binds=False), FRIENDS, 1, TWO_VALUES),
        (Rules(quorum_shortfall=1), STRANGERS, 1, TWO_VALUES),
        (Rules(half_needs_first=False), start("HH", friends=True), 1, TWO_VALUES),
        (Rules(faults_fall_with_seats=True), STRANGERS, 3, TWO_VALUES),
        (Rules(faults_fall_by_assent=True), STRANGERS, 3, TWO_VALUES),
        (Rules(strangers_start_with_four=False), start("H", friends=False), 3, TWO_VALUES),
        (Rules(mistakes_bounded=False), start("HH", friends=False), 3, TWO_VALUES),
        (Rules(one_view_per_certificate=False), FRIENDS, 1, TWO_VALUES),
        (Rules(proposer_names_value=False), EVEN, 1, CONTRADICTION),
        (Rules(quorum_after_certifies=True), FRIENDS, 1, STUCK),
        (Rules(lock_needs_bytes=False), STRANGERS, 1, "a quorum is bound to a value whose bytes it does not have"),
        (Rules(after_loss="at once"), FRIENDS, 1, TWO_VALUES),
        (Rules(after_loss="next certificate"), FRIENDS, 3, TWO_VALUES),
    ],
)
def test_without_one_rule_the_exhaustive_explorer_finds_a_violation(
    rules: Rules, begin: Boundary, heights: int, violation: str
) -> None:
    views = 4 if not rules.one_view_per_certificate else 3
    seats = len(begin.kinds) if begin.ledger.friends else 4
    report = explore(rules, [begin], Bounds(seats=seats, heights=heights, views=views))
    assert report.violation == violation
    assert report.trace


@pytest.mark.parametrize(
    "rules",
    [
        Rules(quorum_shortfall=1),
        Rules(only_seats_vote=False),
        Rules(quorum_after_certifies=True),
        Rules(lock_binds=False),
        Rules(half_needs_first=False),
        Rules(after_loss="next certificate"),
        Rules(entries_name_parent=False),
        Rules(proof_needs_one_view=False),
        Rules(votes_are_logged=False),
    ],
)
def test_without_one_rule_a_random_schedule_finds_a_violation(rules: Rules) -> None:
    assert explore_schedules(rules, range(FEW)).violation


def test_two_foundations_with_one_number_need_two_names() -> None:
    """Owner and deputy found in isolation: only the hash of the statement tells their epochs apart."""
    summary = explore_schedules(Rules(statement_names_epoch=False), range(815, 825))
    assert summary.violation.startswith("two honest members hold different values")
