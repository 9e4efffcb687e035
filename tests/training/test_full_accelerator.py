"""An accelerator whose memory another program has taken: training waits for room, and nothing ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import trio
from torch import Tensor

from neuroshard.pipeline.control import PAUSED_BY_USER
from neuroshard.pipeline.executor import ComputeThread, StageExecutor
from neuroshard.pipeline.microbatch import AcceleratorFullError
from neuroshard.status.snapshot import NodeState
from neuroshard.training import stage_loop
from neuroshard.training.stage_loop import FULL
from neuroshard.training.trainer import Trainer
from neuroshard.types import NodeId
from tests.worlds.stages import make_stage, make_trainer, paused_after, state_becomes, state_digest, train

OTHERS_HAVE_IT = "CUDA out of memory."
Loss = Callable[[StageExecutor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def executor_of(trainer: Trainer) -> StageExecutor:
    return trainer.parts.stages[0].service.executor


def fails_at(loss: Loss, calls: set[int]) -> Loss:
    """The same computation, which runs out of memory at these calls, when its gradients are half there."""
    count = 0

    def failing(
        executor: StageExecutor, inputs: Tensor, labels: Tensor, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        nonlocal count
        count += 1
        result = loss(executor, inputs, labels, ids)
        if count in calls:
            raise torch.OutOfMemoryError(OTHERS_HAVE_IT)
        return result

    return failing


def test_a_microbatch_without_memory_pauses_for_a_while_and_leaves_nothing_in_the_step(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_loop, "SECONDS_BEFORE_MEMORY_RETRY", 0.2)
    monkeypatch.setattr(StageExecutor, "loss", fails_at(StageExecutor.loss, {4}))  # the second of the second step
    trainer = make_trainer(compute, make_stage(compute, tmp_path))
    reasons = list[str]()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 6)
            await state_becomes(trainer, NodeState.PAUSED)
            reasons.append(trainer.snapshot().reason)
            assert trainer.steps == 1
            assert all(parameter.grad is None for parameter in executor_of(trainer).model.parameters())

    trio.run(main)
    assert reasons == [FULL]
    assert trainer.steps == 6
    assert trainer.record.progress.non_finite.skipped == 0


def test_what_cannot_be_resumed_stays_paused_and_is_tried_again(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_loop, "SECONDS_BEFORE_MEMORY_RETRY", 0.2)
    trainer = make_trainer(compute, make_stage(compute, tmp_path / "interrupted"))
    executor = executor_of(trainer)
    resume, tries = executor.resume, list[int]()

    def full_at_first() -> None:
        tries.append(trainer.steps)
        if len(tries) < 3:
            raise torch.OutOfMemoryError(OTHERS_HAVE_IT)
        resume()

    monkeypatch.setattr(executor, "resume", full_at_first)
    told = list[tuple[NodeState, str]]()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 8)
            await paused_after(trainer, 3)
            trainer.resume()
            told.append((await trainer.wait_until_resumed(), trainer.snapshot().reason))

    trio.run(main)
    assert told == [(NodeState.PAUSED, FULL)]
    assert len(tries) == 3
    assert state_digest(trainer) == state_digest(train(compute, tmp_path / "calm", 8))


def test_a_pause_by_the_owner_is_not_made_shorter_by_it(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(compute, make_stage(compute, tmp_path))

    def full_while_the_owner_pauses_again() -> None:
        trio.from_thread.run_sync(trainer.pause, trio_token=token[0])
        raise torch.OutOfMemoryError(OTHERS_HAVE_IT)

    token = list[trio.lowlevel.TrioToken]()

    async def main() -> None:
        token.append(trio.lowlevel.current_trio_token())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            await paused_after(trainer, 1)
            monkeypatch.setattr(executor_of(trainer), "resume", full_while_the_owner_pauses_again)
            trainer.resume()
            assert await trainer.wait_until_resumed() is NodeState.PAUSED
            assert trainer.snapshot().reason == PAUSED_BY_USER
            assert trainer.snapshot().paused_until is None
            trainer.stop()

    trio.run(main)


def test_a_paused_node_ends_without_the_accelerator(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(compute, make_stage(compute, tmp_path / "interrupted"))

    def full() -> None:
        raise torch.OutOfMemoryError(OTHERS_HAVE_IT)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            await paused_after(trainer, 3)
            monkeypatch.setattr(executor_of(trainer), "resume", full)
            trainer.stop()

    trio.run(main)
    assert not trainer.last_save_failed
    steps = trainer.steps
    again = train(compute, tmp_path / "interrupted", steps)
    assert state_digest(again) == state_digest(train(compute, tmp_path / "calm", steps))


def test_who_wants_a_text_or_a_loss_meanwhile_is_told_and_nothing_ends(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(compute, make_stage(compute, tmp_path))
    service = trainer.parts.stages[0].service

    def full(*_: object, **_options: object) -> Tensor:
        raise torch.OutOfMemoryError(OTHERS_HAVE_IT)

    monkeypatch.setattr(service.executor, "infer", full)
    monkeypatch.setattr(service.executor, "read", full)
    ids = torch.zeros(1, 4, dtype=torch.long)

    async def main() -> None:
        with pytest.raises(AcceleratorFullError):
            await service.infer(ids)
        with pytest.raises(AcceleratorFullError):
            await service.read(NodeId("asker"), 1, 0, ids)

    trio.run(main)
    assert not service.lacks_memory
