"""Stages trained with Muon: one that paused and restarted has the bytes of one that never stopped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trio

from neuroshard.consensus.sync_strategies import snapshot_layout
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.pipeline.executor import ComputeThread, StageExecutor
from neuroshard.types import LayerRange
from tests.worlds.stages import (
    ARCHITECTURE,
    INPUTS,
    LABELS,
    PARAMETERS,
    SEED,
    make_stage,
    make_trainer,
    paused_after,
    state_digest,
    tensors_dropped,
    train,
)

INNER = replace(PARAMETERS.inner, optimizer="muon")
MUON = replace(PARAMETERS, inner=INNER, outer=replace(PARAMETERS.outer, inner_steps=4))


def test_a_pause_that_drops_the_tensors_and_a_restart_lose_no_bit(compute: ComputeThread, tmp_path: Path) -> None:
    whole = train(compute, tmp_path / "whole", 11, MUON)
    stage = make_stage(compute, tmp_path / "parts", MUON)
    trainer = make_trainer(compute, stage, parameters=MUON, seconds_before_drop=0.0)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 7)
            await paused_after(trainer, 3)
            await tensors_dropped(trainer)
            trainer.resume()

    trio.run(main)
    resumed = train(compute, tmp_path / "parts", 11, MUON)
    assert resumed.record.progress.steps == 11
    assert state_digest(resumed) == state_digest(whole)
    assert state_digest(whole) != state_digest(train(compute, tmp_path / "adamw", 11))


def test_the_layout_of_a_checkpoint_is_known_without_building_the_stage(compute: ComputeThread, tmp_path: Path) -> None:
    layers = LayerRange(0, ARCHITECTURE.layer_count)
    layout, with_adamw = (snapshot_layout(ARCHITECTURE, layers, MUON.outer, inner) for inner in (INNER, None))
    assert layout == make_stage(compute, tmp_path, MUON).staging.layout
    matrices = sum(p.numel() for name, p in StageModel(ARCHITECTURE).layers.named_parameters() if "norm" not in name)
    assert 4 * matrices < with_adamw.file_bytes - layout.file_bytes  # and the numbers of steps


def test_a_state_with_the_moments_of_another_optimizer_is_set_aside(compute: ComputeThread, tmp_path: Path) -> None:
    train(compute, tmp_path, 3)
    stage = make_stage(compute, tmp_path, MUON)
    assert not stage.is_restored
    assert "momentum_buffer is missing" in stage.warnings[0]
    assert list((tmp_path / "set-aside-tensors").glob("step-3*"))


@pytest.mark.parametrize("cut", [1, 2])
def test_stages_make_the_step_of_the_whole_model(cut: int) -> None:
    def executor_of(start: int, stop: int) -> StageExecutor:
        model = StageModel(ARCHITECTURE, LayerRange(start, stop))
        initialise(model, SEED)
        return StageExecutor(model, make_inner_optimizer(model, INNER), torch.device("cpu"))

    whole, first, last = executor_of(0, 3), executor_of(0, cut), executor_of(cut, 3)
    whole.loss(INPUTS, LABELS)
    opened = first.forward(INPUTS)
    _, gradient = last.loss(opened.output.detach(), LABELS)
    assert gradient is not None
    first.backward(opened, gradient)
    before = {name: parameter.detach().clone() for name, parameter in whole.model.named_parameters()}
    for executor in (whole, first, last):
        executor.step(1e-2, 1e9, LABELS.numel())
    parts = dict(first.model.named_parameters()) | dict(last.model.named_parameters())
    for name, parameter in whole.model.named_parameters():
        assert not torch.equal(parameter, before[name])
        torch.testing.assert_close(parts[name], parameter, atol=2e-5, rtol=1e-4, msg=name)
