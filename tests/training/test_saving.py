"""A last save writes what is not on disk yet, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import trio

from neuroshard.pipeline.executor import ComputeThread, Priority
from neuroshard.state.checkpoint_saver import CheckpointPolicy
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.status.snapshot import NodeState
from neuroshard.training.stage_checkpoint import Stage
from tests.worlds.stages import make_stage, make_trainer, paused_after, state_becomes, state_digest, train


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file of a folder with its inode and the time of its last change: a rewritten one has others."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_a_stop_right_after_a_start_writes_nothing(compute: ComputeThread, tmp_path: Path) -> None:
    digest = state_digest(train(compute, tmp_path, 7))
    before = files_of(tmp_path)
    again = train(compute, tmp_path, 7)
    assert files_of(tmp_path) == before
    assert not again.last_save_failed
    assert again.snapshot().checkpoints.last_saved_step == 7
    assert state_digest(train(compute, tmp_path, 7)) == digest


def test_a_stop_right_after_a_save_writes_nothing(compute: ComputeThread, tmp_path: Path) -> None:
    trainer = make_trainer(compute, make_stage(compute, tmp_path))
    seen: list[dict[str, tuple[int, int]]] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            await paused_after(trainer, 3)
            for _ in range(2):
                assert (await trainer.save_now()).message == f"Checkpoint of step {trainer.steps} saved."
                seen.append(files_of(tmp_path))
            trainer.stop()

    trio.run(main)
    assert seen[0] == seen[1] == files_of(tmp_path)


def test_a_step_more_is_saved(compute: ComputeThread, tmp_path: Path) -> None:
    train(compute, tmp_path, 7)
    train(compute, tmp_path, 8)
    assert [generation.step for generation in CheckpointStore(tmp_path).generations()][:2] == [8, 7]


@pytest.mark.parametrize("kind", ["step-7.safetensors", "step-7.json"])
def test_what_was_damaged_while_the_node_ran_is_written_anew(compute: ComputeThread, tmp_path: Path, kind: str) -> None:
    train(compute, tmp_path, 7)
    trainer = make_trainer(compute, make_stage(compute, tmp_path))
    (tmp_path / kind).write_bytes((tmp_path / kind).read_bytes()[:-10])
    trio.run(trainer.run, 7)
    store = CheckpointStore(tmp_path)
    newest = store.generations()[0]
    assert store.verify(newest).step == 7


def test_a_write_that_takes_long_holds_up_no_text_in_a_pause_and_not_its_end(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_stage(compute, tmp_path, policy=CheckpointPolicy(every_steps=1, min_seconds=0))
    trainer, begun, disk = make_trainer(compute, stage), Event(), Event()
    write = stage.keeper.store.write

    def slow(*of: Any) -> object:
        begun.set()
        disk.wait()
        return write(*of)

    monkeypatch.setattr(stage.keeper.store, "write", slow)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            try:
                with trio.fail_after(20):
                    await trio.to_thread.run_sync(begun.wait)
                    trainer.pause()
                    await state_becomes(trainer, NodeState.PAUSED)
                    assert await compute.run(lambda: "text", Priority.TEXT) == "text"
                    steps = trainer.steps
                    trainer.resume()
                    while trainer.steps < steps + 2:
                        await trio.sleep(0.001)
                    assert stage.staging.in_use
            finally:
                disk.set()
            trainer.stop()

    trio.run(main)


def copied_numbers(stage: Stage) -> int:
    """How many of the weights' numbers are in the memory for the next checkpoint."""
    names = [name for name in stage.staging.layout.specs if name.startswith("model/")]
    return sum(int(stage.staging.destination(name).count_nonzero()) for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is given back on Linux only")
def test_a_save_in_a_pause_leaves_no_more_memory_than_the_pause_had(compute: ComputeThread, tmp_path: Path) -> None:
    stage = make_stage(compute, tmp_path)
    trainer = make_trainer(compute, stage)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            with trio.fail_after(20):
                while trainer.steps < 1:
                    await trio.sleep(0.001)
                await trainer.save_now()
                whole = copied_numbers(stage)
                trainer.pause()
                for _ in range(3):
                    while copied_numbers(stage) > whole / 10:
                        await trio.sleep(0.001)
                    for path in tmp_path.iterdir():
                        path.unlink()  # else nothing would have to be written
                    assert (await trainer.save_now()).message == f"Checkpoint of step {trainer.steps} saved."
            trainer.stop()

    trio.run(main)
