from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import anyio
import pytest
import torch
import trio
from torch import Tensor

from neuroshard.network import InMemoryNetwork, Link
from neuroshard.pipeline.driver import MICROBATCHES_OF_SESSION, InFlightLedger
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import (
    ClosedSessionError,
    MicrobatchKey,
    RefusedTensorError,
    StageError,
    StageGoneError,
    UnwantedTensorError,
)
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import (
    LocalStageClient,
    MicrobatchResult,
    RemoteStageClient,
    StageClient,
    StageClientOptions,
)
from neuroshard.pipeline.stage_protocol import StageAddress
from neuroshard.pipeline.stage_requests import StageRequestHandler
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.status.snapshot import NodeState
from neuroshard.training.parts import DriverParts, TrainerParts
from neuroshard.training.trainer import Trainer
from neuroshard.types import DataPosition, LayerRange, NodeId, ShardId
from tests.worlds.stages import (
    ARCHITECTURE,
    IDENTITY,
    PARAMETERS,
    SHARD_WINDOWS,
    MemoryFeed,
    make_replica,
    make_stage,
    make_trainer,
    state_becomes,
)

CUTS = (0, 1, 2, 3)
UNCLIPPED = replace(PARAMETERS, sequences_per_step=8, inner=replace(PARAMETERS.inner, max_grad_norm=1e9))
SPLIT = replace(UNCLIPPED, stage_count=3)


def trainers_of(
    compute: ComputeThread,
    folder: Path,
    in_flight: int,
    wrap: Callable[[int, LocalStageClient], StageClient] = lambda _, hop: hop,
) -> list[Trainer]:
    """Three trainers with a layer each; the first one drives."""
    every = []
    for number, (start, stop) in enumerate(pairwise(CUTS)):
        identity = replace(IDENTITY, layers=LayerRange(start, stop), node_id=NodeId(f"node {number}"))
        stage = make_stage(compute, folder / str(number), SPLIT, identity)
        every.append((make_replica(compute, stage, SPLIT, identity, number), stage))
    route = [
        wrap(number, LocalStageClient(part.service, NodeId(f"node {number}"))) for number, (part, _) in enumerate(every)
    ]
    feed = MemoryFeed(every[0][1].record.progress.position)
    driving = DriverParts(NodeId("node 0"), feed, FixedRouting(route), in_flight)
    return [Trainer(TrainerParts(SPLIT, (part,), None if part.index else driving)) for part, _ in every]


async def run_all(trainers: Sequence[Trainer], last_step: int) -> None:
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for trainer in trainers:
                tasks.start_soon(trainer.run, last_step)


def weights(trainers: Sequence[Trainer]) -> dict[str, Tensor]:
    return {
        name: parameter.detach()
        for trainer in trainers
        for name, parameter in trainer.parts.stages[0].executor.model.named_parameters()
    }


@pytest.mark.parametrize("in_flight", [1, 8])
def test_three_nodes_train_what_one_node_trains(compute: ComputeThread, tmp_path: Path, in_flight: int) -> None:
    lone = make_trainer(compute, make_stage(compute, tmp_path / "lone", UNCLIPPED), parameters=UNCLIPPED)
    trio.run(lone.run, 10)
    trainers = trainers_of(compute, tmp_path, in_flight)
    trio.run(run_all, trainers, 10)
    expected = weights([lone])
    for name, found in weights(trainers).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-5)
    for trainer in trainers:
        progress = trainer.record.progress
        assert (progress.steps, progress.sequences) == (10, 80)
        assert progress.tokens == 80 * ARCHITECTURE.sequence_length
        assert trainer.parts.stages[0].outer.state.outer_step == 2
        assert trainer.snapshot().state is NodeState.NOT_TRAINING
    first, middle, last = (trainer.record for trainer in trainers)
    assert first.progress.position == lone.record.progress.position
    assert first.progress.loss == pytest.approx(lone.record.progress.loss, rel=1e-4)
    assert last.progress.loss == pytest.approx(lone.record.progress.loss, rel=1e-4)
    assert middle.progress.loss is None
    assert middle.progress.position is None
    assert middle.history.snapshot() == ()
    assert len(first.history.snapshot()) == 10
    assert first.evaluations.evaluations[0].mean == pytest.approx(lone.record.evaluations.evaluations[0].mean, rel=1e-4)
    assert all(trainer.parts.stages[0].service.session_count == 0 for trainer in trainers)


def test_a_pipeline_that_was_stopped_goes_on_where_it_was(compute: ComputeThread, tmp_path: Path) -> None:
    whole = trainers_of(compute, tmp_path / "whole", 4)
    trio.run(run_all, whole, 10)
    for last_step in (3, 10):
        parts = trainers_of(compute, tmp_path / "parts", 4)
        trio.run(run_all, parts, last_step)
    assert parts[0].record.progress.position == whole[0].record.progress.position
    expected = weights(whole)
    for name, found in weights(parts).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("paused", [0, 1, 2])
def test_a_pause_of_any_node_holds_the_pipeline_and_loses_nothing(
    compute: ComputeThread, tmp_path: Path, paused: int
) -> None:
    whole, parts = trainers_of(compute, tmp_path / "whole", 2), trainers_of(compute, tmp_path / "paused", 2)
    trio.run(run_all, whole, 6)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_all, parts, 6)
            while parts[0].steps < 2:
                await anyio.sleep(0.001)
            parts[paused].pause()
            assert await parts[paused].wait_until_paused() is NodeState.PAUSED
            await anyio.sleep(0.05)
            steps = [trainer.steps for trainer in parts]
            await anyio.sleep(0.05)
            assert [trainer.steps for trainer in parts] == steps
            parts[paused].resume()

    trio.run(main)
    expected = weights(whole)
    for name, found in weights(parts).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-5)


def test_three_nodes_train_over_lossy_lines_what_one_node_trains(compute: ComputeThread, tmp_path: Path) -> None:
    lone = make_trainer(compute, make_stage(compute, tmp_path / "lone", UNCLIPPED), parameters=UNCLIPPED)
    trio.run(lone.run, 4)
    trainers = list[Trainer]()

    async def main() -> None:
        with InMemoryNetwork(Random(3), default_link=Link(loss=0.05)) as network:
            transport = network.join(NodeId("node 0"))

            def remote(number: int, hop: LocalStageClient) -> StageClient:
                if number == 0:
                    return hop
                layers = LayerRange(CUTS[number], CUTS[number + 1])
                stage = StageAddress(IDENTITY.run_id, layers, SPLIT.version)
                shapes = StageShapes.for_layers(ARCHITECTURE, layers, SPLIT.batch_size)
                endpoint = StageRequestHandler(hop.service, stage, shapes)
                endpoint.serve(network.join(NodeId(f"node {number}")))
                return RemoteStageClient(
                    transport, NodeId(f"node {number}"), stage, shapes, StageClientOptions(timeout_seconds=0.3)
                )

            trainers.extend(trainers_of(compute, tmp_path, 3, remote))
            await run_all(trainers, 4)

    trio.run(main)
    expected = weights([lone])
    for name, found in weights(trainers).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-5)
    assert all(trainer.record.progress.sequences == 32 for trainer in trainers)
    assert trainers[0].record.progress.position == lone.record.progress.position


@pytest.mark.parametrize("spoilt", [1, 2])
def test_a_stage_with_spoilt_weights_goes_back_to_its_checkpoint_and_pauses(
    compute: ComputeThread, tmp_path: Path, spoilt: int
) -> None:
    trio.run(run_all, trainers_of(compute, tmp_path, 2), 3)
    trainers = trainers_of(compute, tmp_path, 2)
    trainer = trainers[spoilt]
    good = weights([trainer])

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_all, trainers, 5)
            name, parameter = next(iter(trainer.parts.stages[0].executor.model.named_parameters()))
            await compute.run(lambda: parameter.data.fill_(float("nan")))
            await state_becomes(trainer, NodeState.PAUSED)
            assert "step 3 was restored" in trainer.snapshot().reason
            assert torch.equal(weights([trainer])[name], good[name])
            trainer.resume()

    trio.run(main)
    assert [trainer.steps for trainer in trainers] == [5, 5, 5]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(trainers).values())


class FailingHop(LocalStageClient):
    """Raises an error instead of doing the forward pass of certain microbatches, once each."""

    def __init__(self, hop: LocalStageClient, errors: dict[int, Exception]) -> None:
        super().__init__(hop.service, hop.node_id)
        self._hop = hop
        self._errors = errors
        self.seen = list[MicrobatchKey]()

    async def forward(self, key: MicrobatchKey, inputs: Tensor, _ids: Tensor | None = None) -> Tensor:
        self.seen.append(key)
        error = self._errors.pop(len(self.seen), None)
        if error is not None:
            raise error
        return await self._hop.forward(key, inputs)

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        return await self._hop.backward(key, gradient)

    async def infer(self, inputs: Tensor, _ids: Tensor | None = None) -> Tensor:
        return await self._hop.infer(inputs)

    async def close(self, driver: NodeId, session: int) -> None:
        await self._hop.close(driver, session)


def failing(number: int, errors: dict[int, Exception]) -> Callable[[int, LocalStageClient], StageClient]:
    return lambda index, hop: FailingHop(hop, errors) if index == number else hop


def test_a_stage_that_is_gone_for_a_while_gets_the_microbatch_again(compute: ComputeThread, tmp_path: Path) -> None:
    whole = trainers_of(compute, tmp_path / "whole", 2)
    trio.run(run_all, whole, 4)
    errors: dict[int, Exception] = {3: StageGoneError("no answer"), 7: StageGoneError("no answer")}
    trainers = trainers_of(compute, tmp_path / "failing", 2, failing(1, errors))
    trio.run(run_all, trainers, 4)
    assert not errors
    expected = weights(whole)
    for name, found in weights(trainers).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-5)
    assert all(trainer.record.progress.sequences == 32 for trainer in trainers)


def test_data_that_no_stage_can_take_are_an_error_and_not_left_out(compute: ComputeThread, tmp_path: Path) -> None:
    trainers = trainers_of(compute, tmp_path, 1, failing(0, {2: RefusedTensorError("ids")}))
    with pytest.raises(BaseExceptionGroup) as group:
        trio.run(run_all, trainers, 4)
    assert group.group_contains(RefusedTensorError)


class LoudHop(FailingHop):
    """Gives gradients that are numbers with squares that are none in fp32."""

    def __init__(self, hop: LocalStageClient, loud: set[int]) -> None:
        super().__init__(hop, {})
        self._loud = loud

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        found = await super().backward(key, gradient)
        if found is None or key.microbatch not in self._loud:
            return found
        self._loud.discard(key.microbatch)
        return torch.full_like(found, 1e30)


def test_gradients_that_the_own_stage_refuses_cost_their_microbatch_only(
    compute: ComputeThread, tmp_path: Path
) -> None:
    loud = {1, 3}
    trainers = trainers_of(compute, tmp_path, 1, lambda i, hop: LoudHop(hop, loud) if i == 1 else hop)

    async def main() -> None:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as others:
                for trainer in trainers[1:]:
                    others.start_soon(trainer.run, 9)
                await trainers[0].run(3)
                others.cancel_scope.cancel()

    trio.run(main)
    assert not loud
    assert trainers[0].record.progress.sequences == 24


@pytest.mark.parametrize("error", [ClosedSessionError("idle"), UnwantedTensorError("refused by two nodes")])
def test_a_session_that_is_closed_or_a_tensor_that_nobody_takes_costs_its_microbatch_only(
    compute: ComputeThread, tmp_path: Path, error: StageError
) -> None:
    trainers = trainers_of(compute, tmp_path, 1, failing(0, {2: error}))
    trio.run(run_all, trainers, 2)
    flow = trainers[0].snapshot().flow
    assert flow is not None
    assert flow.given_up == 1
    position = trainers[0].record.progress.position
    assert position is not None
    assert position.window == 2 * 8 + 2  # two steps, and the microbatch that was given up
    assert trainers[0].record.progress.sequences == 16


def test_sessions_are_short_and_rise(compute: ComputeThread, tmp_path: Path) -> None:
    hop = None

    def watch(index: int, local: LocalStageClient) -> StageClient:
        nonlocal hop
        if index != 0:
            return local
        hop = FailingHop(local, {})
        return hop

    trainers = trainers_of(compute, tmp_path, 1, watch)
    trio.run(run_all, trainers, 6)
    assert isinstance(hop, FailingHop)
    numbers = [(key.session, key.microbatch) for key in hop.seen]
    assert numbers == sorted(set(numbers))
    assert {session for session, _ in numbers} == {1, 2, 3}
    assert max(microbatch for _, microbatch in numbers) == MICROBATCHES_OF_SESSION


def key(number: int, driver: str = "node") -> MicrobatchKey:
    return MicrobatchKey(NodeId(driver), 1, number)


def at(window: int) -> DataPosition:
    return DataPosition(0, ShardId(0), window)


def test_the_position_waits_for_the_oldest_microbatch_under_way() -> None:
    ledger = InFlightLedger()
    for number in range(1, 5):
        ledger.sent(key(number), at(10 * number))
        ledger.measured(key(number), MicrobatchResult(torch.tensor(3.0 * number), 2))
    first = ledger.stepped([key(2), key(9, "other"), key(3)])
    assert first.position is None
    assert first.mean_loss() == pytest.approx((6 + 9) / 4)
    assert ledger.stepped([key(1)]).position == at(30)
    assert ledger.stepped([key(7)]).mean_loss() is None
    ledger.sent(key(5), at(50))
    ledger.dropped(key(4))
    assert ledger.stepped([]).position == at(40)
    assert ledger.stepped([key(5)]).position == at(50)


def test_batches_are_taken_only_when_the_stage_wants_them(compute: ComputeThread, tmp_path: Path) -> None:
    taken = list[tuple[int, int]]()

    class WatchedFeed(MemoryFeed):
        async def next_batch(self, sequences: int, *, step: int | None = None):
            taken.append((trainer.steps, sequences))
            assert step == trainer.steps + 1
            return await super().next_batch(sequences, step=step)

    uneven = replace(PARAMETERS, sequences_per_step=5)
    trainer = make_trainer(compute, make_stage(compute, tmp_path, uneven), WatchedFeed(), uneven)
    trio.run(partial(trainer.run, 3))
    assert taken == [(step, sequences) for step in range(3) for sequences in (2, 2, 1)]
    assert SHARD_WINDOWS > 15
