"""What a peer may answer to a loss or to a backward pass, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import anyio
import pytest
import torch
import trio
from torch import Tensor

from neuroshard.messages import Frame
from neuroshard.network import InMemoryNetwork, ScoreReason
from neuroshard.pipeline.microbatch import Retry, StageGoneError
from neuroshard.pipeline.stage_client import RemoteStageClient
from neuroshard.pipeline.stage_protocol import (
    Operation,
    StageAddress,
    StageAnswer,
    StageRequest,
    answer_frame,
    read_request,
    request_limits,
)
from neuroshard.pipeline.tensor_checks import LARGEST_RECEIVED, StageShapes
from neuroshard.types import MAX_LOSS, LayerRange, NodeId, RunId
from tests.worlds.stages import ARCHITECTURE, HIDDEN, LABELS, activations, key

LAST = StageAddress(RunId("1" * 64), LayerRange(2, ARCHITECTURE.layer_count), 1)
SHAPES = StageShapes.for_layers(ARCHITECTURE, LAST.layers, 4)
LIAR = NodeId("liar")
TOKENS = LABELS[:2].numel()
GOOD = StageAnswer(gradient=activations(2), loss_sum=1.0)
Answers = Callable[[StageRequest], Frame]


def told(answer: StageAnswer) -> Answers:
    return lambda request: answer_frame(request, answer)


def as_if(**changes: object) -> Answers:
    """A good answer to another request."""
    return lambda request: answer_frame(replace(request, **changes), answer_to(request.operation))  # type: ignore[arg-type]


def answer_to(operation: Operation) -> StageAnswer:
    return GOOD if operation is Operation.LOSS else replace(GOOD, loss_sum=None)


def gradient_with(value: float) -> Tensor:
    gradient = activations(2)
    gradient[1, 2, 3] = value
    return gradient


async def refused(operation: Operation, answers: Answers) -> list[tuple[NodeId, ScoreReason]]:
    """What the driver reports about a peer that answers so, and whose answer it must not use."""
    reports = list[tuple[NodeId, ScoreReason]]()

    async def lying(_sender: NodeId, frame: Frame) -> Frame:
        await anyio.lowlevel.checkpoint()
        return answers(read_request(frame, LAST, HIDDEN))

    with InMemoryNetwork() as network:
        network.join(LIAR).serve(operation.value, lying, request_limits(operation, SHAPES))
        transport = network.join(NodeId("driver"))
        hop = RemoteStageClient(transport, LIAR, LAST, SHAPES, report=lambda *report: reports.append(report))
        if operation is Operation.LOSS:
            ask = partial(hop.loss, key(1), activations(2), LABELS[:2])
        else:
            ask = partial(hop.backward, key(1), activations(2))
        with pytest.raises(StageGoneError) as refusal:
            await ask()
        assert refusal.value.retry is Retry.ELSEWHERE
    return reports


@pytest.mark.parametrize("operation", [Operation.LOSS, Operation.BACKWARD])
@pytest.mark.parametrize(
    "gradient",
    [
        gradient_with(torch.nan),
        gradient_with(-torch.inf),
        gradient_with(1e20),  # a number, but its square is none in fp32
        gradient_with(-2 * LARGEST_RECEIVED),
        activations(1),
        None,
    ],
)
def test_a_gradient_that_cannot_be_is_refused(operation: Operation, gradient: Tensor | None) -> None:
    answer = replace(answer_to(operation), gradient=gradient)
    assert trio.run(refused, operation, told(answer)) == [(LIAR, ScoreReason.UNEXPECTED_TENSOR)]


@pytest.mark.parametrize("operation", [Operation.LOSS, Operation.BACKWARD])
@pytest.mark.parametrize(
    "answers",
    [as_if(session=9), as_if(microbatch=0), as_if(operation=Operation.FORWARD), told(StageAnswer())],
    ids=["session", "earlier microbatch again", "operation", "nothing"],
)
def test_an_answer_to_something_else_is_refused(operation: Operation, answers: Answers) -> None:
    assert trio.run(refused, operation, answers) == [(LIAR, ScoreReason.UNEXPECTED_TENSOR)]


@pytest.mark.parametrize("loss", [torch.nan, torch.inf, -0.1, 1.01 * MAX_LOSS * TOKENS, 1e300, None])
def test_a_loss_that_cannot_be_is_refused(loss: float | None) -> None:
    answers = told(replace(GOOD, loss_sum=loss))
    assert trio.run(refused, Operation.LOSS, answers) == [(LIAR, ScoreReason.UNEXPECTED_TENSOR)]


def test_a_backward_pass_tells_no_loss() -> None:
    assert trio.run(refused, Operation.BACKWARD, told(GOOD)) == [(LIAR, ScoreReason.UNEXPECTED_TENSOR)]


@pytest.mark.parametrize("losses", [(-1.0, 2.0), (1.0, 1.1 * MAX_LOSS * ARCHITECTURE.sequence_length)])
def test_held_out_losses_that_cannot_be_are_refused(losses: tuple[float, float]) -> None:
    reports = list[tuple[NodeId, ScoreReason]]()

    async def lying(_sender: NodeId, frame: Frame) -> Frame:
        await anyio.lowlevel.checkpoint()
        return answer_frame(read_request(frame, LAST, HIDDEN), StageAnswer(losses=torch.tensor(losses)))

    async def main() -> None:
        with InMemoryNetwork() as network:
            network.join(LIAR).serve(Operation.INFER.value, lying, request_limits(Operation.INFER, SHAPES))
            transport = network.join(NodeId("driver"))
            hop = RemoteStageClient(transport, LIAR, LAST, SHAPES, report=lambda *report: reports.append(report))
            with pytest.raises(StageGoneError):
                await hop.measure(activations(2), LABELS[:2])

    trio.run(main)
    assert reports == [(LIAR, ScoreReason.UNEXPECTED_TENSOR)]
