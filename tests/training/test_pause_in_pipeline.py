"""A pause in a pipeline holds at once, whatever the other stages do: what is open is done elsewhere, or afterwards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
import torch
import trio
from test_driver import SPLIT, run_all, trainers_of, weights
from torch import Tensor
from trio.testing import MockClock, wait_all_tasks_blocked

from neuroshard.network import InMemoryNetwork, ScoreReason
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import MicrobatchKey, SpoiltMicrobatchError, StagePausedError
from neuroshard.pipeline.microbatch_call import PATIENCE_SECONDS, MicrobatchCall
from neuroshard.pipeline.routing import RETRY_SECONDS, ChoiceInTurn, SwarmRouting
from neuroshard.pipeline.sessions import Accumulated
from neuroshard.pipeline.stage_client import LocalStageClient, RemoteStageClient, StageClient
from neuroshard.pipeline.stage_protocol import StageAddress
from neuroshard.pipeline.stage_requests import StageRequestHandler
from neuroshard.pipeline.stage_server import DrainReason, StageServer
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.status.snapshot import NodeState
from neuroshard.training.trainer import Trainer
from neuroshard.types import LayerRange, NodeId, RunId
from tests.worlds.stages import ARCHITECTURE, INPUTS, LABELS, ComputeInPlace, chain_of, gradients, key

CUTS = (0, 1, 2, 3)
STAGES = tuple(StageAddress(RunId("1" * 64), LayerRange(a, b), 1) for a, b in pairwise(CUTS))
SHAPES = tuple(StageShapes.for_layers(ARCHITECTURE, stage.layers, 4) for stage in STAGES)
DRIVER, PAUSED, OTHER, FIRST, LAST = map(NodeId, ("driver", "paused", "other", "first", "last"))
HOLDERS = ((FIRST,), (PAUSED, OTHER), (LAST,))
SOON_SECONDS = 15.0  # of a busy machine; whoever waits for others would need twice as long


class Held(LocalStageClient):
    """A last stage whose first losses wait for a sign."""

    def __init__(self, hop: LocalStageClient, reached: anyio.Event, sign: anyio.Event) -> None:
        super().__init__(hop.service, hop.node_id)
        self._reached = reached
        self._sign = sign

    async def loss(
        self, key: MicrobatchKey, inputs: Tensor, labels: Tensor, _ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self._reached.set()
        await self._sign.wait()
        return await super().loss(key, inputs, labels)


@pytest.mark.parametrize("paused", [0, 1, 2])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_it_does_not_wait_for_the_stages_of_others(
    compute: ComputeThread, tmp_path: Path, paused: int, in_flight: int
) -> None:
    whole = trainers_of(compute, tmp_path / "whole", 1)
    trio.run(run_all, whole, 4)
    trainers = []

    async def main() -> None:
        reached, sign = anyio.Event(), anyio.Event()

        def held(number: int, hop: LocalStageClient) -> StageClient:
            return Held(hop, reached, sign) if number == 2 else hop

        trainers.extend(trainers_of(compute, tmp_path / "paused", in_flight, held))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_all, trainers, 4)
            await reached.wait()
            with anyio.fail_after(SOON_SECONDS):
                trainers[paused].pause()
                assert await trainers[paused].wait_until_paused() is NodeState.PAUSED
            (stage,) = trainers[paused].parts.stages
            assert stage.service.intake.is_idle
            assert (stage.service.counts.given_up > 0) is (paused < 2)
            trainers[paused].resume()
            sign.set()

    trio.run(main)
    for name, found in weights(trainers).items():
        torch.testing.assert_close(found, weights(whole)[name], rtol=1e-3, atol=1e-5)


class LateBackward(LocalStageClient):
    """A first stage to which the backward passes of certain microbatches come late."""

    def __init__(self, hop: LocalStageClient, late: set[int], sign: anyio.Event) -> None:
        super().__init__(hop.service, hop.node_id)
        self._late = late
        self._sign = sign

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        if key.microbatch in self._late:
            await self._sign.wait()
        return await super().backward(key, gradient)


def test_microbatches_that_the_first_stage_gave_up_have_the_first_claim_to_its_room(tmp_path: Path) -> None:
    """A step has four microbatches, three of which are in flight in the pause. Two of these come back last."""
    compute, trainers = ComputeInPlace(), list[Trainer]()
    read, steps = list[int](), list[list[tuple[int, ...]]]()

    async def main() -> None:
        reached, sign, late = anyio.Event(), anyio.Event(), anyio.Event()

        def wrapped(number: int, hop: LocalStageClient) -> StageClient:
            match number:
                case 0:
                    return LateBackward(hop, {2, 3}, late)
                case 1:
                    return hop
                case _:
                    return Held(hop, reached, sign)

        trainers.extend(trainers_of(compute, tmp_path, 3, wrapped))
        first = trainers[0]
        steps.extend(steps_of(trainer) for trainer in trainers)
        feed = first.parts.driving.feed
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_all, trainers, 2)
            await reached.wait()
            await wait_all_tasks_blocked()
            first.pause()
            await first.wait_until_paused()
            assert first.parts.stages[0].service.counts.given_up == 3
            first.resume()
            sign.set()
            while trainers[2].steps < 1:
                await anyio.sleep(1)
            read.append(feed.position.window)
            assert first.steps == 0
            late.set()

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert read == [SPLIT.sequences_per_step]
    assert [sorted(step) for step in steps[0]] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert [[sorted(step) for step in taken] for taken in steps[1:]] == [[[1, 2, 3, 4], [5, 6, 7, 8]]] * 2


def steps_of(trainer: Trainer) -> list[tuple[int, ...]]:
    """Numbers of the microbatches of each step that a trainer's stage makes from now on."""
    (stage,), steps = trainer.parts.stages, list[tuple[int, ...]]()
    intake = stage.service.intake
    take = intake.take

    def noted() -> Accumulated:
        taken = take()
        if taken.keys:  # a pause empties the intake, too
            steps.append(tuple(key.microbatch for key in taken.keys))
        return taken

    intake.take = noted  # type: ignore[method-assign]
    return steps


def test_another_replica_takes_over_at_once_and_nobody_is_blamed(compute: ComputeThread) -> None:
    services = dict(zip((FIRST, PAUSED, LAST), chain_of(compute, CUTS), strict=True))
    services[OTHER] = chain_of(compute, CUTS)[1]
    reports = list[tuple[NodeId, ScoreReason]]()
    run_of = list[tuple[MicrobatchCall, SwarmRouting]]()

    async def main() -> None:
        reached, sign = anyio.Event(), anyio.Event()
        with InMemoryNetwork() as network:
            for number, holders in enumerate(HOLDERS):
                for node in holders:
                    StageRequestHandler(services[node], STAGES[number], SHAPES[number]).serve(network.join(node))
            line = network.join(DRIVER)

            def connect(number: int, node: NodeId) -> StageClient:
                if node == LAST:
                    return Held(LocalStageClient(services[LAST], LAST), reached, sign)
                return RemoteStageClient(
                    line, node, STAGES[number], SHAPES[number], report=lambda *told: reports.append(told)
                )

            routing = SwarmRouting(3, lambda number: HOLDERS[number], connect, ChoiceInTurn(DRIVER))
            run = MicrobatchCall(routing, key(1), INPUTS[:4], LABELS[:4])
            run_of.append((run, routing))
            with anyio.fail_after(SOON_SECONDS):  # and not after the patience with a busy stage
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(run.run)
                    await reached.wait()
                    await services[PAUSED].drain("The node is paused.", DrainReason.PAUSE)
                    await services[PAUSED].suspend()
                    sign.set()

    trio.run(main)
    ((run, routing),) = run_of
    assert [hop.node_id for hop in run.hops if hop is not None] == [FIRST, OTHER, LAST]
    assert [(one.before.node_id, one.after.node_id) for one in run.replacements] == [(PAUSED, OTHER)]
    assert {reason for _, reason in reports} == {ScoreReason.GOOD_ANSWER}
    assert routing.failures == 0
    assert gradients([services[PAUSED]]) == {}
    expected = whole_gradients(compute)
    for name, gradient in gradients([services[node] for node in (FIRST, OTHER, LAST)]).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)


def whole_gradients(compute: ComputeThread) -> dict[str, Tensor]:
    """Of the same microbatch in one stage."""
    (whole,) = chain_of(compute, (0, 3))
    trio.run(whole.loss, key(1), INPUTS[:4], LABELS[:4])
    return gradients([whole])


class Resting(LocalStageClient):
    """Paused for a while; then it ends the microbatch."""

    def __init__(self, service: StageServer, until: float, asked: list[float]) -> None:
        super().__init__(service, PAUSED)
        self._until = until
        self._asked = asked

    async def forward(self, key: MicrobatchKey, inputs: Tensor, _ids: Tensor | None = None) -> Tensor:
        await anyio.lowlevel.checkpoint()
        self._asked.append(anyio.current_time())
        if anyio.current_time() < self._until:
            raise StagePausedError("The node is paused.")
        raise SpoiltMicrobatchError("This is the end.")


def test_the_only_holder_of_a_stage_is_waited_for_asked_seldom_and_no_failure(compute: ComputeThread) -> None:
    (service, last), asked = chain_of(compute, (0, 1, 3)), list[float]()
    until = PATIENCE_SECONDS + 60.0
    first, second = Resting(service, until, asked), LocalStageClient(last, LAST)
    routing = SwarmRouting(
        2,
        lambda stage: [LAST] if stage else [PAUSED],
        lambda stage, _node: second if stage else first,
        ChoiceInTurn(DRIVER),
    )
    obstacles = list[str | None]()

    async def drive() -> None:
        with pytest.raises(SpoiltMicrobatchError):
            await MicrobatchCall(routing, key(1), INPUTS[:1], LABELS[:1]).run()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive)
            with anyio.fail_after(until):  # the virtual clock does not wait for what other threads compute
                while routing.obstacle is None:
                    await anyio.sleep(1)
            obstacles.append(routing.obstacle)

    play(main)
    assert until <= asked[-1] <= until + 2 * RETRY_SECONDS
    assert len(asked) <= until / RETRY_SECONDS + 2
    assert routing.failures == 0
    assert obstacles == ["All nodes that hold a stage are paused or fail; this node tries them again."]


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    """Under a virtual clock that never waits."""
    trio.run(scenario, clock=MockClock(autojump_threshold=0))
