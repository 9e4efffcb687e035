from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import trio
from torch import Tensor

from neuroshard.pipeline.executor import ComputeThread, Precision
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.stage_tensors import OUTER_TENSORS, stage_tensors
from neuroshard.status.snapshot import NodeState
from neuroshard.training import stage_loop
from neuroshard.training.stage_checkpoint import Stage, build_stage
from tests.worlds.stages import IDENTITY, PARAMETERS, MemoryFeed, make_trainer, paused_after, state_becomes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def stage_on_gpu(compute: ComputeThread, folder: Path, precision: Precision | None) -> Stage:
    return compute.submit(
        lambda: build_stage(PARAMETERS, IDENTITY, torch.device("cuda"), CheckpointStore(folder), precision=precision)
    ).result()


def device_tensors(stage: Stage) -> Iterator[Tensor]:
    executor = stage.executor
    named = stage_tensors(executor.model, executor.optimizer, stage.outer_state)
    return (tensor for name, tensor in named.items() if name not in OUTER_TENSORS)


@pytest.mark.parametrize("precision", [None, *Precision])
def test_it_learns_pauses_and_resumes_on_the_gpu(
    compute: ComputeThread, tmp_path: Path, precision: Precision | None
) -> None:
    stage = stage_on_gpu(compute, tmp_path, precision)
    trainer = make_trainer(compute, stage)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 60)
            await paused_after(trainer, 5)
            assert {tensor.device.type for tensor in device_tensors(stage)} == {"cpu"}
            assert (await trainer.save_now()).state == "paused"
            trainer.resume()
            await state_becomes(trainer, NodeState.TRAINING)
            assert {tensor.device.type for tensor in device_tensors(stage)} == {"cuda"}

    trio.run(main)
    history = trainer.snapshot().history
    assert sum(p.loss for p in history[-10:]) < sum(p.loss for p in history[:10]) - 1
    again = stage_on_gpu(compute, tmp_path, None)
    assert again.is_restored
    assert again.executor.precision is stage.executor.precision
    for a, b in zip(device_tensors(stage), device_tensors(again), strict=True):
        assert torch.equal(a, b)
    resumed = make_trainer(compute, again, MemoryFeed(again.record.progress.position))
    trio.run(resumed.run, 70)
    assert resumed.snapshot().training.skipped_steps == 0


@pytest.mark.parametrize("has_room", [True, False], ids=["room for a snapshot", "no room"])
def test_a_checkpoint_has_the_values_of_its_moment_although_training_changes_them(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_room: bool
) -> None:
    stage = stage_on_gpu(compute, tmp_path, Precision.FP32)
    if not has_room:
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 2**50)
    executor = stage.executor
    tensors = stage_tensors(executor.model, executor.optimizer, stage.outer_state)
    before = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}

    def copy_and_change() -> None:
        stage.staging.copy_from(tensors)
        for name, tensor in tensors.items():
            if name not in OUTER_TENSORS:
                tensor.detach().fill_(7.0)

    compute.submit(copy_and_change).result()
    copied = stage.staging.tensors()
    assert {name for name, value in before.items() if not torch.equal(copied[name], value)} == set()


def memory_left() -> list[Tensor]:
    """Takes what the allocator still has on the device, in blocks of every size that it hands out."""
    taken: list[Tensor] = []
    for size in (2**24, 2**20, 2**16, 2**12, 2**9):
        with suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return taken


def test_an_accelerator_that_is_full_is_tried_again(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_loop, "SECONDS_BEFORE_MEMORY_RETRY", 0.2)
    stage = stage_on_gpu(compute, tmp_path, Precision.FP32)
    trainer = make_trainer(compute, stage)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 60)
            await paused_after(trainer, 5)
            torch.cuda.set_per_process_memory_fraction(1e-9)
            taken = memory_left()
            trainer.resume()
            assert await trainer.wait_until_resumed() is NodeState.PAUSED
            assert trainer.snapshot().reason == stage_loop.FULL
            assert {tensor.device.type for tensor in device_tensors(stage)} == {"cpu"}
            taken.clear()
            torch.cuda.set_per_process_memory_fraction(1.0)
            await state_becomes(trainer, NodeState.TRAINING)
            assert {tensor.device.type for tensor in device_tensors(stage)} == {"cuda"}

    try:
        trio.run(main)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert trainer.steps == 60
