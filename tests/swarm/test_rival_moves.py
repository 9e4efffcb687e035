"""Two nodes that have decided for the same stages, or to leave the same ones: who of them goes."""

from __future__ import annotations

from itertools import combinations

import pytest

from neuroshard.membership.stage_coverage import StageCoverage, StageHolder, StageRange
from neuroshard.placement.relocation import Move, MoveReason, may_proceed
from neuroshard.types import NodeId, RunId, WalletId

RUN = RunId("ab" * 32)


def holder(name: str, stage: int, *, is_ready: bool = True) -> StageHolder:
    return StageHolder(NodeId(name), WalletId(name), StageRange(stage, stage + 1), is_ready)


def coverage(*holders: StageHolder) -> StageCoverage:
    return StageCoverage.of(RUN, 3, holders)


def goes(name: str, before: StageCoverage, after: StageCoverage, to: int = 2) -> bool:
    mover = next(one for one in before.holders if one.node_id == name)
    move = Move(mover.node_id, StageRange(to, to + 1), MoveReason.EMPTY_STAGE, to)
    return may_proceed(mover, move, before, after)


CROWD = [holder(name, stage) for name, stage in [("a", 0), ("b", 0), ("c", 0), ("d", 1), ("e", 1), ("f", 1)]]


def test_a_node_without_rivals_goes() -> None:
    assert goes("a", coverage(*CROWD), coverage(*CROWD))


@pytest.mark.parametrize("rivals", list(combinations("abdef", 2)))
def test_of_two_that_say_they_go_exactly_one_does(rivals: tuple[str, ...]) -> None:
    before = coverage(*CROWD)
    after = coverage(
        *[one for one in CROWD if one.node_id not in rivals], *[holder(r, 2, is_ready=False) for r in rivals]
    )
    assert sum(goes(rival, before, after) for rival in rivals) == 1


def test_whoever_works_there_by_now_has_filled_it() -> None:
    assert not any(goes(one, coverage(*CROWD), coverage(*CROWD, holder("x", 2))) for one in "abcdef")


def test_who_was_there_before_is_no_rival() -> None:
    starting = holder("x", 2, is_ready=False)
    before = coverage(*CROWD, starting)
    assert all(goes(one, before, before) for one in "abcdef")


def test_two_that_would_leave_a_stage_to_nobody_both_stay() -> None:
    before = coverage(holder("a", 0), holder("b", 0))
    after = coverage(holder("a", 1, is_ready=False), holder("b", 2, is_ready=False))
    assert not goes("a", before, after, to=1)
    assert not goes("b", before, after, to=2)


def test_a_stage_is_not_left_to_nodes_that_get_ready() -> None:
    before = coverage(holder("a", 0), holder("b", 0))
    assert goes("a", before, before)
    assert not goes("a", before, coverage(holder("a", 0), holder("b", 0, is_ready=False)))
