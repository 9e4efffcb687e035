"""The plan of a run: memory and parameters of each stage, and warnings about parts that cannot work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.errors import TooLittleMemoryError
from neuroshard.model.architecture import parameter_count
from neuroshard.node.own_stages import windows_of
from neuroshard.runs.invitation_making import invited_model
from neuroshard.runs.proposal import HardwareBudget
from neuroshard.runs.run_file import new_parameters
from neuroshard.runs.stage_plan import plan_warnings, planned_stages
from neuroshard.types import JsonValue, LayerRange

PINS = GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 32_000)


def parameters_of(architecture: dict[str, JsonValue], **entries: JsonValue) -> RunParameters:
    return new_parameters({"architecture": architecture, **entries}, PINS)


SMALL = parameters_of({"depth": 12}, stage_layers=[1, 10, 1], batch_size=1)


# GB of memory limit for head, body and tail with one sequence per microbatch, as the formula of the memory need gives.
LIMITS = {
    "llama_8B_C": (36.5, 24.5, 37),
    "reparam_500M": (18, 12.5, 18),
    "reparam_1B_C": (33, 20, 41.5),
    "reparam_5B_C": (174, 141, 174.5),
    "reparam_8B_C": (205.5, 138, 206),
    "reparam_13B_C": (154, 112.5, 103),
}


@pytest.mark.parametrize("name", LIMITS)
def test_memory_of_head_body_and_tail(name: str) -> None:
    made = parameters_of({"config": name, "use_compression": False}, batch_size=1)
    stages = planned_stages(made)
    found = [stages[place] for place in (0, 1, -1)]
    assert [stage.tier_mb / 1_000 for stage in found] == list(LIMITS[name])
    for stage in found:
        assert stage.parameters == parameter_count(made.architecture, stage.layers)
        assert 44 * stage.parameters / 1e6 < stage.memory_mb <= stage.tier_mb < stage.memory_mb + 500
    assert invited_model(made).parameters == sum(stage.parameters for stage in stages)


def taken(limit_mb: int) -> set[int]:
    """Stages that a node with this limit can take one of."""
    room = HardwareBudget(limit_mb, "cpu", None, flops_per_second=1e9)
    try:
        return {stage for window in windows_of(SMALL, room, 1) for stage in window}
    except TooLittleMemoryError:
        return set()


def test_a_node_with_the_planned_limit_takes_the_stage_and_one_with_less_does_not() -> None:
    stages = planned_stages(SMALL)
    assert [stage.layers for stage in stages] == [LayerRange(0, 1), LayerRange(1, 11), LayerRange(11, 12)]
    for number, stage in enumerate(stages):
        assert number in taken(stage.tier_mb)
        assert number not in taken(stage.tier_mb - 500)


def test_stages_that_do_not_fit_here_are_counted() -> None:
    stages = planned_stages(SMALL)
    small, large = stages[0].tier_mb, stages[1].tier_mb
    assert plan_warnings(SMALL, stages, large) == ()
    (some,) = plan_warnings(SMALL, stages, large - 500)
    assert f"may use {large - 500:,} MB and can train 2 of 3 stages" in some
    (none,) = plan_warnings(SMALL, stages, 500)
    assert "can train no stage; a stage needs" in none
    assert f"{small:,} to {large:,} MB" in none


def test_too_few_microbatches_for_the_stages_are_reported() -> None:
    few = replace(SMALL, sequences_per_step=2)
    stages = planned_stages(few)
    (warning,) = plan_warnings(few, stages, 10**6)
    assert "2 microbatches for 3 stages, so at least 1 of them wait" in warning
    assert plan_warnings(replace(few, sequences_per_step=3), stages, 10**6) == ()


def test_layers_that_nobody_can_announce_are_reported() -> None:
    deep = replace(SMALL, stage_count=1, stage_layers=(), architecture=replace(SMALL.architecture, layer_count=4_097))
    (warning,) = plan_warnings(deep, (), 10**6)
    assert "layer_count = 4097" in warning
