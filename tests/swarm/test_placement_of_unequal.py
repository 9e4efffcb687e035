"""Stages of unequal size and nodes with unequal memory, which hold as much as fits or less."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.membership.stage_coverage import StageCoverage, StageHolder, StageRange
from neuroshard.placement.relocation import PendingRelocation, RelocationTiming, planned_moves, should_move
from neuroshard.placement.stage_choice import fitting_windows
from neuroshard.types import NodeId, RunId, WalletId

RUN = RunId("ab" * 32)


def holder(number: int, stages: tuple[int, int], *windows: tuple[int, int]) -> StageHolder:
    fits = tuple(StageRange(*window) for window in windows)
    return StageHolder(NodeId(f"node {number}"), WalletId(f"wallet {number}"), StageRange(*stages), windows=fits)


def after(coverage: StageCoverage) -> StageCoverage:
    for move in planned_moves(coverage):
        mover = next(h for h in coverage.holders if h.node_id == move.node_id)
        coverage = coverage.with_holder(replace(mover, stages=move.stages))
    return coverage


def held(coverage: StageCoverage) -> list[StageRange]:
    return sorted(h.stages for h in coverage.holders)


def test_of_two_nodes_that_fit_a_heavy_stage_or_two_others_one_goes_to_the_empty_one() -> None:
    windows = (0, 2), (2, 3)
    coverage = StageCoverage.of(RUN, 3, [holder(n, (0, 2), *windows) for n in (1, 2)])
    assert held(after(coverage)) == [StageRange(0, 2), StageRange(2, 3)]
    back = StageCoverage.of(RUN, 3, [holder(n, (2, 3), *windows) for n in (1, 2)])
    assert held(after(back)) == [StageRange(0, 2), StageRange(2, 3)]  # and holds as much there as it can


def test_whoever_has_room_takes_the_empty_stage_beside_its_own() -> None:
    coverage = StageCoverage.of(RUN, 3, [holder(1, (0, 1), (0, 2), (1, 3)), holder(2, (2, 3), (2, 3))])
    assert held(after(coverage)) == [StageRange(0, 2), StageRange(2, 3)]
    full = StageCoverage.of(RUN, 3, [holder(1, (0, 1), (0, 1)), holder(2, (2, 3), (2, 3))])
    assert planned_moves(full) == ()


def test_nobody_takes_more_on_where_the_model_is_not_complete_then_nor_before_others_had_time_to_come() -> None:
    alone = StageCoverage.of(RUN, 3, [holder(1, (0, 1), (0, 2), (1, 3))])
    assert planned_moves(alone) == ()
    coverage, times = alone.with_holder(holder(2, (2, 3), (2, 3))), RelocationTiming(more_seconds=45.0)
    unrest = PendingRelocation().seen(coverage, 100.0)
    assert should_move(NodeId("node 1"), unrest, 144.0, times) is None
    assert should_move(NodeId("node 1"), unrest, 145.0, times) is not None


def test_nobody_takes_more_on_only_because_a_stage_has_few_replicas() -> None:
    crowd = [holder(n, (0, 1), (0, 2)) for n in range(3)]
    (move,) = planned_moves(StageCoverage.of(RUN, 2, [*crowd, holder(9, (1, 2), (1, 2))]))
    assert move.stages == StageRange(1, 2)


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=7),
    rooms=st.lists(st.tuples(st.integers(5, 15), st.integers(1, 7)), min_size=1, max_size=8),
    seed=st.integers(0, 999),
)
def test_moves_end_and_no_stage_stays_empty_that_somebody_could_fill(
    sizes: list[int], rooms: list[tuple[int, int]], seed: int
) -> None:
    random, holders = Random(seed), list[StageHolder]()
    for number, (room, most) in enumerate(rooms):
        windows = fitting_windows(len(sizes), lambda w, room=room: sum(sizes[w.start : w.stop]) <= room)
        window = random.choice(windows)
        stop = min(window.stop, window.start + most)  # some hold less than fits
        holders.append(
            replace(holder(number, (window.start, stop)), windows=windows, wallet_id=WalletId(f"wallet {number % 4}"))
        )
    coverage, steps = StageCoverage.of(RUN, len(sizes), holders), 0
    while moves := planned_moves(coverage):
        before = coverage
        for move in random.sample(moves, random.randint(1, len(moves))):
            mover = next(h for h in coverage.holders if h.node_id == move.node_id)
            assert any(window.covers(move.stages) for window in mover.windows)
            coverage = coverage.with_holder(replace(mover, stages=move.stages))
        assert set(coverage.empty) <= set(before.empty)
        steps += 1
        assert steps <= 4 * len(rooms) + len(sizes)
    assert not [one for one in coverage.holders if could_fill(coverage, one)]


def could_fill(coverage: StageCoverage, one: StageHolder) -> bool:
    """Whether a node could hold an empty stage, and all that would be without it, as well."""
    others = coverage.without(one.node_id).replicas
    alone = [stage for stage in one.stages if others[stage] == 0]
    needed = [StageRange(min([stage, *alone]), max([stage, *alone]) + 1) for stage in coverage.empty]
    if one.stages in one.windows:
        return any(room.covers(stages) for room in one.windows for stages in needed)
    whole = StageRange(min([*coverage.empty, *alone]), max([*coverage.empty, *alone]) + 1) if needed else None
    return any(whole is not None and room.covers(whole) for room in one.windows)  # nobody takes more on in vain
