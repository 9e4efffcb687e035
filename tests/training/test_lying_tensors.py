"""A paused stage lies in a file, and goes on as if it had not."""

from __future__ import annotations

import errno
import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch
import trio
from small_stage import make_stage, make_trainer, state_digest, train

from neuroshard.pipeline.executor import ComputeThread
from neuroshard.state import tensor_file as lying_tensors
from neuroshard.state.checkpoint_saver import CheckpointPolicy
from neuroshard.state.outer_state import state_root
from neuroshard.state.tensor_file import map_to_disk
from neuroshard.training import stage_loop
from neuroshard.training.trainer import Trainer

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="stays in memory on Windows")
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


def mapped_files(folder: Path) -> int:
    """Files without a name in the folder that memory of this process is mapped to."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return len({line.split()[4] for line in lines if str(folder) in line and line.endswith("(deleted)")})


async def paused(trainer: Trainer, folder: Path, files: int) -> None:
    """Pause, and wait until so many files are mapped."""
    trainer.pause()
    await trainer.wait_until_paused()
    with trio.fail_after(20):
        while mapped_files(folder) != files:
            await trio.sleep(0.01)


@needs_proc
def test_training_goes_on_from_the_same_bytes(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_loop, "SECONDS_BEFORE_OFFLOAD", 0.0)
    trainer = make_trainer(compute, make_stage(compute, tmp_path / "interrupted"))
    outer = trainer.parts.stages[0].outer
    roots = list[str]()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 12)
            for steps in (3, 7):
                while trainer.steps < steps:
                    await trio.sleep(0.001)
                roots.append(state_root(outer.state))
                await paused(trainer, tmp_path, files=2)  # of the stage and of its outer state
                roots.append(state_root(outer.state))
                await trainer.save_now()
                trainer.resume()
                await trainer.wait_until_resumed()
                assert mapped_files(tmp_path) == 0

    trio.run(main)
    assert roots[0] == roots[1]
    assert roots[2] == roots[3]
    assert state_digest(trainer) == state_digest(train(compute, tmp_path / "calm", 12))


@needs_proc
def test_a_restart_while_it_lies_loses_nothing(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_loop, "SECONDS_BEFORE_OFFLOAD", 0.0)
    trainer = make_trainer(compute, make_stage(compute, tmp_path / "interrupted"))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            while trainer.steps < 4:
                await trio.sleep(0.001)
            await paused(trainer, tmp_path, files=2)
            trainer.stop()

    trio.run(main)
    steps = trainer.steps
    assert state_digest(train(compute, tmp_path / "interrupted", steps)) == state_digest(
        train(compute, tmp_path / "calm", steps)
    )


def test_a_folder_that_cannot_be_written_leaves_the_stage_in_memory(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stage_loop, "SECONDS_BEFORE_OFFLOAD", 0.0)
    caplog.set_level(logging.INFO)

    def full(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(lying_tensors.tempfile, "TemporaryFile", full)
    trainer = make_trainer(compute, make_stage(compute, tmp_path / "interrupted"))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 8)
            while trainer.steps < 3:
                await trio.sleep(0.001)
            trainer.pause()
            with trio.fail_after(20):
                while "stays in memory" not in caplog.text:
                    await trio.sleep(0.01)
            trainer.resume()

    trio.run(main)
    assert state_digest(trainer) == state_digest(train(compute, tmp_path / "calm", 8))


def test_tensors_that_lie_are_equal_and_may_be_written(tmp_path: Path) -> None:
    tensors = [torch.arange(5.0), torch.ones(3, 7, dtype=torch.bfloat16), torch.tensor([True, False])]
    lying = map_to_disk(tensors, tmp_path, lambda: True)
    assert lying is not None
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(tensors, lying, strict=True))
    lying[0][2] = -1.0
    assert lying[0].tolist() == [0.0, 1.0, -1.0, 3.0, 4.0]
    assert tensors[0][2] == 2.0
    assert not list(tmp_path.iterdir())


def test_nothing_lies_down_where_the_disk_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(lying_tensors.shutil, "disk_usage", lambda _: usage._replace(free=1_000_000))
    assert map_to_disk([torch.ones(10)], tmp_path, lambda: True) is None


def test_who_waits_does_not_wait_for_the_file(tmp_path: Path) -> None:
    answers = iter([True, True, False])
    tensors = [torch.ones(10) for _ in range(5)]
    assert map_to_disk(tensors, tmp_path, lambda: next(answers)) is None
    assert not list(tmp_path.iterdir())


@needs_proc
def test_what_may_be_written_a_day_holds_for_pauses_too(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_loop, "SECONDS_BEFORE_OFFLOAD", 0.0)
    policy = CheckpointPolicy(every_steps=10, min_seconds=0.0, bytes_per_day=1e6)  # a state an hour or so
    trainer = make_trainer(compute, make_stage(compute, tmp_path, policy=policy))
    saver = trainer.parts.stages[0].saver
    assert saver is not None
    waits = list[float]()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            while trainer.steps < 3:
                await trio.sleep(0.001)
            await paused(trainer, tmp_path, files=2)  # nothing was written yet
            waits.append(saver.seconds_until_offload())
            trainer.resume()
            await trainer.wait_until_resumed()
            trainer.stop()

    trio.run(main)
    assert waits[0] > 600
