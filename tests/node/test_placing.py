"""What a computer that is too small is told, and how much of a model fits one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.errors import TooLittleMemoryError
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.model.architecture import architecture_for
from neuroshard.node.demo import DemoOptions
from neuroshard.node.drive_training import fitting_microbatches
from neuroshard.node.own_stages import StageChooser, windows_of
from neuroshard.runs.proposal import HardwareBudget
from tests.worlds.nodes import SINGLE, StageWorld, play

PINS = GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 8192)
STAGED = RunParameters("test", 1, architecture_for(12, 8192), 4, 4, 32, 7, PINS)


def room(tier_mb: int) -> HardwareBudget:
    return HardwareBudget(tier_mb, "cpu", None, 1e9)


def test_a_computer_too_small_for_any_stage_is_told_numbers_and_what_it_can_do_instead() -> None:
    with pytest.raises(TooLittleMemoryError) as told:
        windows_of(STAGED, room(500), None)
    assert "smallest of the 4 stages" in told.value.message
    assert "only 500 MB may be used" in told.value.message
    assert "--memory" in told.value.action
    assert "help without holding layers with `neuroshard trainer`" in told.value.action


def test_nobody_helps_a_run_without_stages_by_driving_it() -> None:
    with pytest.raises(TooLittleMemoryError) as told:
        windows_of(replace(STAGED, stage_count=1), room(500), None)
    assert "trainer" not in told.value.action


def test_more_memory_holds_more_stages_and_never_more_than_allowed() -> None:
    sizes = [max(map(len, windows_of(STAGED, room(tier), None))) for tier in (3_500, 6_000, 20_000)]
    assert sizes == sorted(sizes)
    assert sizes[-1] == 4
    assert windows_of(STAGED, room(20_000), 1) == tuple(StageRange(n, n + 1) for n in range(4))


def test_a_trainer_takes_fewer_microbatches_at_a_time_where_memory_is_small() -> None:
    large = replace(STAGED, architecture=replace(STAGED.architecture, hidden_size=4096, head_count=32), stage_count=32)
    counts = [fitting_microbatches(large, limit) for limit in (2_000, 4_000, 30_000)]
    assert counts[0] < counts[1] < counts[2] == 8  # those of a step
    with pytest.raises(TooLittleMemoryError, match="Driving this run needs 1,"):
        fitting_microbatches(large, 1_000)
    assert fitting_microbatches(STAGED, 1_000) == 8
    assert fitting_microbatches(replace(STAGED, sequences_per_step=4), 1_000) == 1


def test_a_limit_of_stages_takes_none_away_that_fits_by_itself() -> None:
    for tier in range(3_500, 9_000, 500):
        fitting, limited = (windows_of(STAGED, room(tier), most) for most in (None, 2))
        assert {stage for window in fitting for stage in window} == {stage for window in limited for stage in window}
        assert max(map(len, limited)) <= 2


@pytest.mark.parametrize("stages", range(1, 5))
@pytest.mark.parametrize("nodes", range(2, 6))
def test_the_other_nodes_of_a_demo_can_hold_what_one_of_them_held(nodes: int, stages: int) -> None:
    options = DemoOptions(nodes=nodes, stages=stages)
    first = options.stages_a_node
    assert first is not None
    assert nodes * first >= stages > nodes * (first - 1)
    assert (nodes - 1) * (first + options.spare_stages_a_node) >= stages
    assert first + options.spare_stages_a_node <= stages


def test_the_first_node_of_a_demo_takes_the_first_layers_unless_others_have_them(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        for _ in range(4):  # whatever its name, by which it would choose else
            node = world.add()
            assert await StageChooser(node.swarm, node.networking, is_first=True).choose(SINGLE, None) == SINGLE[0]
            assert await StageChooser(node.swarm, node.networking, is_first=True).choose(SINGLE[1:], None) in SINGLE[1:]

    play(tmp_path, scenario)


@pytest.mark.parametrize("stage", range(3))
def test_a_node_of_an_organised_run_takes_the_stage_of_its_admission(stage: int, tmp_path: Path) -> None:
    """Its own saved state comes first; a stage that does not fit its memory leaves it the choice."""

    async def scenario(world: StageWorld) -> None:
        node = world.add()
        layers = list(node.swarm.plan)[stage]
        placing = StageChooser(node.swarm, node.networking, admitted=layers)
        kept, pair = SINGLE[stage - 1], StageRange(0, 2)
        assert await placing.choose(SINGLE, None) == SINGLE[stage]
        assert await placing.choose(SINGLE, kept) == kept
        assert await placing.choose((SINGLE[2], pair), None) == (pair if stage < 2 else SINGLE[2])
        too_large = tuple(window for window in SINGLE if window != SINGLE[stage])
        assert await placing.choose(too_large, None) in too_large

    play(tmp_path, scenario)


def test_a_node_that_had_taken_more_stages_than_it_begins_with_goes_on_with_them(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        node = world.add()
        node.swarm.windows = StageRange(0, 2), StageRange(1, 3)
        placing = StageChooser(node.swarm, node.networking)
        assert await placing.choose(SINGLE, StageRange(0, 2)) == StageRange(0, 2)
        assert await placing.choose(SINGLE, StageRange(2, 3)) == StageRange(2, 3)

    play(tmp_path, scenario)
