"""One node that holds all stages trains what a node with the whole model trains, and obeys as it does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import pytest
import torch
import trio
from several_stages import WHOLE, make_split_trainer, make_stages, weights
from small_stage import make_stage, make_trainer, state_digest

from neuroshard.errors import StorageError
from neuroshard.status.snapshot import NodeState
from neuroshard.training.checkpoint.store import CheckpointStore, StorageLimits
from neuroshard.training.compute import ComputeThread
from neuroshard.training.loop import Trainer


async def steps_reach(trainer: Trainer, steps: int) -> None:
    while trainer.steps < steps:
        await anyio.sleep(0.001)


def run_while(trainer: Trainer, scenario: Callable[[], Awaitable[None]], last_step: int | None = None) -> None:
    """Run the trainer while a scenario plays; then let it end, at its last step when it has one."""

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer.run, last_step)
            with anyio.fail_after(20):
                await scenario()
            if last_step is None:
                trainer.stop()

    trio.run(main)


async def some_steps(trainer: Trainer) -> None:
    await steps_reach(trainer, trainer.steps + 2)
    await anyio.sleep(0.01)


def saved_steps(folder: Path) -> list[int]:
    return [CheckpointStore(folder / str(number)).generations()[0].step for number in range(3)]


@pytest.mark.parametrize("in_flight", [1, 4])
def test_it_trains_what_one_stage_trains(compute: ComputeThread, tmp_path: Path, in_flight: int) -> None:
    whole = make_trainer(compute, make_stage(compute, tmp_path / "whole", WHOLE), parameters=WHOLE)
    trio.run(whole.run, 12)
    split = make_split_trainer(compute, tmp_path / "split", in_flight=in_flight)
    trio.run(split.run, 12)
    expected = weights(whole)
    found = weights(split)
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-3, atol=1e-5)
    curves = [[point.loss for point in trainer.record.history.snapshot()] for trainer in (whole, split)]
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)
    assert split.record.progress.position == whole.record.progress.position
    for record, held in zip(split.records, split.parts.stages, strict=True):
        assert (record.progress.steps, record.progress.sequences) == (12, 96)
        assert held.outer.state.outer_step == 2
    assert split.snapshot().training.held_out[0].loss == pytest.approx(
        whole.snapshot().training.held_out[0].loss, abs=1e-5
    )
    assert split.snapshot().state is NodeState.NOT_TRAINING


@pytest.mark.parametrize("stop_at", [1, 5, 7])
def test_stopped_and_resumed_equals_never_stopped(compute: ComputeThread, tmp_path: Path, stop_at: int) -> None:
    whole = make_split_trainer(compute, tmp_path / "whole")
    trio.run(whole.run, 12)
    for last_step in (stop_at, 12):
        parts = make_split_trainer(compute, tmp_path / "parts")
        trio.run(parts.run, last_step)
        assert saved_steps(tmp_path / "parts") == [last_step] * 3
    assert state_digest(parts) == state_digest(whole)
    assert [record.progress for record in parts.records] == [record.progress for record in whole.records]


@pytest.mark.parametrize("in_flight", [1, 4])
def test_pauses_free_all_stages_soon_and_lose_nothing(compute: ComputeThread, tmp_path: Path, in_flight: int) -> None:
    whole = make_split_trainer(compute, tmp_path / "whole", in_flight=in_flight)
    trio.run(whole.run, 12)
    paused = make_split_trainer(compute, tmp_path / "paused", in_flight=in_flight)

    async def scenario() -> None:
        for _ in range(6):
            await anyio.sleep(0.01)
            with anyio.fail_after(2):  # the stages end what was begun instead of giving it up after a while
                paused.pause()
                assert await paused.wait_until_paused() is NodeState.PAUSED
            assert all(stage.service.intake.is_idle for stage in paused.parts.stages)
            steps = [record.progress.steps for record in paused.records]
            saved = await paused.save_now()
            assert saved.state == "paused"
            assert saved_steps(tmp_path / "paused") == steps
            paused.resume()
            await paused.wait_until_resumed()

    run_while(paused, scenario, 12)
    assert all(stage.service.counts.given_up == 0 for stage in paused.parts.stages)
    if in_flight == 1:
        assert state_digest(paused) == state_digest(whole)
    for name, parameter in weights(paused).items():
        torch.testing.assert_close(parameter, weights(whole)[name], rtol=1e-3, atol=1e-5)


def test_a_stop_ends_all_stages_at_one_step_and_loses_no_data(compute: ComputeThread, tmp_path: Path) -> None:
    whole = make_split_trainer(compute, tmp_path / "whole")
    trio.run(whole.run, 12)
    for _ in range(3):
        stopped = make_split_trainer(compute, tmp_path / "stopped", in_flight=2)

        run_while(stopped, partial(some_steps, stopped))
        steps = {record.progress.steps for record in stopped.records}
        assert steps == {stopped.steps}
        assert saved_steps(tmp_path / "stopped") == [stopped.steps] * 3
        position = stopped.record.progress.position
        assert position is not None
        assert position.order * 64 + position.window == stopped.steps * 8


def test_a_checkpoint_is_saved_when_those_of_all_stages_are(compute: ComputeThread, tmp_path: Path) -> None:
    stages = make_stages(compute, tmp_path)
    trainer = make_split_trainer(compute, stages)

    async def scenario() -> None:
        await steps_reach(trainer, 2)
        result = await trainer.save_now()
        assert "3 stages" in result.message
        assert all(step >= 2 for step in saved_steps(tmp_path))
        stages[1].keeper.store.limits = StorageLimits(own_bytes=1)
        with pytest.raises(StorageError):
            await trainer.save_now()

    run_while(trainer, scenario)
    assert trainer.last_save_failed
    assert trainer.snapshot().checkpoints.alarm is not None
