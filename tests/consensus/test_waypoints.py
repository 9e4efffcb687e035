"""Waypoints: chains and deputies' foundations must pass through the values that the owner has signed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from neuroshard.consensus.chain import AstrayError, Chain, ForkError
from neuroshard.consensus.foundation import FoundationError, Founding, StageStart
from neuroshard.consensus.stage_chain import InMemoryChainStore, StageChain
from neuroshard.consensus.waypoints import (
    KEPT_PER_STAGE,
    MILESTONE_HEIGHTS,
    PERIOD_SECONDS,
    SKEW_SECONDS,
    Milestone,
    Point,
    SignedWaypoint,
    Waypoint,
    is_waypoint_due,
    keeps_milestone,
    lasting_milestone,
    next_milestone,
    with_milestone,
)
from neuroshard.identity.signing import SignatureError
from neuroshard.node.founding import Founder
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.types import LayerRange
from tests.consensus.test_chain import MEMBERS, founded, signed, value_on
from tests.consensus.test_foundation import DEPUTY, EMPTY, FIRST, OWNER, RUN, STRANGER, statement
from tests.node.test_founding import NamedHolders, versions_of
from tests.worlds.nodes import OWNER as OWNER_OF_RUN

DAY = 86_400.0


def milestones_up_to(height: int) -> tuple[Milestone, ...]:
    """The milestones in the ledger of a value at this height."""
    milestones = tuple[Milestone, ...]()
    for place in range(MILESTONE_HEIGHTS, height, MILESTONE_HEIGHTS):
        milestones = with_milestone(milestones, Milestone(place, f"{place:064x}"))
    return milestones


@given(st.integers(1, 400 * MILESTONE_HEIGHTS))
def test_ledgers_keep_the_milestones_that_the_arithmetic_says(height: int) -> None:
    kept = {milestone.height for milestone in milestones_up_to(height)}
    every = [Milestone(place, "a" * 64) for place in range(MILESTONE_HEIGHTS, height, MILESTONE_HEIGHTS)]
    assert kept == {milestone.height for milestone in every if keeps_milestone(milestone, height)}
    assert len(kept) <= 8 * 10


def test_the_owner_signs_the_milestone_that_is_kept_longest() -> None:
    milestones = milestones_up_to(13 * MILESTONE_HEIGHTS + 1)
    assert next_milestone(milestones, 0) == Milestone(8 * MILESTONE_HEIGHTS, f"{8 * MILESTONE_HEIGHTS:064x}")
    later = next_milestone(milestones, 8 * MILESTONE_HEIGHTS)
    assert later is not None
    assert later.height == 12 * MILESTONE_HEIGHTS
    assert next_milestone(milestones, 13 * MILESTONE_HEIGHTS) is None


@pytest.mark.parametrize(
    ("count", "expected"), [(0, None), (1, 1), (3, 2), (7, 4), (9, 8), (15, 8), (43, 40), (70, 64)]
)
def test_an_invitation_names_the_newest_milestone_that_is_kept_for_long(count: int, expected: int | None) -> None:
    """The default invitation is valid for a week, in which a line may grow by more than 10,000 heights."""
    found = lasting_milestone(milestones_up_to(count * MILESTONE_HEIGHTS + 1))
    assert (found and found.height) == (expected and expected * MILESTONE_HEIGHTS)
    if found is not None and count > 8:
        assert keeps_milestone(found, found.height + 10_000)


@pytest.mark.parametrize("height", [0, 5, 127, 129])
def test_no_ledger_keeps_a_value_of_another_height(height: int) -> None:
    """A careless invitation names one: it counts only where the line's last values show it."""
    assert not keeps_milestone(Milestone(height, "a" * 64), 1000)


@cache
def line(content: str, fork: int, heights: int) -> Chain:
    """A chain that the seats certify, with other values from a height on."""
    chain = founded()
    for height in range(1, heights + 1):
        value = value_on(chain, content if height >= fork else "1")
        chain = chain.extended(signed(value, [seat.member for seat in chain.ledger.committee.seats]))
    return chain


LONG = 2 * MILESTONE_HEIGHTS + 140  # the values before the second milestone are not among the recent ones


def point_of(chain: Chain, height: int = MILESTONE_HEIGHTS, made_at: float = 0) -> Waypoint:
    """A waypoint on a line."""
    milestone = next(milestone for milestone in chain.ledger.milestones if milestone.height == height)
    return Waypoint(RUN, 0, chain.statement, chain.epoch, milestone, int(made_at))


def bound_by(point: Waypoint) -> tuple[Point, ...]:
    return (Point(point.milestone, "the owner has signed"),)


def newcomer(point: Waypoint | None) -> Chain:
    return replace(founded(), points=() if point is None else bound_by(point))


def test_a_newcomer_takes_no_line_that_leaves_out_the_waypoint() -> None:
    """The seats certify a second line from height 20 on, as an old copy of their folders would."""
    right, wrong = line("1", 1, LONG), line("2", 20, LONG)
    point = point_of(right)
    assert newcomer(point).proven(right.proof()).standing == right.standing
    assert newcomer(None).proven(wrong.proof()).standing == wrong.standing  # nothing shows the difference
    with pytest.raises(AstrayError):
        newcomer(point).proven(wrong.proof())
    with pytest.raises(AstrayError):
        newcomer(point_of(wrong)).proven(right.proof())


def test_a_line_below_the_waypoint_is_neither_taken_nor_an_error() -> None:
    right = line("1", 1, LONG)
    known = newcomer(point_of(right))
    short = line("2", 20, MILESTONE_HEIGHTS - 1)
    assert known.proven(short.proof()) is known
    at_the_place = line("2", 20, MILESTONE_HEIGHTS)
    with pytest.raises(AstrayError):
        known.proven(at_the_place.proof())


def test_the_next_value_must_be_the_signed_one() -> None:
    before, right = line("1", 1, MILESTONE_HEIGHTS - 1), line("1", 1, LONG)
    bound = before.bound_to(bound_by(point_of(right)))
    voters = [seat.member for seat in before.ledger.committee.seats]
    with pytest.raises(AstrayError):
        bound.extended(signed(value_on(before, "2"), voters))
    assert bound.extended(signed(value_on(before, "1"), voters)).standing.height == MILESTONE_HEIGHTS


def test_a_milestone_that_ledgers_keep_no_more_stops_nobody() -> None:
    chain, newest = line("1", 1, LONG), 40 * MILESTONE_HEIGHTS
    lost = Milestone(MILESTONE_HEIGHTS, "e" * 64)
    assert not keeps_milestone(lost, newest + 1)
    bound = replace(chain, points=bound_by(Waypoint(RUN, 0, chain.statement, 0, lost, 0)))
    ledger = structs.replace(chain.ledger, milestones=milestones_up_to(newest + 1)[-8:])
    bound._check_line(newest + 1, "f" * 64, ledger, ())  # pyright: ignore[reportPrivateUsage]


def test_a_node_follows_no_line_that_leaves_its_own_however_much_longer_it_is() -> None:
    own, other = line("1", 1, MILESTONE_HEIGHTS + 12), line("2", 20, LONG)
    with pytest.raises(ForkError):
        own.proven(other.proof())
    assert own.proven(line("1", 1, LONG).proof()).standing.height == LONG
    near = line("2", 30, 60)
    with pytest.raises(ForkError) as found:
        line("1", 1, 50).proven(near.proof(known_height=20))
    assert found.value.double == tuple(MEMBERS[:3])


def test_a_node_leaves_its_own_line_when_the_owner_has_signed_another() -> None:
    right, wrong = line("1", 1, LONG), line("2", 20, LONG)
    founding = [Founding(wrong.statement, 0, wrong.start, wrong.owner)]
    own = StageChain(lambda: founding[0], InMemoryChainStore())
    own._chain = wrong  # pyright: ignore[reportPrivateUsage]
    assert own.chain is wrong
    founding[0] = replace(founding[0], points=bound_by(point_of(right)))
    assert own.chain is not None
    assert own.chain.tip is None
    assert own.fork is None
    assert own.chain.proven(right.proof()).standing == right.standing


def waypoint(height: int, value: str, of: Any = FIRST, signer: Any = OWNER, **changes: Any) -> SignedWaypoint:
    made = Waypoint(RUN, 0, of.id, of.foundation.epoch, Milestone(height, value * 64), 7)
    return SignedWaypoint.sign(signer, structs.replace(made, **changes))


def test_a_forged_waypoint_is_refused() -> None:
    for signer in (DEPUTY, STRANGER):
        with pytest.raises(SignatureError):
            EMPTY.with_statements([FIRST], [waypoint(128, "a", signer=signer)])
    with pytest.raises(FoundationError, match="is of run"):
        EMPTY.with_statements([FIRST], [waypoint(128, "a", run_id="2" * 64)])


def test_the_newest_waypoint_counts_in_every_order_and_older_ones_are_forgotten() -> None:
    many = [waypoint(128 * number, "a") for number in range(1, KEPT_PER_STAGE + 4)]
    for order in (many, many[::-1]):
        known = EMPTY.with_statements([FIRST], order)
        assert known.points[0].milestone.height == 128 * len(many)
        assert len(known.waypoints[0]) == KEPT_PER_STAGE
        assert known.with_statements((), many) == known
    future = waypoint(128, "b", statement="d" * 64, epoch=9)  # of a foundation that is not known here
    versions = versions_of("friends")
    versions.foundations = EMPTY.with_statements([FIRST], [future])
    founding = versions.founding_of(0)
    assert founding is not None
    assert founding.points == ()


def test_two_waypoints_of_one_height_count_for_nothing() -> None:
    older, one, other = waypoint(128, "a"), waypoint(256, "b"), waypoint(256, "c")
    for order in permutations([older, one, other]):
        assert EMPTY.with_statements([FIRST], order).points[0] == older.waypoint


def started(height: int, parent: str | None) -> StageStart:
    return StageStart(0, FIRST.foundation.stages[0].committee, height, 5, "5" * 64, parent)


@pytest.mark.parametrize(
    ("start", "is_valid"),
    [
        (started(127, "a" * 64), False),
        (started(128, "b" * 64), False),
        (started(128, "a" * 64), True),
        (started(129, "c" * 64), True),
    ],
)
def test_a_deputy_sets_no_stage_back_below_the_waypoint(start: StageStart, is_valid: bool) -> None:
    known, point = EMPTY.with_statements([FIRST]), waypoint(128, "a")
    by_deputy = known.next(DEPUTY, [start])
    after = known.next(DEPUTY, [start])
    for order in permutations([([by_deputy], ()), ((), [point]), ([after], ())]):
        found = known
        for statements, waypoints in order:
            found = found.with_statements(statements, waypoints)
        assert (by_deputy.id in found.known) == is_valid
    by_owner = known.next(OWNER, [start])
    assert known.with_statements([by_owner], [point]).current == by_owner


def test_what_the_owner_continued_stays_valid_below_its_waypoint() -> None:
    by_deputy = statement(DEPUTY, FIRST, height=5)
    continued = statement(before=by_deputy, height=5)
    known = EMPTY.with_statements([FIRST, by_deputy, continued], [waypoint(128, "a")])
    assert known.current == continued


@pytest.mark.parametrize(
    ("age", "waited", "is_due"),
    [
        (0.0, 0.0, False),
        (PERIOD_SECONDS - 1, 0.0, False),
        (PERIOD_SECONDS, 0.0, True),
        (PERIOD_SECONDS - DAY, PERIOD_SECONDS, True),  # the clock was set back by a day
        (-DAY, DAY, False),
        (-SKEW_SECONDS - 1, 0.0, True),  # signed with a clock that was far ahead
    ],
)
def test_the_clock_decides_only_when_the_next_waypoint_is_due(age: float, waited: float, is_due: bool) -> None:
    last = waypoint(128, "a", made_at=int(1e9)).waypoint
    assert is_waypoint_due(last, 1e9 + age, waited) == is_due
    assert is_waypoint_due(None, 1e9, waited)


def test_the_owners_node_signs_once_per_week_and_keeps_it_over_restarts_and_clocks(tmp_path: Path) -> None:
    chains = {0: line("1", 1, MILESTONE_HEIGHTS + 12)}
    versions, stored = versions_of("friends"), StoredFoundations(tmp_path)
    known = versions.foundations.with_statements([versions.foundations.next(OWNER_OF_RUN, [chains[0].start])])
    versions.learn_foundations(known)
    statement_id = known.highest[0].id
    chains = {key: replace(chain, statement=statement_id) for key, chain in chains.items()}
    swarm = NamedHolders(versions, {})

    def last_chain(layers: LayerRange) -> Chain | None:
        return chains.get(layers.start)

    swarm.rounds = SimpleNamespace(last_chain=last_chain)
    clock = [1e9]
    founder = Founder(cast("Any", swarm), OWNER_OF_RUN, stored, now=lambda: clock[0])
    assert founder.sign_waypoints(0.0)
    first = versions.foundations.points[0]
    assert (first.milestone.height, first.statement) == (MILESTONE_HEIGHTS, statement_id)
    for moved in (-DAY, DAY, 0.0):
        clock[0] = 1e9 + moved
        assert not founder.sign_waypoints(60.0)
    chains[0] = replace(line("1", 1, LONG), statement=statement_id)
    assert not founder.sign_waypoints(60.0)  # a later milestone, but not a week later
    clock[0] = 1e9 + PERIOD_SECONDS - DAY  # set back by a day meanwhile
    restarted = Founder(cast("Any", swarm), OWNER_OF_RUN, stored, now=lambda: clock[0])
    versions.foundations = stored.read(versions.offer)
    assert versions.foundations.points[0] == first
    assert not restarted.sign_waypoints(60.0)
    clock[0] += DAY
    assert restarted.sign_waypoints(60.0)
    assert stored.read(versions.offer).points[0].milestone.height == 2 * MILESTONE_HEIGHTS
    assert not restarted.sign_waypoints(60.0)
