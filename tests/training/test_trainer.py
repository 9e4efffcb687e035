from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event

import anyio
import anyio.to_thread
import pytest
import torch
import trio

from neuroshard.errors import StorageError
from neuroshard.pipeline.executor import ComputeThread, Priority
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import LocalStageClient
from neuroshard.state.checkpoint_saver import CheckpointPolicy
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.disk_space import StorageLimits
from neuroshard.status.snapshot import NodeState
from neuroshard.training.parts import DriverParts, TrainerParts
from neuroshard.training.trainer import Trainer
from tests.worlds.stages import (
    IDENTITY,
    PARAMETERS,
    MemoryFeed,
    make_replica,
    make_stage,
    make_trainer,
    state_becomes,
    state_digest,
    train,
)


async def steps_reach(trainer: Trainer, steps: int) -> None:
    while trainer.steps < steps:
        await anyio.sleep(0.001)


def run_with(trainer: Trainer, scenario: Callable[[], object]) -> None:
    """Run the trainer while `scenario`, an async function, plays; then stop it."""

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer.run)
            with anyio.fail_after(20):
                await scenario()  # type: ignore[misc]
            trainer.stop()

    trio.run(main)


def test_it_learns_and_says_so(compute: ComputeThread, tmp_path: Path) -> None:
    clock = iter(range(10**9))
    trainer = make_trainer(compute, make_stage(compute, tmp_path), monotonic=lambda: float(next(clock)))
    trio.run(trainer.run, 150)
    snapshot = trainer.snapshot()
    first, last = snapshot.training.held_out[0], snapshot.training.held_out[-1]
    assert first.step == 0
    assert last.loss < first.loss - 0.5
    assert snapshot.training.steps == 150
    assert snapshot.training.tokens == 150 * 4 * 16
    assert snapshot.training.loss_ema is not None
    assert snapshot.verification.training_verified, snapshot.verification
    assert snapshot.diloco.outer_steps == 30
    assert snapshot.diloco.successful_syncs == 0  # a lone node synchronises with nobody
    assert snapshot.state is NodeState.NOT_TRAINING
    assert [point.step for point in snapshot.history] == list(range(1, 151))
    assert snapshot.checkpoints.last_saved_step == 150


def test_with_learning_rate_zero_nothing_changes_and_nothing_is_verified(
    compute: ComputeThread, tmp_path: Path
) -> None:
    parameters = replace(PARAMETERS, inner=replace(PARAMETERS.inner, learning_rate=0.0))
    clock = iter(range(10**9))
    trainer = make_trainer(
        compute, make_stage(compute, tmp_path, parameters), None, parameters, monotonic=lambda: float(next(clock))
    )
    before = [parameter.detach().clone() for parameter in trainer.parts.stages[0].executor.model.parameters()]
    trio.run(trainer.run, 40)
    after = trainer.parts.stages[0].executor.model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert len(trainer.snapshot().training.held_out) > 2
    assert not trainer.snapshot().verification.training_verified


def test_pause_frees_and_resume_goes_on_without_loss(compute: ComputeThread, tmp_path: Path) -> None:
    expected = state_digest(train(compute, tmp_path / "expected", 12))
    trainer = make_trainer(compute, make_stage(compute, tmp_path / "paused"))

    async def scenario() -> None:
        for _ in range(4):
            await steps_reach(trainer, trainer.steps + 2)
            trainer.pause()
            await state_becomes(trainer, NodeState.PAUSED)
            assert trainer.snapshot().state is NodeState.PAUSED
            assert trainer.snapshot().reason == "Paused by the user."
            steps = trainer.steps
            await anyio.sleep(0.02)
            assert trainer.steps == steps
            assert (await trainer.save_now()).state == "paused"
            trainer.resume()
            await state_becomes(trainer, NodeState.TRAINING)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer.run, 12)
            with anyio.fail_after(20):
                await scenario()

    trio.run(main)
    assert trainer.steps == 12
    assert state_digest(trainer) == expected


def test_a_pause_with_a_duration_ends_by_itself(compute: ComputeThread, tmp_path: Path) -> None:
    trainer = make_trainer(compute, make_stage(compute, tmp_path))

    async def scenario() -> None:
        await steps_reach(trainer, 1)
        trainer.pause(0.05)
        assert trainer.snapshot().paused_until is not None
        await trainer.wait_until_paused()
        steps = trainer.steps
        await steps_reach(trainer, steps + 2)
        assert trainer.snapshot().paused_until is None

    run_with(trainer, scenario)


@pytest.mark.parametrize("ask", ["stop", "pause", "save"])
def test_requests_are_served_while_data_are_missing(compute: ComputeThread, tmp_path: Path, ask: str) -> None:
    feed = MemoryFeed()
    trainer = make_trainer(compute, make_stage(compute, tmp_path), feed)

    async def scenario() -> None:
        await steps_reach(trainer, 3)
        feed.gate = anyio.Event()
        await anyio.sleep(0.02)
        if ask == "pause":
            trainer.pause()
            await state_becomes(trainer, NodeState.PAUSED)
        if ask == "save":
            assert (await trainer.save_now()).message == f"Checkpoint of step {trainer.steps} saved."

    run_with(trainer, scenario)
    assert CheckpointStore(tmp_path).generations()[0].step == trainer.steps


def test_a_stop_between_microbatches_saves_the_last_step(compute: ComputeThread, tmp_path: Path) -> None:
    expected = state_digest(train(compute, tmp_path / "expected", 3))

    class HaltingFeed(MemoryFeed):
        async def next_batch(self, sequences: int, *, step: int | None = None):
            if step == 4 and self.position.window % 4:  # the second microbatch of step 4
                trainer.stop()
                await anyio.sleep_forever()
            return await super().next_batch(sequences, step=step)

    trainer = make_trainer(compute, make_stage(compute, tmp_path / "stopped"), HaltingFeed())
    trio.run(trainer.run)
    assert trainer.steps == 3
    assert trainer.record.progress.position is not None
    assert trainer.record.progress.position.window == 12
    assert state_digest(trainer) == expected
    assert state_digest(train(compute, tmp_path / "stopped", 3)) == expected


def test_three_non_finite_steps_restore_the_last_checkpoint_and_pause(compute: ComputeThread, tmp_path: Path) -> None:
    train(compute, tmp_path, 5)
    trainer = make_trainer(compute, make_stage(compute, tmp_path))
    good = state_digest(trainer)
    norm = trainer.parts.stages[0].executor.model.norm
    assert norm is not None

    async def scenario() -> None:
        await steps_reach(trainer, 7)
        await compute.run(lambda: norm.weight.data.fill_(float("nan")))
        await state_becomes(trainer, NodeState.PAUSED)
        assert trainer.steps == 5
        assert state_digest(trainer) == good
        snapshot = trainer.snapshot()
        assert "3 steps in a row" in snapshot.reason
        assert "step 5 was restored" in snapshot.reason
        assert snapshot.training.skipped_steps == 3
        assert not snapshot.verification.training_verified
        trainer.resume()
        await steps_reach(trainer, 8)

    run_with(trainer, scenario)
    assert all(torch.isfinite(parameter).all() for parameter in trainer.parts.stages[0].executor.model.parameters())


def test_one_non_finite_step_is_skipped_and_counted(compute: ComputeThread, tmp_path: Path) -> None:
    trainer = make_trainer(compute, make_stage(compute, tmp_path))
    executor = trainer.parts.stages[0].executor
    step = executor.step

    def spoil_once(learning_rate: float, max_norm: float, token_count: int):
        executor.step = step  # type: ignore[method-assign]
        next(p.grad for p in executor.model.parameters() if p.grad is not None)[0] = float("inf")
        return step(learning_rate, max_norm, token_count)

    executor.step = spoil_once  # type: ignore[method-assign]
    trio.run(trainer.run, 4)
    assert trainer.steps == 4
    assert trainer.snapshot().training.skipped_steps == 1
    assert trainer.record.progress.position is not None
    assert trainer.record.progress.position.window == 20  # the batch of the skipped step is not used again


def test_losses_are_noted_to_the_feed_and_noted_again_after_a_restart(compute: ComputeThread, tmp_path: Path) -> None:
    feed = MemoryFeed()
    trio.run(make_trainer(compute, make_stage(compute, tmp_path), feed).run, 18)
    assert [step for _, _, step in feed.noted] == list(range(1, 19))
    stage = make_stage(compute, tmp_path)
    again = MemoryFeed(stage.record.progress.position)
    trio.run(make_trainer(compute, stage, again).run, 18)
    assert again.noted == feed.noted[15:]  # those on the present shard: 16 steps use up one
    elsewhere = MemoryFeed()  # as under another node key
    trio.run(make_trainer(compute, make_stage(compute, tmp_path), elsewhere).run, 18)
    assert elsewhere.noted == []


def test_a_pause_that_is_taken_back_before_it_holds_does_not_keep_its_sender_waiting(
    compute: ComputeThread, tmp_path: Path
) -> None:
    trainer = make_trainer(compute, make_stage(compute, tmp_path))
    at_work, release = Event(), Event()

    def long_microbatch() -> None:
        at_work.set()
        release.wait(20)

    async def scenario() -> None:
        await steps_reach(trainer, 2)
        compute.submit(long_microbatch, Priority.SMALL)
        await anyio.to_thread.run_sync(at_work.wait)
        await anyio.sleep(0.02)  # the trainer waits for the compute thread now, so it cannot see the pause
        states: list[NodeState] = []

        async def pause() -> None:
            trainer.pause()
            states.append(await trainer.wait_until_paused())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pause)
            await anyio.sleep(0.01)
            assert not states
            trainer.resume()
        assert states == [NodeState.TRAINING]
        release.set()

    run_with(trainer, scenario)


def test_a_resume_that_meets_another_pause_does_not_keep_its_sender_waiting(
    compute: ComputeThread, tmp_path: Path
) -> None:
    trainer = make_trainer(compute, make_stage(compute, tmp_path))

    async def scenario() -> None:
        trainer.pause()
        assert await trainer.wait_until_paused() is NodeState.PAUSED
        trainer.resume()
        trainer.pause(reason="Again.")
        assert await trainer.wait_until_resumed() is NodeState.PAUSED
        trainer.resume()
        assert await trainer.wait_until_resumed() is not NodeState.PAUSED

    run_with(trainer, scenario)


def test_a_checkpoint_that_the_disk_refuses_is_an_error_for_whoever_asked(
    compute: ComputeThread, tmp_path: Path
) -> None:
    stage = make_stage(compute, tmp_path / "state")
    trainer = make_trainer(compute, stage)

    async def scenario() -> None:
        await steps_reach(trainer, 2)
        stage.keeper.store.change_limits(StorageLimits(own_bytes=1))
        with pytest.raises(StorageError):
            await trainer.save_now()

    run_with(trainer, scenario)
    assert trainer.last_save_failed


def test_a_baseline_that_is_not_a_number_pauses_instead_of_being_measured_for_ever(
    compute: ComputeThread, tmp_path: Path
) -> None:
    trainer = make_trainer(compute, make_stage(compute, tmp_path))
    norm = trainer.parts.stages[0].executor.model.norm
    assert norm is not None
    compute.submit(lambda: norm.weight.data.fill_(float("nan"))).result()

    async def scenario() -> None:
        await state_becomes(trainer, NodeState.PAUSED)
        assert "not a number" in trainer.snapshot().reason
        assert trainer.steps == 0
        await compute.run(lambda: norm.weight.data.fill_(1.0))
        trainer.resume()
        await steps_reach(trainer, 1)

    run_with(trainer, scenario)


def test_a_microbatch_is_one_job_of_the_compute_thread_and_a_step_is_another(
    compute: ComputeThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(compute, make_stage(compute, tmp_path), monotonic=lambda: 0.0)
    submit, jobs = compute.submit, list[int]()

    def counted(work: Callable[[], object], priority: Priority = Priority.TRAINING):
        jobs.append(priority)
        return submit(work, priority)

    monkeypatch.setattr(compute, "submit", counted)
    trio.run(trainer.run, 4)
    evaluation, microbatches = 32 // PARAMETERS.batch_size, 4 * PARAMETERS.sequences_per_step // PARAMETERS.batch_size
    steps, end = 4, 3  # nothing left open, a last save, the writer's end
    assert len(jobs) == evaluation + microbatches + steps + end


def test_a_clock_that_jumps_a_day_stops_neither_checkpoints_nor_evaluations_nor_rounds(
    compute: ComputeThread, tmp_path: Path
) -> None:
    ticks, wall, steps = count(), [1_700_000_000.0], [0]
    stage = make_stage(compute, tmp_path, policy=CheckpointPolicy(min_seconds=0.0, bytes_per_day=1e18))
    held = make_replica(compute, stage)
    held.saver._wall_clock = lambda: wall[0]
    driving = DriverParts(
        IDENTITY.node_id, MemoryFeed(None), FixedRouting([LocalStageClient(held.service, IDENTITY.node_id)])
    )
    parts = TrainerParts(PARAMETERS, (held,), driving)

    def passing() -> float:  # a step takes long, an evaluation hardly anything
        return 1000.0 * steps[0] + 1e-3 * next(ticks)

    trainer = Trainer(parts, wall_clock=lambda: wall[0], monotonic=passing)

    def done() -> tuple[int, int, int, int]:
        seen = trainer.snapshot()
        steps[0] = seen.training.steps
        saved = seen.checkpoints.last_saved_step or 0
        return seen.training.steps, saved, len(seen.training.held_out), seen.diloco.outer_steps

    async def scenario() -> None:
        for jump in (86_400.0, -2 * 86_400.0):
            wall[0] += jump
            before = done()
            while not all(now > then for now, then in zip(done(), before, strict=True)):
                await anyio.sleep(0.05)

    run_with(trainer, scenario)
    assert trainer.snapshot().checkpoints.last_saved_step == trainer.steps
