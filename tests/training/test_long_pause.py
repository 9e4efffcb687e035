"""A pause that lasts saves the model, frees its memory and loads it again; training continues as after a restart."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import trio

from neuroshard.data.windows import Batch
from neuroshard.errors import StorageError
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.state.checkpoint_saver import CheckpointPolicy
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.status.board import Generate, GenerationSummary
from neuroshard.training.drive_store import WriteAheadFeed
from neuroshard.training.text_generation import TextGenerator
from neuroshard.training.trainer import Trainer
from neuroshard.types import DataPosition
from tests.worlds.stages import (
    MemoryFeed,
    has_no_tensors,
    make_stage,
    make_trainer,
    paused_after,
    state_digest,
    tensors_dropped,
    train,
    windows,
)
from tests.worlds.trainers import SPLIT, make_split_trainer


def steps_saved(folder: Path) -> list[int]:
    return [generation.step for generation in CheckpointStore(folder).generations()]


def test_training_continues_from_the_same_bytes(compute: ComputeThread, tmp_path: Path) -> None:
    trainer = make_trainer(compute, make_stage(compute, tmp_path / "paused"), seconds_before_drop=0.0)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 12)
            for steps in (3, 7):
                await paused_after(trainer, steps)
                await tensors_dropped(trainer)
                assert steps_saved(tmp_path / "paused")[0] == trainer.steps
                trainer.resume()
                await trainer.wait_until_resumed()
                assert not has_no_tensors(trainer)

    trio.run(main)
    assert state_digest(trainer) == state_digest(train(compute, tmp_path / "calm", 12))


def test_a_stop_in_the_pause_loses_nothing_and_writes_nothing(compute: ComputeThread, tmp_path: Path) -> None:
    folder = tmp_path / "paused"
    trainer = make_trainer(compute, make_stage(compute, folder), seconds_before_drop=0.0)
    seen = list[int]()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            await paused_after(trainer, 4)
            await tensors_dropped(trainer)
            assert (await trainer.save_now()).message == f"Checkpoint of step {trainer.steps} saved."
            seen.append((folder / f"step-{trainer.steps}.json").stat().st_mtime_ns)
            trainer.stop()

    trio.run(main)
    steps = trainer.steps
    assert not trainer.last_save_failed
    assert [(folder / f"step-{steps}.json").stat().st_mtime_ns] == seen
    assert state_digest(train(compute, folder, steps)) == state_digest(train(compute, tmp_path / "calm", steps))


class CountingFeed(MemoryFeed):
    """Counts how often each window was given, and pauses training within a step."""

    def __init__(self) -> None:
        super().__init__()
        self.given = Counter[tuple[int, int]]()
        self.pause_after = -1  # batches
        self.reached = trio.Event()

    async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
        if self.given.total() == self.pause_after:
            self.pause_after = -1
            self.reached.set()
            await trio.sleep_forever()  # cancelled by the pause: nothing is consumed
        start = self.position
        batch = await super().next_batch(sequences, step=step)
        self.given.update((start.order, start.window + number) for number in range(len(batch.input_ids)))
        return batch


def test_the_data_of_an_unfinished_step_come_again(compute: ComputeThread, tmp_path: Path) -> None:
    """A step has two microbatches of two sequences. The pause comes after the first one of the fourth step."""
    feed, folder = CountingFeed(), tmp_path / "paused"
    feed.pause_after = 3 * 4 + 2
    trainer = make_trainer(compute, make_stage(compute, folder), feed, seconds_before_drop=0.0)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 6)
            await feed.reached.wait()
            while trainer.parts.stages[0].service.intake.accumulated.sequences != 2:
                await trio.sleep(0.001)
            trainer.pause()
            await tensors_dropped(trainer)
            assert trainer.parts.stages[0].service.intake.accumulated.sequences == 0
            trainer.resume()

    trio.run(main)
    assert trainer.steps == 6
    assert feed.given == Counter({(0, window): 2 if window in (12, 13) else 1 for window in range(6 * 4)})
    assert state_digest(trainer) == state_digest(train(compute, tmp_path / "calm", 6))


def test_a_pause_that_ends_soon_keeps_the_unfinished_step(compute: ComputeThread, tmp_path: Path) -> None:
    feed = CountingFeed()
    feed.pause_after = 3 * 4 + 2
    trainer = make_trainer(compute, make_stage(compute, tmp_path / "paused"), feed)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 6)
            await feed.reached.wait()
            trainer.pause()
            await trainer.wait_until_paused()
            trainer.resume()

    trio.run(main)
    assert set(feed.given.values()) == {1}
    assert 3 not in steps_saved(tmp_path / "paused")
    assert state_digest(trainer) == state_digest(train(compute, tmp_path / "calm", 6))


def test_data_that_left_this_node_do_not_come_again() -> None:
    notes, is_needed = list[DataPosition](), [True]
    feed = WriteAheadFeed(MemoryFeed(), notes.append, lambda: is_needed[0])
    start = feed.position

    async def main() -> None:
        first = await feed.next_batch(2)
        feed.rewind(start)
        second = await feed.next_batch(2)
        assert second.position.window == first.position.window + 2
        while feed.position != notes[-1]:  # the data that were read with the first ones
            await feed.next_batch(2)
        is_needed[0] = False
        third = await feed.next_batch(2)
        feed.rewind(start)
        assert feed.position == notes[-1]
        again = await feed.next_batch(2)
        assert torch.equal(third.input_ids, again.input_ids)
        assert third.position == again.position == feed.position

    trio.run(main)


def test_data_of_a_read_that_the_pause_cancelled_come_once() -> None:
    """The pause cancels a read ahead. What it has read was never noted, so the rewound feed reads it again."""

    class Slow(MemoryFeed):
        """Cannot give more than three windows for now."""

        left = 3

        async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
            if not self.left:
                await trio.sleep_forever()
            self.left -= 1
            return await super().next_batch(sequences, step=step)

    source = Slow()
    feed, start = WriteAheadFeed(source, [].append), source.position

    async def main() -> None:
        with trio.move_on_after(0.01) as scope:
            await feed.next_batch(2)
        assert scope.cancelled_caught
        source.left = 100
        feed.rewind(start)
        ids = [(await feed.next_batch(2)).input_ids for _ in range(3)]
        assert torch.equal(torch.cat(ids), windows(0)[:6, :-1])

    trio.run(main)


def test_a_model_that_cannot_be_saved_stays_in_memory(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stage = make_stage(compute, tmp_path / "paused")
    trainer, write = make_trainer(compute, stage, seconds_before_drop=0.0), stage.keeper.store.write

    def full(*_: Any) -> None:
        raise StorageError("The disk is full.")

    monkeypatch.setattr(stage.keeper.store, "write", full)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 8)
            await paused_after(trainer, 3)
            with trio.fail_after(20):
                while "stays in memory" not in caplog.text:
                    await trio.sleep(0.001)
            assert not has_no_tensors(trainer)
            monkeypatch.setattr(stage.keeper.store, "write", write)
            trainer.resume()

    trio.run(main)
    assert state_digest(trainer) == state_digest(train(compute, tmp_path / "calm", 8))


def test_the_write_limit_holds_for_pauses_too(compute: ComputeThread, tmp_path: Path) -> None:
    policy = CheckpointPolicy(every_steps=10, min_seconds=0.0, bytes_per_day=1e6)  # one state per hour or so
    trainer = make_trainer(compute, make_stage(compute, tmp_path, policy=policy), seconds_before_drop=0.0)
    saver = trainer.parts.stages[0].saver
    assert saver is not None

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run)
            await paused_after(trainer, 3)
            await tensors_dropped(trainer)  # nothing was written before
            assert await saver.seconds_until_save(trainer.record) == 0.0  # this state is on the disk
            trainer.resume()
            await paused_after(trainer, trainer.steps + 1)
            assert await saver.seconds_until_save(trainer.record) > 600
            assert not has_no_tensors(trainer)
            trainer.stop()

    trio.run(main)


def test_a_text_in_the_pause_loads_the_model_and_lets_it_go(compute: ComputeThread, tmp_path: Path) -> None:
    plain = make_trainer(compute, make_stage(compute, tmp_path / "paused"))
    seen = list[bool]()

    class Writer:
        """Writes nothing, and looks at the model."""

        async def generate(self, _: Generate) -> GenerationSummary:
            await trio.sleep(0.05)
            seen.append(has_no_tensors(plain))
            return GenerationSummary(0, 0, "stop")

    parts = replace(plain.parts, generator=cast("TextGenerator", Writer()))
    trainer = Trainer(parts, seconds_before_drop=0.0)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 6)
            await paused_after(trainer, 3)
            for _ in range(2):
                await tensors_dropped(trainer)
                await trainer.generate(cast("Generate", None))
            await tensors_dropped(trainer)
            trainer.resume()

    trio.run(main)
    assert seen == [False, False]
    assert state_digest(trainer) == state_digest(train(compute, tmp_path / "calm", 6))


def test_no_stage_of_a_node_counts_a_sequence_twice(compute: ComputeThread, tmp_path: Path) -> None:
    """Three stages on one node, paused after the first of the four microbatches of a step."""
    feed, calm = CountingFeed(), make_split_trainer(compute, tmp_path / "calm")
    trio.run(calm.run, 5)
    feed.pause_after = 2 * SPLIT.sequences_per_step + 2
    plain = make_split_trainer(compute, tmp_path / "paused", feed=feed)
    trainer = Trainer(plain.parts, seconds_before_drop=0.0)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trainer.run, 5)
            await feed.reached.wait()
            trainer.pause()
            await tensors_dropped(trainer)
            trainer.resume()

    trio.run(main)
    assert [record.progress.steps for record in trainer.records] == [5, 5, 5]
    assert state_digest(trainer) == state_digest(calm)
