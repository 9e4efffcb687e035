"""AdamW with moments on the host makes the steps of AdamW on the device, and keeps the moments where they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trio
from torch import nn

from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.model.memory_need import memory_need
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.optim import inner_optimizer
from neuroshard.optim.inner_optimizer import (
    BUFFER_BYTES,
    MOMENTS,
    EagerAdamW,
    HostMomentsAdamW,
    clipped_step,
    make_inner_optimizer,
)
from neuroshard.pipeline.executor import ComputeThread, Precision, StageExecutor
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.training.stage_checkpoint import build_stage
from neuroshard.training.trainer import Trainer
from neuroshard.types import Architecture
from tests.worlds.stages import ARCHITECTURE, IDENTITY, PARAMETERS, MemoryFeed, make_trainer, state_digest

CPU = torch.device("cpu")
INNER = InnerOptimization()


def stepped(*, on_host: bool, steps: int = 4) -> tuple[nn.Module, EagerAdamW]:
    """A model after some clipped steps; one parameter has no gradient in the second step."""
    model = StageModel(ARCHITECTURE)
    initialise(model, 1)
    optimizer = make_inner_optimizer(model, INNER, moments_on_host=on_host)
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        for number, parameter in enumerate(model.parameters()):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if (step, number) == (1, 2) else gradient
        clipped_step(optimizer, 1e-2, tokens=8, grad_norm=3.0, max_norm=1.0)
    return model, optimizer


@pytest.mark.parametrize("chunk", [1 << 22, 1_000, 7])
def test_steps_equal_those_on_the_device(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_optimizer, "CHUNK", chunk)
    (device_model, on_device), (host_model, on_host) = (stepped(on_host=flag) for flag in (False, True))
    assert isinstance(on_host, HostMomentsAdamW)
    for there, here in zip(device_model.parameters(), host_model.parameters(), strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=1e-6)
        for name, moment in on_device.state[there].items():
            torch.testing.assert_close(on_host.state[here][name], moment, rtol=1e-6, atol=1e-6)
    untouched = list(host_model.parameters())[2]
    assert on_host.state[untouched]["step"].item() == 3


def test_a_suspended_stage_keeps_its_moments_in_place_and_a_dropped_one_frees_them() -> None:
    model, optimizer = stepped(on_host=True)
    assert isinstance(model, StageModel)
    executor = StageExecutor(model, optimizer, CPU)
    parameter = next(iter(model.parameters()))
    moment = optimizer.state[parameter]["exp_avg"]
    place, value = moment.data_ptr(), moment.clone()
    executor.suspend()
    executor.resume()
    assert optimizer.state[parameter]["exp_avg"].data_ptr() == place
    executor.suspend()
    executor.drop_tensors()
    assert optimizer.state[parameter]["exp_avg"].isnan().all()
    executor.allocate_tensors()
    optimizer.state[parameter]["exp_avg"].copy_(value)
    assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


def test_weights_on_an_accelerator_have_moments_on_the_host_and_the_plan_counts_them() -> None:
    """The meta device stands for the accelerator: its tensors have shapes and no memory."""
    architecture = Architecture(256, 4, 4, 2, 704, 4096, 256)
    with torch.device("meta"):
        model = StageModel(architecture)
    optimizer = make_inner_optimizer(model, INNER, moments_on_host=True)
    moments = [optimizer.state[parameter][name] for parameter in model.parameters() for name in MOMENTS]
    assert {moment.device.type for moment in moments} == {"cpu"}
    need, usual = (memory_need(architecture, device="cuda", moments_on_host=on_host) for on_host in (True, False))
    size = sum(moment.numel() * moment.element_size() for moment in moments)
    assert need.host.moments == size == usual.device.moments
    assert need.device.moments == BUFFER_BYTES
    assert need.device.weights == sum(parameter.numel() * 4 for parameter in model.parameters())
    assert need.host.checkpoint_staging == usual.host.checkpoint_staging


def test_a_checkpoint_of_one_kind_is_loaded_into_the_other(compute: ComputeThread, tmp_path: Path) -> None:
    """Three steps on the host, then three on the device: the bytes of six steps on the device."""

    def trained(folder: Path, last_step: int, *, on_host: bool) -> Trainer:
        stage = compute.submit(
            lambda: build_stage(
                PARAMETERS,
                IDENTITY,
                CPU,
                CheckpointStore(folder),
                precision=Precision.FP32,
                moments_on_host=on_host,
            )
        ).result()
        assert isinstance(stage.executor.optimizer, HostMomentsAdamW) is on_host
        trainer = make_trainer(compute, stage, MemoryFeed(stage.record.progress.position))
        trio.run(trainer.run, last_step)
        return trainer

    whole = trained(tmp_path / "device", 6, on_host=False)
    trained(tmp_path / "both", 3, on_host=True)
    assert state_digest(trained(tmp_path / "both", 6, on_host=False)) == state_digest(whole)
