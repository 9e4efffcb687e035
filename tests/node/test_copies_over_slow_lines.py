"""A stage of 40 MB whose only holder is behind a line of 10 Mbit/s: copied beside its training, and taken over."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import anyio
import pytest

from neuroshard.consensus.sync_strategies import snapshot_layout
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.types import Architecture, LayerRange, NodeId
from tests.worlds.nodes import StageWorld, living, play, steps_of, until_held

LARGE = Architecture(64, 3, 2, 1, 128, 32_000, 8)
LAST = 2
UPLINK = 10e6 / 8
SENT_IN_A_STEP = 125_000  # a tenth of a second of that line
WORK_SECONDS = 0.9


class SlowTraining:
    """Every step needs something from the last stage's holder, over the same line as the copy."""

    def __init__(self, world: StageWorld) -> None:
        self._world = world
        self.times: list[float] = []

    async def train(self) -> None:
        """Until cancelled."""
        gradient = TensorPart(TensorSpec("gradient", "uint8", (SENT_IN_A_STEP,)), bytes(SENT_IN_A_STEP))
        await anyio.sleep(2)  # until all lines are there
        while True:
            await anyio.sleep(WORK_SECONDS)
            if all(self._world.holders(stage) for stage in range(3)):
                (holder, *_), (receiver, *_) = self._world.holders(LAST), self._world.holders(1)
                transport = self._world.network.network_of(holder.name).transport
                await transport.request(receiver.name, Frame("gradient", tensors=(gradient,)), timeout_seconds=60)
                for node in self._world.alive():
                    if node.stage is not None:
                        node.stage.step()
                self.times.append(anyio.current_time())


async def take_gradient(_sender: NodeId, _frame: Frame) -> Frame:
    await anyio.lowlevel.checkpoint()
    return Frame("gradient")


@pytest.mark.long
def test_a_large_stage_behind_a_slow_line_loses_no_more_than_is_told_and_trains_while_it_is_copied(
    tmp_path: Path,
) -> None:
    size = snapshot_layout(LARGE, LayerRange(LAST, LAST + 1)).file_bytes
    assert size > 40e6

    async def scenario(world: StageWorld) -> None:
        training = SlowTraining(world)
        world.train = training.train  # type: ignore[method-assign]
        async with living(world, [0, 1, 2, 0]) as (first, second, third, spare):
            await anyio.sleep(1)
            for node in (first, second, third, spare):
                world.network.set_uplink(node.name, UPLINK)
                transport = world.network.network_of(node.name).transport
                transport.serve("gradient", take_gradient, FrameLimits(max_body_bytes=SENT_IN_A_STEP))
            await anyio.sleep(240)
            age = third.stage.replica_status().copied_seconds  # type: ignore[union-attr]
            assert age is not None
            assert size / UPLINK < age < 5 * size / UPLINK  # half of the line is the training's
            pauses = [after - before for before, after in pairwise(training.times)]
            assert max(pauses) < 3
            assert sum(pauses) / len(pauses) < 2 * (WORK_SECONDS + SENT_IN_A_STEP / UPLINK)
            copy = first.swarm.reported_copies[LAST]
            assert copy.age_seconds is not None
            reported_age = copy.age_seconds + anyio.current_time() - copy.reported_at
            steps = steps_of(third)
            third.kill()
            assert await until_held(world, LAST) < 120
            (taker,) = world.holders(LAST)
            assert 0 < steps - taker.began_steps[-1] <= min(age, reported_age) + 1  # a step takes a second
            await anyio.sleep(60)
            assert steps_of(taker) > taker.began_steps[-1] + 20

    play(tmp_path, scenario, shape=LARGE, save_steps=1000)
