"""A trainer that goes on from the work of others: it helps at once, and learns at the rate of its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import trio

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.optim.outer import LineProgress
from neuroshard.optim.schedule import learning_rate_at
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.training.record import Inherited
from neuroshard.training.trainer import Trainer
from tests.worlds.stages import PARAMETERS, make_stage, make_trainer

WARMING_UP = replace(PARAMETERS, inner=InnerOptimization(learning_rate=1e-3, warmup_steps=50, decay_steps=100))
STEPS = 3


def trained(compute: ComputeThread, folder: Path, *, own_steps: int, line_steps: int) -> Trainer:
    """Some steps more, of a stage with so many steps behind it, on a line with so many."""
    stage = make_stage(compute, folder, WARMING_UP)
    inherited = Inherited(own_steps, 32 * own_steps)
    stage.record.progress, stage.record.inherited = replace(stage.record.progress, steps=own_steps), inherited
    line_sequences = line_steps * WARMING_UP.sequences_per_step
    stage = replace(stage, outer_state=replace(stage.outer_state, line=LineProgress(line_sequences)))
    trainer = make_trainer(compute, stage, parameters=WARMING_UP)
    trio.run(trainer.run, own_steps + STEPS)
    return trainer


@pytest.mark.parametrize(("own_steps", "line_steps"), [(10, 40), (60, 70), (80, 20)])
def test_the_learning_rate_is_that_of_the_line_whatever_this_node_has_done(
    compute: ComputeThread, tmp_path: Path, own_steps: int, line_steps: int
) -> None:
    points = trained(compute, tmp_path, own_steps=own_steps, line_steps=line_steps).record.history.snapshot()
    expected = [learning_rate_at(line_steps + number, WARMING_UP.inner) for number in range(STEPS)]
    assert [point.lr for point in points] == expected


def test_the_first_evaluation_follows_the_first_step_where_others_have_begun(
    compute: ComputeThread, tmp_path: Path
) -> None:
    joined = trained(compute, tmp_path / "joined", own_steps=10, line_steps=10)
    assert joined.record.evaluations.evaluations[0].step == 11
    begun = trained(compute, tmp_path / "begun", own_steps=0, line_steps=0)
    assert begun.record.evaluations.evaluations[0].step == 0
