from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio
from torch import Tensor

from neuroshard.compression import make_codec
from neuroshard.consensus.sync_strategies import Agreed
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.training.trainer import Trainer
from tests.worlds.stages import PARAMETERS, SHARD_WINDOWS, make_stage, make_trainer, state_digest, train


@pytest.mark.parametrize("lone_outer", ["keep", "apply"])
@pytest.mark.parametrize("stop_at", [1, 7, 10])
def test_stopped_and_resumed_equals_never_stopped(
    compute: ComputeThread, tmp_path: Path, stop_at: int, lone_outer: str
) -> None:
    outer = replace(PARAMETERS.outer, inner_steps=4, lone_outer=lone_outer)
    parameters = replace(PARAMETERS, outer=outer)
    whole = train(compute, tmp_path / "whole", 21, parameters)
    train(compute, tmp_path / "parts", stop_at, parameters)
    resumed = train(compute, tmp_path / "parts", 21, parameters)

    assert resumed.record.progress.steps == 21
    assert resumed.parts.stages[0].outer.state.outer_step == 5
    assert state_digest(resumed) == state_digest(whole)
    expected, found = whole.record.progress, resumed.record.progress
    assert found == expected
    assert found.position is not None
    assert found.position.order == 21 * PARAMETERS.sequences_per_step // SHARD_WINDOWS


def test_what_a_codec_lost_is_resumed_too(compute: ComputeThread, tmp_path: Path) -> None:
    parameters = replace(PARAMETERS, outer=replace(PARAMETERS.outer, inner_steps=4, codec="int8"))
    codec = make_codec("int8")

    async def exchange(contribution: Tensor, _outer_step: int) -> Agreed:
        sent = codec.round_trip(contribution)
        return Agreed(sent.clone(), 2, sent)

    def trained(folder: str, last_step: int) -> Trainer:
        trainer = make_trainer(compute, make_stage(compute, tmp_path / folder, parameters), parameters=parameters)
        outer = trainer.parts.stages[0].outer
        run_round = outer.run_round
        outer.run_round = lambda _alone, now: run_round(exchange, now)  # type: ignore[method-assign]
        trio.run(trainer.run, last_step)
        return trainer

    whole = trained("whole", 17)
    trained("parts", 10)
    resumed = trained("parts", 17)
    found, expected = (trainer.parts.stages[0].outer for trainer in (resumed, whole))
    assert expected.state.outer_step == 4
    assert expected.residual is not None
    assert found.residual is not None
    assert torch.equal(found.residual, expected.residual)
    assert state_digest(resumed) == state_digest(whole)


def test_a_resumed_trainer_keeps_its_curve_and_its_baseline(compute: ComputeThread, tmp_path: Path) -> None:
    first = train(compute, tmp_path, 6)
    second = make_trainer(compute, make_stage(compute, tmp_path))
    assert second.record.history.snapshot() == first.record.history.snapshot()
    assert second.record.evaluations.evaluations == first.record.evaluations.evaluations
    assert len(first.record.evaluations.evaluations) == 1
    assert second.record.evaluations.evaluations[0].step == 0
