"""A trainer that holds no stage drives those of others, and counts as its steps what it drove."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from random import Random

import anyio
import pytest
import torch
import trio
from trio.testing import MockClock

from neuroshard.errors import NotReadyError
from neuroshard.network import InMemoryNetwork
from neuroshard.pipeline.chain_server import Neighbours
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import LocalStageClient, RemoteStageClient, StageClientOptions
from neuroshard.pipeline.stage_protocol import StageAddress
from neuroshard.pipeline.stage_requests import StageRequestHandler, StageRequestHandlers
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.status.snapshot import NodeState
from neuroshard.training.parts import DriverParts, TrainerParts
from neuroshard.training.trainer import Trainer
from neuroshard.types import DataPosition, LayerRange, NodeId, ShardId
from tests.worlds.stages import ARCHITECTURE, IDENTITY, SHARD_WINDOWS, MemoryFeed, key, make_stage, make_trainer
from tests.worlds.trainers import CUTS, SPLIT, WHOLE, make_stages, parts_of, weights

HOLDER = NodeId("holder")
STAGES = [StageAddress(IDENTITY.run_id, LayerRange(*cut), SPLIT.version) for cut in pairwise(CUTS)]
SHAPES = [StageShapes.for_layers(ARCHITECTURE, stage.layers, SPLIT.batch_size) for stage in STAGES]


class Swarm:
    """One node that holds all stages and drives nothing, reached over an in-memory network."""

    def __init__(self, compute: ComputeThread, folder: Path) -> None:
        self.network = InMemoryNetwork(Random(5))
        stages = make_stages(compute, folder)
        self.holder = Trainer(TrainerParts(SPLIT, parts_of(compute, stages)))
        endpoints, transport = StageRequestHandlers(SHAPES), self.network.join(HOLDER)
        neighbours = Neighbours(transport, lambda node, _layers: node == HOLDER)
        for part, stage, shapes in zip(self.holder.parts.stages, STAGES, SHAPES, strict=True):
            endpoints.add(StageRequestHandler(part.service, stage, shapes, neighbours=neighbours))
        endpoints.serve(transport)

    def trainer(
        self,
        name: str = "trainer",
        *,
        first_shard: int = 0,
        in_flight: int = 3,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> Trainer:
        """A driver without parameters."""
        node_id = NodeId(name)
        transport = self.network.join(node_id)
        hops = [
            RemoteStageClient(transport, HOLDER, stage, shapes, StageClientOptions(timeout_seconds=5))
            for stage, shapes in zip(STAGES, SHAPES, strict=True)
        ]
        feed = MemoryFeed(DataPosition(first_shard, ShardId(first_shard), 0))
        driving = DriverParts(node_id, feed, FixedRouting(hops), in_flight)
        return Trainer(TrainerParts(SPLIT, (), driving), monotonic=monotonic)


async def steps_reach(trainer: Trainer, steps: int) -> None:
    while trainer.steps < steps:
        await anyio.sleep(0.001)


async def nothing() -> None:
    """No scenario."""


def play(
    swarm: Swarm,
    *trainers: Trainer,
    scenario: Callable[[], Awaitable[None]] = nothing,
    last_step: int | None = None,
    clock: MockClock | None = None,
) -> None:
    """Run all of them while a scenario plays; the holder ends when the trainers have."""

    async def main() -> None:
        with anyio.fail_after(600 if clock else 30):
            async with anyio.create_task_group() as holding:
                holding.start_soon(swarm.holder.run)
                async with anyio.create_task_group() as driving:
                    for trainer in trainers:
                        driving.start_soon(trainer.run, last_step)
                    await scenario()
                swarm.holder.stop()

    with ExitStack() as stack:
        stack.enter_context(swarm.network)
        trio.run(main, clock=clock)


def test_it_drives_what_a_lone_node_trains(compute: ComputeThread, tmp_path: Path) -> None:
    lone = make_trainer(compute, make_stage(compute, tmp_path / "lone", WHOLE), parameters=WHOLE)
    trio.run(lone.run, 6)
    swarm = Swarm(compute, tmp_path)
    trainer = swarm.trainer(in_flight=1)
    play(swarm, trainer, last_step=6)
    assert trainer.steps == 6
    assert {record.progress.steps for record in swarm.holder.records} == {6}
    expected = weights(lone)
    for name, found in weights(swarm.holder).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-5)
    assert trainer.record.progress.position == lone.record.progress.position
    curves = [[point.loss for point in one.snapshot().history] for one in (lone, trainer)]
    assert curves[1] == pytest.approx(curves[0], abs=1e-5)
    first, other = (one.snapshot().training.held_out[0] for one in (lone, trainer))
    assert other.loss == pytest.approx(first.loss, abs=1e-5)


def test_it_says_that_it_holds_nothing(compute: ComputeThread, tmp_path: Path) -> None:
    swarm = Swarm(compute, tmp_path)
    trainer = swarm.trainer()

    async def scenario() -> None:
        await steps_reach(trainer, 1)
        with pytest.raises(NotReadyError):
            await trainer.save_now()
        trainer.stop()

    play(swarm, trainer, scenario=scenario)
    snapshot = trainer.snapshot()
    assert snapshot.state is NodeState.NOT_TRAINING
    assert snapshot.stages == ()
    assert "holds no layers" in snapshot.diloco.explanation
    assert "nothing" in snapshot.checkpoints.could_lose
    assert not trainer.last_save_failed


def test_several_of_them_feed_one_swarm(compute: ComputeThread, tmp_path: Path) -> None:
    swarm = Swarm(compute, tmp_path)
    trainers = [swarm.trainer(f"trainer {number}", first_shard=10 * number) for number in range(3)]

    async def scenario() -> None:
        for trainer in trainers:
            await steps_reach(trainer, 3)
        for trainer in trainers:
            trainer.stop()

    play(swarm, *trainers, scenario=scenario)
    driven = sum(trainer.record.progress.sequences for trainer in trainers)
    for record, held in zip(swarm.holder.records, swarm.holder.parts.stages, strict=True):
        assert record.progress.sequences + SPLIT.sequences_per_step - driven >= 0
        assert record.progress.sequences == 8 * record.progress.steps
        assert held.service.session_count == 0
        assert held.service.counts.given_up == 0


def test_a_pause_ends_what_is_under_way_and_takes_no_more_data(compute: ComputeThread, tmp_path: Path) -> None:
    swarm = Swarm(compute, tmp_path)
    trainer = swarm.trainer()

    def counts() -> list[int]:
        return [held.service.counts.microbatches for held in swarm.holder.parts.stages]

    async def scenario() -> None:
        for _ in range(3):
            await steps_reach(trainer, trainer.steps + 1)
            trainer.pause()
            assert await trainer.wait_until_paused() is NodeState.PAUSED
            while len(set(counts())) > 1:  # on a busy machine the stages end after the pause has begun
                await anyio.sleep(0.001)
            before = counts()
            await anyio.sleep(0.05)
            assert counts() == before
            trainer.resume()
            assert await trainer.wait_until_resumed() is NodeState.TRAINING
        trainer.stop()

    play(swarm, trainer, scenario=scenario)
    position, progress = trainer.record.progress.position, trainer.record.progress
    assert position is not None
    assert position.order * SHARD_WINDOWS + position.window == progress.sequences  # nothing was left out


def test_a_pause_does_not_wait_for_ever_for_stages_that_do_not_answer(compute: ComputeThread, tmp_path: Path) -> None:
    swarm = Swarm(compute, tmp_path)
    trainer = swarm.trainer()

    async def scenario() -> None:
        await steps_reach(trainer, 1)
        swarm.holder.pause()
        await swarm.holder.wait_until_paused()
        trainer.pause()
        assert await trainer.wait_until_paused() is NodeState.PAUSED
        swarm.holder.resume()
        trainer.resume()
        await steps_reach(trainer, trainer.steps + 1)
        trainer.stop()

    play(swarm, trainer, scenario=scenario, clock=MockClock(rate=50))


@pytest.mark.parametrize(("abandons_work", "least", "most"), [(False, 9.0, 30.0), (True, 0.4, 9.0)])
def test_an_end_waits_for_open_microbatches_unless_they_cannot_end(
    compute: ComputeThread, tmp_path: Path, *, abandons_work: bool, least: float, most: float
) -> None:
    swarm = Swarm(compute, tmp_path)

    async def main() -> None:
        first = swarm.holder.parts.stages[0].service
        async with anyio.create_task_group() as holding:
            holding.start_soon(swarm.holder.run)
            while not first.intake.is_admitting:
                await anyio.sleep(0.01)
            await first.forward(key(1), torch.zeros((1, ARCHITECTURE.sequence_length), dtype=torch.int64))
            swarm.holder.stop(abandons_work=abandons_work)
            began = trio.current_time()
        assert least < trio.current_time() - began < most
        assert first.counts.given_up == 1

    with ExitStack() as stack:
        stack.enter_context(swarm.network)
        trio.run(main, clock=MockClock(rate=20))


@pytest.mark.parametrize(("abandons_work", "least", "most"), [(False, 9.0, 30.0), (True, 0.0, 9.0)])
def test_a_driver_waits_for_its_microbatches_unless_they_cannot_end(
    compute: ComputeThread, tmp_path: Path, *, abandons_work: bool, least: float, most: float
) -> None:
    swarm = Swarm(compute, tmp_path)
    trainer, times = swarm.trainer(), list[float]()

    async def drive() -> None:
        await trainer.run()
        times.append(trio.current_time())
        swarm.holder.resume()

    async def scenario() -> None:
        async with anyio.create_task_group() as driving:
            driving.start_soon(drive)
            await steps_reach(trainer, 1)
            swarm.holder.pause()
            await swarm.holder.wait_until_paused()
            times.append(trio.current_time())
            trainer.stop(abandons_work=abandons_work)

    play(swarm, scenario=scenario, clock=MockClock(rate=20))
    assert least < times[1] - times[0] < most


def test_it_evaluates_while_nothing_is_under_way(compute: ComputeThread, tmp_path: Path) -> None:
    swarm = Swarm(compute, tmp_path)
    ticks = iter(range(10**9))
    trainer = swarm.trainer(monotonic=lambda: 10.0 * next(ticks))
    play(swarm, trainer, last_step=5)
    evaluated = [point.step for point in trainer.snapshot().training.held_out]
    assert evaluated[0] == 0
    assert len(evaluated) > 2


def test_a_trainer_needs_something_to_do() -> None:
    with pytest.raises(ValueError, match="needs a stage"):
        Trainer(TrainerParts(SPLIT, ()))


def test_a_node_without_the_first_stage_does_not_drive(compute: ComputeThread, tmp_path: Path) -> None:
    stages = make_stages(compute, tmp_path)
    parts = parts_of(compute, stages)
    driving = DriverParts(
        NodeId("node"), MemoryFeed(), FixedRouting([LocalStageClient(part.service) for part in parts])
    )
    with pytest.raises(ValueError, match="first one"):
        Trainer(TrainerParts(SPLIT, parts[1:], driving))
