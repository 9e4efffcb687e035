"""A long pause whose checkpoint is damaged, or that is interrupted while the model is dropped or loaded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from test_long_pause import CountingFeed
from trio.testing import wait_all_tasks_blocked

from neuroshard.errors import StorageError
from neuroshard.pipeline.executor import ComputeThread, StageExecutor
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.status.board import Generate, GenerationSummary
from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.training.stage_checkpoint import Restored, Saver
from neuroshard.training.text_generation import TextGenerator
from neuroshard.training.trainer import Trainer
from tests.worlds.stages import (
    has_no_tensors,
    make_stage,
    make_trainer,
    paused_after,
    state_digest,
    tensors_dropped,
    train,
)
from tests.worlds.trainers import SPLIT, make_split_trainer


def steps_saved(folder: Path) -> list[int]:
    return [generation.step for generation in CheckpointStore(folder).generations()]


def damage(folder: Path, step: int) -> None:
    """Change a byte in the middle of a checkpoint's tensors."""
    (tensors,) = folder.glob(f"step-{step}*.safetensors")
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(content)


def make_paused_trainer(compute: ComputeThread, folder: Path) -> Trainer:
    return make_trainer(compute, make_stage(compute, folder), seconds_before_drop=0.0)


def saver_of(trainer: Trainer) -> Saver:
    saver = trainer.parts.stages[0].saver
    assert saver is not None
    return saver


async def dropped_after(trainer: Trainer, steps: int) -> None:
    """Let the trainer make some steps, then pause it until its tensors have left the memory."""
    await paused_after(trainer, steps)
    await tensors_dropped(trainer)


async def dropped_twice(trainer: Trainer, folder: Path) -> tuple[int, int]:
    """Pause twice, so that there are two checkpoints. Returns their steps and damages the newer one."""
    await dropped_after(trainer, 3)
    older = trainer.steps
    trainer.resume()
    await dropped_after(trainer, older + 3)
    damage(folder, trainer.steps)
    return older, trainer.steps


def test_a_checkpoint_damaged_in_the_pause_is_reported_and_its_data_come_again(
    compute: ComputeThread, tmp_path: Path
) -> None:
    folder, seen = tmp_path / "paused", list[tuple[int, int]]()
    trainer = make_paused_trainer(compute, folder)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 20)
            seen.append(await dropped_twice(trainer, folder))
            assert trainer.snapshot().warnings == ()
            trainer.resume()

    trio.run(main)
    ((older, newer),) = seen
    damaged, continues = trainer.snapshot().warnings
    assert damaged.startswith(f"Checkpoint step-{newer} is damaged and was moved to ")
    assert continues == f"Training resumes from step-{older}."
    assert state_digest(trainer) == state_digest(train(compute, tmp_path / "calm", 20))


def test_a_pause_without_any_readable_checkpoint_ends_training_and_saves_nothing(
    compute: ComputeThread, tmp_path: Path
) -> None:
    trainer = make_paused_trainer(compute, tmp_path)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            await dropped_after(trainer, 3)
            for step in steps_saved(tmp_path):
                damage(tmp_path, step)
            trainer.resume()

    with pytest.raises(BaseExceptionGroup) as group:
        trio.run(main)
    (error,) = leaves(group.value)
    assert isinstance(error, StorageError)
    assert error.message.startswith("No checkpoint of the paused model can be read. Checkpoint step-")
    assert steps_saved(tmp_path) == []


def leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in leaves(inner)]


def test_a_load_that_fails_in_the_middle_leaves_the_checkpoint_as_it_was(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, steps = tmp_path / "paused", list[int]()
    trainer = make_paused_trainer(compute, folder)

    def fails(*_: object) -> None:
        raise StorageError("The memory is full.")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            await dropped_after(trainer, 3)
            steps.append(trainer.steps)
            monkeypatch.setattr(StageExecutor, "load_tensors", fails)
            # without this, a save would find the present state on the disk, whatever the stage holds
            monkeypatch.setattr(Saver, "_on_disk", lambda *_: None)
            trainer.resume()

    with pytest.raises(BaseExceptionGroup):
        trio.run(main)
    monkeypatch.undo()
    assert state_digest(train(compute, folder, steps[0])) == state_digest(train(compute, tmp_path / "calm", steps[0]))


def test_a_pause_that_begins_while_training_resumes_drops_nothing(compute: ComputeThread, tmp_path: Path) -> None:
    """The tensors were just loaded, and the stage moves them to the accelerator."""
    trainer = make_paused_trainer(compute, tmp_path / "paused")
    (loop,), service = trainer._loops.stages, trainer.parts.stages[0].service
    dropped, resume = list[bool](), service.resume

    async def main() -> None:
        async def drop() -> None:
            async with loop.moving:
                dropped.append(loop.may_drop_tensors)
                if loop.may_drop_tensors:
                    await loop.drop_tensors()

        async def resume_slowly() -> None:
            service.resume = resume
            trainer.pause()
            nursery.start_soon(drop)
            await wait_all_tasks_blocked()
            await resume()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 8)
            await dropped_after(trainer, 3)
            service.resume = resume_slowly
            trainer.resume()
            while not dropped:
                await trio.sleep(0.001)
            trainer.resume()

    trio.run(main)
    assert dropped == [False]
    assert state_digest(trainer) == state_digest(train(compute, tmp_path / "calm", 8))


def test_a_pause_that_ends_while_its_stages_are_dropped_drops_all_of_them(
    compute: ComputeThread, tmp_path: Path
) -> None:
    """Three stages, paused within a step: if only the last one dropped its part of it, they would never agree again."""
    feed, calm = CountingFeed(), make_split_trainer(compute, tmp_path / "calm")
    trio.run(calm.run, 5)
    feed.pause_after = 2 * SPLIT.sequences_per_step + 2
    plain = make_split_trainer(compute, tmp_path / "paused", feed=feed)
    trainer = Trainer(plain.parts, seconds_before_drop=0.0)
    saver = trainer.parts.stages[-1].saver
    assert saver is not None
    drop = saver.drop_tensors

    async def resumed(saved: CheckpointGeneration) -> None:
        trainer.resume()
        await wait_all_tasks_blocked()
        saver.drop_tensors = drop
        await drop(saved)

    async def main() -> None:
        saver.drop_tensors = resumed
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 5)
            await feed.reached.wait()
            trainer.pause()

    trio.run(main)
    assert state_digest(trainer) == state_digest(calm)


def test_a_save_in_the_middle_of_a_load_waits_for_it(compute: ComputeThread, tmp_path: Path) -> None:
    """A text loads the model in a pause whose newest checkpoint is damaged. The record follows the tensors."""

    class Writer:
        """Writes nothing."""

        async def generate(self, _: Generate) -> GenerationSummary:
            return GenerationSummary(0, 0, "stop")

    folder, seen = tmp_path / "paused", list[tuple[int, int]]()
    plain = make_paused_trainer(compute, folder)
    parts = type(plain.parts)(
        plain.parts.parameters, plain.parts.stages, plain.parts.driving, cast("TextGenerator", Writer())
    )
    trainer = Trainer(parts, seconds_before_drop=0.0)
    saver = saver_of(trainer)
    restore = saver.restore

    async def main() -> None:
        async def restored() -> Restored | None:
            saver.restore = restore
            found = await restore()
            nursery.start_soon(trainer.save_now)
            await wait_all_tasks_blocked()
            return found

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 20)
            seen.append(await dropped_twice(trainer, folder))
            saver.restore = restored
            await trainer.generate(cast("Generate", None))
            assert steps_saved(folder) == [seen[0][0]]
            trainer.resume()

    trio.run(main)
    assert state_digest(trainer) == state_digest(train(compute, tmp_path / "calm", 20))


@pytest.mark.parametrize("method", ["restore", "drop_tensors"])
def test_a_stop_while_the_model_is_loaded_or_dropped_keeps_its_checkpoint(
    compute: ComputeThread, tmp_path: Path, method: str
) -> None:
    folder = tmp_path / "paused"
    trainer = make_paused_trainer(compute, folder)
    saver = saver_of(trainer)
    work: Callable[..., Awaitable[Any]] = getattr(saver, method)

    async def stopped(*arguments: Any) -> Any:
        trainer.stop()
        await wait_all_tasks_blocked()
        return await work(*arguments)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            if method == "drop_tensors":
                saver.drop_tensors = stopped
                await paused_after(trainer, 3)
            else:
                await dropped_after(trainer, 3)
                saver.restore = stopped
                trainer.resume()

    trio.run(main)
    assert not trainer.last_save_failed
    assert has_no_tensors(trainer) is (method == "drop_tensors")
    steps = trainer.steps
    assert steps_saved(folder)[0] == steps
    assert state_digest(train(compute, folder, steps)) == state_digest(train(compute, tmp_path / "calm", steps))
