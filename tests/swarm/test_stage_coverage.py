from __future__ import annotations

import pytest

from neuroshard.membership.stage_coverage import (
    StageCoverage,
    StageHolder,
    StageRange,
    missing_layers,
    missing_sentence,
    stages_of,
)
from neuroshard.model.architecture import StagePlan
from neuroshard.types import LayerRange, NodeId, Role, RunId, WalletId

RUN = RunId("ab" * 32)
PLAN = StagePlan.even(16, 4)


def holder(name: str, start: int, stop: int, *, is_ready: bool = True) -> StageHolder:
    return StageHolder(NodeId(name), WalletId(f"wallet of {name}"), StageRange(start, stop), is_ready)


def covered(*holders: StageHolder) -> StageCoverage:
    return StageCoverage.of(RUN, 4, holders)


def test_layers_are_stages_when_they_begin_and_end_with_them() -> None:
    assert stages_of(LayerRange(4, 12), PLAN) == StageRange(1, 3)
    assert stages_of(LayerRange(0, 16), PLAN) == StageRange(0, 4)
    for start, stop in ((5, 12), (4, 11), (0, 20)):
        assert stages_of(LayerRange(start, stop), PLAN) is None
    assert StageRange(1, 3).layers(PLAN) == LayerRange(4, 12)
    with pytest.raises(ValueError, match="4 stages"):
        StageRange(3, 5).layers(PLAN)


def test_stages_are_counted_from_one_for_people() -> None:
    assert (StageRange(1, 2).words, StageRange(1, 3).words) == ("stage 2", "stages 2 to 3")


def test_roles_follow_from_the_stages() -> None:
    roles = [StageRange(*ends).roles(4) for ends in ((0, 1), (1, 3), (3, 4), (0, 4), (0, 3))]
    assert roles[:3] == [(Role.DRIVER,), (Role.WORKER,), (Role.VALIDATOR,)]
    assert roles[3:] == [(Role.DRIVER, Role.VALIDATOR), (Role.DRIVER,)]


def test_a_range_of_stages_is_not_empty() -> None:
    with pytest.raises(ValueError, match="start < stop"):
        StageRange(2, 2)


def test_replicas_are_counted_with_those_that_get_ready_and_work_without_them() -> None:
    coverage = covered(holder("a", 0, 2), holder("b", 1, 2), holder("c", 1, 3, is_ready=False))
    assert coverage.replicas == (1, 3, 1, 0)
    assert coverage.ready_replicas == (1, 2, 0, 0)
    assert coverage.empty == (3,)
    assert coverage.missing == (2, 3)
    assert coverage.replicas_of(1) == ("a", "b")
    assert coverage.replicas_of(2) == ()


def test_a_node_counts_once_and_only_on_stages_of_the_plan() -> None:
    moved = covered(holder("a", 0, 1), holder("a", 2, 3), holder("b", 3, 5))
    assert moved.replicas == (0, 0, 1, 0)
    assert moved.with_holder(holder("a", 1, 2)).replicas == (0, 1, 0, 0)
    assert moved.without(NodeId("a")).empty == (0, 1, 2, 3)
    assert covered(holder("a", 0, 1), holder("b", 1, 2)) == covered(holder("b", 1, 2), holder("a", 0, 1))


@pytest.mark.parametrize(
    ("held", "missing", "sentence"),
    [
        ([(0, 4)], (), ""),
        ([(0, 2), (3, 4)], (LayerRange(8, 12),), "Layers 9-12 are missing."),
        ([(0, 1)], (LayerRange(4, 16),), "Layers 5-16 are missing."),
        ([(1, 2), (3, 4)], (LayerRange(0, 4), LayerRange(8, 12)), "Layers 1-4 and 9-12 are missing."),
    ],
)
def test_missing_stages_are_named_by_their_layers(
    held: list[tuple[int, int]], missing: tuple[LayerRange, ...], sentence: str
) -> None:
    coverage = covered(*(holder(f"node {start}", start, stop) for start, stop in held))
    assert missing_layers(coverage, PLAN) == missing
    assert missing_sentence(missing_layers(coverage, PLAN)) == sentence


def test_single_layers_are_named_as_such() -> None:
    plan = StagePlan.even(3, 3)
    one = StageCoverage.of(RUN, 3, [holder("a", 0, 2)])
    assert missing_sentence(missing_layers(one, plan)) == "Layer 3 is missing."
    both = StageCoverage.of(RUN, 3, [holder("a", 1, 2)])
    assert missing_sentence(missing_layers(both, plan)) == "Layers 1 and 3 are missing."
