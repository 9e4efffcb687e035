"""A node dies before, during and after each message of a microbatch, and another one with equal weights takes over."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import anyio
import pytest
import torch
import trio
from test_driver import run_all, trainers_of, weights
from torch import Tensor
from trio.testing import MockClock

from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import InMemoryNetwork, PeerUnreachableError
from neuroshard.network.transport import Transport
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.microbatch import MicrobatchKey, StageGoneError
from neuroshard.pipeline.microbatch_call import MicrobatchCall
from neuroshard.pipeline.routing import ChoiceInTurn, SwarmRouting
from neuroshard.pipeline.stage_client import LocalStageClient, RemoteStageClient
from neuroshard.pipeline.stage_protocol import Operation, StageAddress
from neuroshard.pipeline.stage_requests import StageRequestHandler
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import LayerRange, NodeId, RunId
from tests.worlds.stages import ARCHITECTURE, INPUTS, LABELS, ComputeInPlace, chain_of, gradients, key

CUTS = (0, 1, 2, 3)
STAGES = tuple(StageAddress(RunId("1" * 64), LayerRange(a, b), 1) for a, b in pairwise(CUTS))
SHAPES = tuple(StageShapes.for_layers(ARCHITECTURE, stage.layers, 4) for stage in STAGES)
DRIVER = NodeId("driver")
ROWS = slice(0, 4)
MESSAGES = [
    (0, Operation.FORWARD),
    (1, Operation.FORWARD),
    (2, Operation.LOSS),
    (1, Operation.BACKWARD),
    (0, Operation.BACKWARD),
]


def name_of(stage: int, replica: int) -> NodeId:
    return NodeId(f"stage {stage} {'ab'[replica]}")


class LineToTheDying:
    """The driver's transport. One peer dies with a message: before it comes, with the answer on its way, after it."""

    def __init__(self, transport: Transport, victim: NodeId, operation: Operation, when: str) -> None:
        self._transport = transport
        self._victim = victim
        self._operation = operation
        self._when = when
        self.is_dead = False

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        if peer != self._victim:
            return await self._transport.request(peer, frame, reply=reply, timeout_seconds=timeout_seconds)
        if self.is_dead:
            raise PeerUnreachableError("It is dead.")
        self.is_dead = frame.kind == self._operation.value
        if self.is_dead and self._when == "before":
            raise PeerUnreachableError("It died.")
        answer = await self._transport.request(peer, frame, reply=reply, timeout_seconds=timeout_seconds)
        if self.is_dead and self._when == "during":
            raise PeerUnreachableError("It died when its work was done.")
        return answer


@pytest.mark.parametrize("when", ["before", "during", "after"])
@pytest.mark.parametrize(("stage", "operation"), MESSAGES)
def test_the_law_holds_whatever_message_a_hop_dies_with(
    compute: ComputeThread, stage: int, operation: Operation, when: str
) -> None:
    services = {
        name_of(number, replica): service
        for replica in range(2)
        for number, service in enumerate(chain_of(compute, CUTS))
    }
    run_of = list[MicrobatchCall]()

    async def main() -> float:
        with InMemoryNetwork() as network:
            for node, service in services.items():
                number = int(str(node)[6])
                endpoint = StageRequestHandler(service, STAGES[number], SHAPES[number], root=lambda: "ab")
                endpoint.serve(network.join(node))
            line = LineToTheDying(network.join(DRIVER), name_of(stage, 0), operation, when)
            routing = SwarmRouting(
                len(STAGES),
                lambda number: [name_of(number, replica) for replica in range(2)],
                lambda number, node: RemoteStageClient(line, node, STAGES[number], SHAPES[number]),
                ChoiceInTurn(DRIVER),
            )
            run = MicrobatchCall(routing, key(1), INPUTS[ROWS], LABELS[ROWS])
            run_of.append(run)
            with anyio.fail_after(20):
                result = await run.run()
            assert line.is_dead
            return result.loss_sum.item()

    found_loss = trio.run(main)
    (run,) = run_of
    whole = chain_of(compute, (0, 3))
    loss, _ = trio.run(whole[0].loss, key(1), INPUTS[ROWS], LABELS[ROWS])
    assert found_loss == pytest.approx(loss.item(), rel=1e-5)
    check_ledger(run, services, stage, is_needed_again=(operation, when) not in NEVER_MISSED)
    expected = gradients(whole)
    found = gradients([services[hop.node_id] for hop in run.hops if hop is not None])
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5)


NEVER_MISSED = {(Operation.LOSS, "after"), (Operation.BACKWARD, "after")}  # nothing more is asked of it


def check_ledger(
    run: MicrobatchCall, services: dict[NodeId, StageServer], stage: int, *, is_needed_again: bool
) -> None:
    """One hop a stage has the microbatch in the end, and nobody but the dead one's successor did anything again."""
    named: Sequence[NodeId] = [hop.node_id for hop in run.hops if hop is not None]
    assert named == [name_of(number, int(is_needed_again and number == stage)) for number in range(len(STAGES))]
    for node in named:
        assert services[node].counts.microbatches == 1
        assert services[node].counts.repeated == 0
    assert run.failures == int(is_needed_again)
    assert all(one.is_exact and one.stage == stage for one in run.replacements)


class AwayHop(LocalStageClient):
    """Cannot be reached for a minute, and every request takes a while to find that out."""

    def __init__(self, hop: LocalStageClient, gone_from: float) -> None:
        super().__init__(hop.service)
        self._gone_from = gone_from
        self.refused = 0

    async def loss(
        self, key: MicrobatchKey, inputs: Tensor, labels: Tensor, _ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if self._gone_from <= anyio.current_time() < self._gone_from + 60:
            self.refused += 1
            await anyio.sleep(10)
            raise StageGoneError("No Validator can be reached.")
        return await super().loss(key, inputs, labels)


def test_when_all_validators_are_gone_for_a_minute_training_goes_on_and_counts_nothing_twice(
    compute: ComputeThread, tmp_path: Path
) -> None:
    undisturbed = trainers_of(compute, tmp_path / "undisturbed", 4)
    trio.run(run_all, undisturbed, 3)
    away = list[AwayHop]()

    def wrapped(number: int, hop: LocalStageClient) -> LocalStageClient:
        if number != 2:
            return hop
        away.append(AwayHop(hop, 0.0))
        return away[0]

    trainers = trainers_of(ComputeInPlace(), tmp_path / "away", 4, wrapped)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            for trainer in trainers:
                tasks.start_soon(trainer.run, 3)
        assert anyio.current_time() >= 60

    trio.run(main, clock=MockClock(autojump_threshold=0))
    assert away[0].refused >= 4
    for trainer in trainers:
        assert (trainer.steps, trainer.record.progress.sequences) == (3, 24)
    assert trainers[0].record.progress.position == undisturbed[0].record.progress.position
    expected = weights(undisturbed)
    for name, found in weights(trainers).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-5)
