"""One node that holds all stages trains what a node with the whole model trains, and obeys as it does."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from math import sqrt
from pathlib import Path

import anyio
import pytest
import torch
import trio

from neuroshard.errors import StorageError
from neuroshard.pipeline.executor import ComputeThread, StepResult
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.disk_space import StorageLimits
from neuroshard.status.snapshot import NodeState
from neuroshard.training.stage_checkpoint import steps_behind
from neuroshard.training.trainer import Trainer
from neuroshard.types import LayerRange
from tests.worlds.stages import make_stage, make_trainer, state_becomes, state_digest
from tests.worlds.trainers import SPLIT, WHOLE, make_split_trainer, make_stages, weights


async def steps_reach(trainer: Trainer, steps: int) -> None:
    while trainer.steps < steps:
        await anyio.sleep(0.001)


def run_while(trainer: Trainer, scenario: Callable[[], Awaitable[None]], last_step: int | None = None) -> None:
    """Run the trainer while a scenario plays; then let it end, at its last step when it has one."""

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer.run, last_step)
            with anyio.fail_after(120):
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
    # a computer that is busy evaluates at other steps
    found, expected = ([replace(one.progress, noted=()) for one in trainer.records] for trainer in (parts, whole))
    assert found == expected


@pytest.mark.parametrize("in_flight", [1, 4])
def test_pauses_free_all_stages_soon_and_lose_nothing(compute: ComputeThread, tmp_path: Path, in_flight: int) -> None:
    whole = make_split_trainer(compute, tmp_path / "whole", in_flight=in_flight)
    trio.run(whole.run, 24)
    paused = make_split_trainer(compute, tmp_path / "paused", in_flight=in_flight)

    async def scenario() -> None:
        for turn in range(6):
            await steps_reach(paused, 1 + 3 * turn)
            await anyio.sleep(0.003 * turn)
            with anyio.fail_after(20):  # the stages end what was begun instead of giving it up after a while
                paused.pause()
                assert await paused.wait_until_paused() is NodeState.PAUSED
            assert all(stage.service.intake.is_idle for stage in paused.parts.stages)
            steps = [record.progress.steps for record in paused.records]
            saved = await paused.save_now()
            assert saved.state == "paused"
            assert saved_steps(tmp_path / "paused") == steps
            paused.resume()
            await paused.wait_until_resumed()

    run_while(paused, scenario, 24)
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
        stages[1].keeper.store.change_limits(StorageLimits(own_bytes=1))
        await steps_reach(trainer, trainer.steps + 1)  # what is on disk already needs no room
        with pytest.raises(StorageError):
            await trainer.save_now()

    run_while(trainer, scenario)
    assert trainer.last_save_failed
    assert trainer.snapshot().checkpoints.alarm is not None


def test_a_kill_between_the_checkpoints_of_two_stages_is_told_and_trained_past(
    compute: ComputeThread, tmp_path: Path
) -> None:
    trio.run(make_split_trainer(compute, tmp_path).run, 4)
    shutil.copytree(tmp_path / "1", tmp_path / "older")
    trio.run(make_split_trainer(compute, tmp_path).run, 6)
    shutil.rmtree(tmp_path / "1")
    (tmp_path / "older").rename(tmp_path / "1")
    stages = make_stages(compute, tmp_path)
    assert [stage.record.progress.steps for stage in stages] == [6, 4, 6]
    (warning,) = steps_behind(stages)
    assert "Layer 2 resumes from step 4" in warning
    assert "2 steps of these layers are lost" in warning
    trainer = make_split_trainer(compute, stages, in_flight=3)
    trio.run(trainer.run, 15)
    assert [record.progress.steps for record in trainer.records] == [15, 13, 15]
    assert trainer.record.progress.loss is not None
    assert trainer.record.progress.loss < 4.0
    assert trainer.snapshot().stages[1].steps == 13
    assert steps_behind(make_stages(compute, tmp_path)[::2]) == ()


def test_a_stage_without_a_checkpoint_beside_others_begins_anew_and_says_so(
    compute: ComputeThread, tmp_path: Path
) -> None:
    trio.run(make_split_trainer(compute, tmp_path).run, 3)
    shutil.rmtree(tmp_path / "2")
    (warning,) = steps_behind(make_stages(compute, tmp_path))
    assert "Layer 3 begins untrained" in warning


@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_a_spoilt_stage_goes_back_to_its_checkpoint_and_pauses_all(
    compute: ComputeThread, tmp_path: Path, spoilt: int
) -> None:
    trio.run(make_split_trainer(compute, tmp_path).run, 3)
    trainer = make_split_trainer(compute, tmp_path)
    good = weights(trainer)

    async def scenario() -> None:
        await steps_reach(trainer, 4)
        name, parameter = next(iter(trainer.parts.stages[spoilt].executor.model.named_parameters()))
        await compute.run(lambda: parameter.data.fill_(float("nan")))
        await state_becomes(trainer, NodeState.PAUSED)
        assert "step 3 was restored" in trainer.snapshot().reason
        assert torch.equal(weights(trainer)[name], good[name])
        assert all(stage.service.intake.is_idle for stage in trainer.parts.stages)
        trainer.resume()
        await steps_reach(trainer, trainer.steps + 3)

    run_while(trainer, scenario)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(trainer).values())


def test_a_row_for_each_stage_tells_where_it_is(compute: ComputeThread, tmp_path: Path) -> None:
    trainer = make_split_trainer(compute, tmp_path)
    trio.run(trainer.run, 6)
    rows = trainer.snapshot().stages
    assert [(row.index, row.layers) for row in rows] == [(n, LayerRange(n, n + 1)) for n in range(3)]
    assert {(row.steps, row.outer_step, row.last_saved_step, row.sequences_wanted) for row in rows} == {(6, 1, 6, 8)}
    assert rows[0].loss == pytest.approx(rows[2].loss)
    assert rows[1].loss is None
    assert all(row.grad_norm is not None and row.state_root for row in rows)
    assert {(row.open_microbatches, row.sessions) for row in rows} == {(0, 0)}


def test_clipping_follows_the_number_of_stages(compute: ComputeThread, tmp_path: Path) -> None:
    clipped = replace(SPLIT, inner=replace(SPLIT.inner, max_grad_norm=0.3))
    trainer = make_split_trainer(compute, tmp_path, parameters=clipped)
    asked = list[float]()
    for held in trainer.parts.stages:
        held.executor.step = watched(held.executor.step, asked)  # type: ignore[method-assign]
    trio.run(trainer.run, 1)
    assert sorted(asked) == pytest.approx([0.3 / sqrt(3), 0.3 / sqrt(3), 0.3 * 5 / sqrt(3)])


def watched(step: Callable[..., StepResult], asked: list[float]) -> Callable[..., StepResult]:
    def note(learning_rate: float, max_norm: float, token_count: int) -> StepResult:
        asked.append(max_norm)
        return step(learning_rate, max_norm, token_count)

    return note
