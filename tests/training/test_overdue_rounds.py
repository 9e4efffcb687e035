"""A stage through which nothing passes any more still makes the outer step that is due."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
import trio
from trio.testing import MockClock

from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.training.stage_loop import AUTO_STEP_SECONDS
from neuroshard.training.trainer import Trainer
from tests.worlds.stages import PARAMETERS, ComputeInPlace, MemoryFeed, make_stage, make_trainer

ROUND_SECONDS = 60.0
SELDOM = OuterOptimization(inner_steps=1000, max_round_seconds=ROUND_SECONDS)
AVERAGED = OuterOptimization(
    strategy="averaging", aggregator="mean", codec="fp32", averaged_sequences=1000, max_round_seconds=ROUND_SECONDS
)


def run_quiet(folder: Path, outer: OuterOptimization, scenario: Callable[[Trainer], Awaitable[None]]) -> Trainer:
    """A scenario for a trainer whose data end after three steps and a half.

    Computing takes no time by its clock, so no time has passed when the scenario begins, on however busy a machine.
    """
    compute = ComputeInPlace()
    parameters = replace(PARAMETERS, outer=outer)
    feed = MemoryFeed()
    next_batch = feed.next_batch

    async def ending(sequences: int, *, step: int | None = None) -> object:
        if feed.position.window >= 14:
            await anyio.sleep_forever()
        return await next_batch(sequences, step=step)

    feed.next_batch = ending  # type: ignore[method-assign, assignment]

    async def main() -> Trainer:
        stage = make_stage(compute, folder, parameters)
        trainer = make_trainer(compute, stage, feed, parameters, monotonic=anyio.current_time)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer.run)
            service = trainer.parts.stages[0].service
            while (trainer.steps, service.intake.accumulated.sequences) != (3, 2):
                await anyio.lowlevel.checkpoint()  # not `sleep`: the clock stands still until then
            await scenario(trainer)
            trainer.stop()
        return trainer

    return trio.run(main, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("outer", [SELDOM, AVERAGED], ids=["diloco", "averaging"])
def test_a_round_that_is_due_waits_for_no_more_data(tmp_path: Path, outer: OuterOptimization) -> None:
    async def scenario(trainer: Trainer) -> None:
        held = trainer.parts.stages[0]
        while not held.outer.state.outer_step:
            await anyio.sleep(0.1)
        assert anyio.current_time() >= ROUND_SECONDS  # nothing was due before
        assert not trainer.snapshot().diloco.inner_step
        await anyio.sleep(3 * ROUND_SECONDS)
        assert held.outer.state.outer_step == 1  # with nothing to contribute there is no other one

    trainer = run_quiet(tmp_path, outer, scenario)
    assert trainer.steps == (4 if outer is AVERAGED else 3)  # the half step is in the gradient, or waits for its rest
    assert trainer.parts.stages[0].outer.progress.failed == 0


def test_nothing_is_made_while_no_round_is_due(tmp_path: Path) -> None:
    async def scenario(trainer: Trainer) -> None:
        await anyio.sleep(ROUND_SECONDS - AUTO_STEP_SECONDS)
        assert trainer.parts.stages[0].outer.state.outer_step == 0
        assert trainer.parts.stages[0].service.intake.accumulated.sequences == 2

    run_quiet(tmp_path, SELDOM, scenario)
