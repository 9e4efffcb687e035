from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.membership.stage_coverage import StageCoverage, StageHolder, StageRange
from neuroshard.placement.relocation import (
    Move,
    MoveReason,
    PendingRelocation,
    RelocationTiming,
    planned_moves,
    should_move,
)
from neuroshard.types import NodeId, RunId, WalletId

RUN = RunId("ab" * 32)
TIMES = RelocationTiming(settle_seconds=5.0, calm_seconds=60.0, turn_seconds=20.0)


def holder(number: int, start: int, stop: int, wallet: str = "", *, is_ready: bool = True) -> StageHolder:
    wallet_id = WalletId(wallet or f"wallet {number}")
    return StageHolder(NodeId(f"node {number}"), wallet_id, StageRange(start, stop), is_ready)


def covered(stage_count: int, *held: tuple[int, int]) -> StageCoverage:
    return StageCoverage.of(RUN, stage_count, [holder(n, *ends) for n, ends in enumerate(held)])


def carried_out(coverage: StageCoverage, *moves: Move) -> StageCoverage:
    """The swarm after all of the moves, with their weights."""
    for move in moves:
        mover = next(h for h in coverage.holders if h.node_id == move.node_id)
        coverage = coverage.with_holder(replace(mover, stages=move.stages, is_ready=True))
    return coverage


def deciders(
    coverage: StageCoverage, seconds: float, unrest: PendingRelocation | None = None
) -> dict[NodeId, StageRange]:
    """Who moves where, so long after everybody saw this coverage for the first time."""
    unrest = (unrest or PendingRelocation()).seen(coverage, 100.0)
    moves = [should_move(h.node_id, unrest, 100.0 + seconds, TIMES) for h in coverage.holders]
    return {move.node_id: move.stages for move in moves if move is not None}


def test_nobody_moves_while_every_stage_has_a_replica() -> None:
    assert planned_moves(covered(3, (0, 1), (1, 2), (2, 3), (0, 1))) == ()
    assert deciders(covered(3, (0, 1), (1, 2), (2, 3), (0, 1)), 1e6) == {}


def test_one_of_two_replicas_goes_to_an_empty_stage() -> None:
    gone = deciders(covered(3, (0, 1), (1, 2), (0, 1)), 5)
    assert list(gone.values()) == [StageRange(2, 3)]
    assert set(gone) < {"node 0", "node 2"}


def test_the_only_holder_of_a_stage_stays() -> None:
    assert planned_moves(covered(3, (0, 1), (1, 2))) == ()


def test_a_replica_that_is_not_ready_is_no_reason_to_leave() -> None:
    one_on_the_way = covered(2, (0, 1)).with_holder(holder(7, 0, 1, is_ready=False))
    (move,) = planned_moves(one_on_the_way)
    assert move.node_id == "node 7"  # which has nothing to lose
    assert move.stages == StageRange(1, 2)


def test_two_empty_stages_are_filled_by_two_nodes_that_do_not_leave_one_stage_together() -> None:
    coverage = covered(4, (0, 1), (0, 1), (1, 2), (1, 2))
    gone = deciders(coverage, 5)
    assert sorted(gone.values()) == [StageRange(2, 3), StageRange(3, 4)]
    assert len(gone) == 2
    assert carried_out(coverage, *planned_moves(coverage)).replicas == (1, 1, 1, 1)


def test_the_best_covered_stage_gives() -> None:
    (move,) = planned_moves(covered(3, (0, 1), (0, 1), (1, 2), (1, 2), (1, 2)))
    assert move.node_id in {"node 2", "node 3", "node 4"}


def test_nobody_moves_before_the_swarm_has_settled_nor_late_in_a_turn() -> None:
    coverage = covered(2, (0, 1), (0, 1))
    assert deciders(coverage, 4.9) == {}
    assert len(deciders(coverage, 5)) == len(deciders(coverage, 15)) == 1
    assert deciders(coverage, 15.1) == deciders(coverage, 24.9) == {}


def test_the_next_in_rank_goes_when_the_first_does_not_and_then_the_first_is_asked_again() -> None:
    coverage = covered(2, (0, 1), (0, 1), (0, 1))
    turns = [deciders(coverage, 5 + 20 * turn) for turn in range(5)]
    asked = [list(turn) for turn in turns]
    assert all(len(turn) == 1 for turn in (*asked[:3], asked[4]))
    assert len({node for turn in asked[:3] for node in turn}) == 3
    assert asked[3] == []
    assert asked[4] == asked[0]


def test_equal_nodes_are_asked_in_another_order_after_many_turns() -> None:
    coverage = covered(2, *[(0, 1)] * 100)
    first = [deciders(coverage, 5 + 20 * turn) for turn in range(4)]
    later = [deciders(coverage, 5 + 20 * (64 + turn)) for turn in range(4)]
    assert first != later


def test_the_time_starts_anew_when_help_is_on_its_way() -> None:
    coverage = covered(3, (0, 1), (0, 1), (0, 1))
    unrest = PendingRelocation().seen(coverage, 100.0)
    first, second = unrest.moves
    helped = coverage.with_holder(holder(int(first.node_id[-1]), first.stages.start, first.stages.stop, is_ready=False))
    assert unrest.seen(coverage, 104.0).since == 100.0
    assert unrest.seen(helped, 104.0).since == 104.0
    assert should_move(second.node_id, unrest.seen(helped, 104.0), 106.0, TIMES) is None
    calm = carried_out(coverage, first, second)
    assert unrest.seen(calm, 104.0) == PendingRelocation(calm, (), 104.0)


def test_a_node_makes_room_when_nobody_can_go_to_an_empty_stage_directly() -> None:
    coverage = covered(6, (1, 3), (3, 5), (0, 2))  # stage 5 is empty, stage 1 has two replicas
    (step,) = planned_moves(coverage)
    assert (step.reason, step.about, step.stages) == (MoveReason.EMPTY_STAGE, 5, StageRange(2, 4))
    under_way = coverage.with_holder(replace(holder(0, 2, 4), is_ready=False))
    assert planned_moves(under_way) == ()  # the next one waits for it
    near = (StageRange(0, 1), StageRange(1, 2))
    pair = [replace(holder(n, 0, 1, "farm"), windows=near) for n in (7, 8)]
    stays = replace(holder(2, 0, 2), windows=(StageRange(0, 2),))
    assert planned_moves(StageCoverage.of(RUN, 2, [stays, *pair])) != ()
    waiting = StageCoverage.of(RUN, 6, [*under_way.holders, *pair, stays])
    assert planned_moves(waiting) == ()  # and everybody waits with it
    after = carried_out(coverage, step)
    (last,) = planned_moves(after)
    assert last.stages == StageRange(4, 6)
    assert carried_out(after, last).empty == ()


def test_a_node_goes_only_where_its_memory_allows() -> None:
    heavy_end = [replace(h, windows=(StageRange(0, 2), StageRange(1, 2))) for h in covered(3, (0, 2), (0, 2)).holders]
    assert planned_moves(StageCoverage.of(RUN, 3, heavy_end)) == ()
    (move,) = planned_moves(StageCoverage.of(RUN, 3, heavy_end).with_holder(holder(9, 0, 1)))
    assert move.node_id == "node 9"


def test_nodes_of_one_wallet_part_when_there_is_time() -> None:
    pair = [holder(0, 0, 1, "farm"), holder(1, 0, 1, "farm"), holder(2, 1, 2)]
    coverage = StageCoverage.of(RUN, 2, pair)
    (move,) = planned_moves(coverage)
    assert (move.reason, move.about, move.stages) == (MoveReason.SAME_WALLET, "farm", StageRange(1, 2))
    assert deciders(coverage, 59) == {}
    assert len(deciders(coverage, 60)) == 1
    assert planned_moves(carried_out(coverage, move)) == ()


def test_a_crowded_stage_helps_one_with_a_single_holder_when_there_is_time() -> None:
    assert planned_moves(covered(2, (0, 1), (1, 2), (1, 2))) == ()
    coverage = covered(2, (0, 1), (1, 2), (1, 2), (1, 2))
    (move,) = planned_moves(coverage)
    assert (move.reason, move.about, move.stages) == (MoveReason.UNEVEN, 0, StageRange(0, 1))
    assert deciders(coverage, 59) == {}
    assert planned_moves(carried_out(coverage, move)) == ()


def test_help_comes_no_faster_than_the_weights_can_be_handed_out() -> None:
    crowd = [holder(n, 0, 1) for n in range(20)]
    one_ready = StageCoverage.of(RUN, 2, [*crowd, holder(20, 1, 2)])
    assert len(planned_moves(one_ready)) == 1
    assert planned_moves(one_ready.with_holder(holder(21, 1, 2, is_ready=False))) == ()
    three_ready = StageCoverage.of(RUN, 2, [*crowd, *(holder(n, 1, 2) for n in (20, 21, 22))])
    assert len(planned_moves(three_ready)) == 3


def test_an_empty_stage_comes_before_everything_else() -> None:
    farm = [holder(n, 0, 1, "farm") for n in range(6)]
    reasons = {move.reason for move in planned_moves(StageCoverage.of(RUN, 3, [*farm, holder(9, 1, 2)]))}
    assert reasons == {MoveReason.EMPTY_STAGE}


windows = st.tuples(st.integers(0, 7), st.integers(1, 4))


@settings(max_examples=100, deadline=None)
@given(stage_count=st.integers(2, 8), held=st.lists(windows, min_size=2, max_size=9), seed=st.integers(0, 99))
def test_moves_end_and_no_stage_stays_empty_while_another_has_two_replicas(
    stage_count: int, held: list[tuple[int, int]], seed: int
) -> None:
    random = Random(seed)
    lengths = [min(length, stage_count) for _, length in held]
    places = [(min(start, stage_count - length), length) for (start, _), length in zip(held, lengths, strict=True)]
    coverage = StageCoverage.of(
        RUN, stage_count, [holder(n, a, a + length, f"wallet {n % 4}") for n, (a, length) in enumerate(places)]
    )
    steps = 0
    while moves := planned_moves(coverage):
        after = carried_out(coverage, *random.sample(moves, random.randint(1, len(moves))))
        # whoever of them goes, nothing that somebody held is left alone
        assert set(after.empty) <= set(coverage.empty)
        coverage, steps = after, steps + 1
        assert steps <= 4 * len(held)
    assert not coverage.empty or max(coverage.replicas) == 1


@pytest.mark.parametrize("turn", [0, 1, 5])
def test_all_who_see_the_same_agree_on_who_goes(turn: int) -> None:
    coverage = covered(5, *[(0, 1)] * 8, *[(1, 2)] * 6, (2, 3))
    assert sorted(deciders(coverage, 5 + 20 * turn).values()) == [StageRange(3, 4), StageRange(4, 5)]
