from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan

import anyio
import pytest
import torch
import trio
from torch import Tensor

from neuroshard.messages import Frame, MalformedFrameError, encode
from neuroshard.messages.frame import pack, unpack
from neuroshard.network import InMemoryNetwork, ScoreReason
from neuroshard.pipeline.microbatch import Retry, StageError, StageGoneError
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
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import LayerRange, NodeId, RunId
from tests.worlds.stages import ARCHITECTURE, HIDDEN, activations, key

STAGE = StageAddress(RunId("1" * 64), LayerRange(1, 2), 1)
LAST = replace(STAGE, layers=LayerRange(2, ARCHITECTURE.layer_count))
SHAPES = StageShapes.for_layers(ARCHITECTURE, STAGE.layers, 4)
LIAR = NodeId("liar")
Lie = Callable[[Frame], Frame]


def nan_output(frame: Frame) -> Frame:
    request = read_request(frame, STAGE, HIDDEN)
    return answer_frame(request, StageAnswer(output=torch.full_like(activations(2), torch.nan)))


def huge_output(frame: Frame) -> Frame:
    return answer_frame(read_request(frame, STAGE, HIDDEN), StageAnswer(output=1e20 * activations(2)))


def short_output(frame: Frame) -> Frame:
    return answer_frame(read_request(frame, STAGE, HIDDEN), StageAnswer(output=activations(1)))


def unasked_loss(frame: Frame) -> Frame:
    return answer_frame(read_request(frame, STAGE, HIDDEN), StageAnswer(output=activations(2), loss_sum=1.0))


def no_output(frame: Frame) -> Frame:
    return answer_frame(read_request(frame, STAGE, HIDDEN), StageAnswer())


def another_session(frame: Frame) -> Frame:
    return answer_frame(replace(read_request(frame, STAGE, HIDDEN), session=99), StageAnswer(output=activations(2)))


def another_microbatch(frame: Frame) -> Frame:
    return answer_frame(replace(read_request(frame, STAGE, HIDDEN), microbatch=99), StageAnswer(output=activations(2)))


def another_operation(frame: Frame) -> Frame:
    asked = replace(read_request(frame, STAGE, HIDDEN), operation=Operation.BACKWARD)
    return answer_frame(asked, StageAnswer(output=activations(2)))


def odd_refusal(_frame: Frame) -> Frame:
    return Frame("stage/refused", {"error": "hungry", "reason": "x"})


def odd_header(frame: Frame) -> Frame:
    return Frame(frame.kind, {"session": 1})


def blames_the_tensor(_frame: Frame) -> Frame:
    return Frame("stage/refused", {"error": "tensor", "reason": "I do not like it"})


def too_much(frame: Frame) -> Frame:
    answer = StageAnswer(output=activations(4), gradient=activations(4))
    return answer_frame(read_request(frame, STAGE, HIDDEN), answer)


def accident(_frame: Frame) -> Frame:
    raise RuntimeError("a defect over there")


@pytest.mark.parametrize(
    ("lie", "is_reported"),
    [
        (nan_output, True),
        (huge_output, True),
        (short_output, True),
        (unasked_loss, True),
        (no_output, True),
        (another_session, True),
        (another_microbatch, True),
        (another_operation, True),
        (odd_refusal, True),
        (odd_header, True),
        (too_much, True),
        (blames_the_tensor, False),
        (accident, False),
    ],
)
def test_an_answer_that_is_none_is_refused_and_another_replica_may_be_asked(lie: Lie, is_reported: bool) -> None:
    reports = list[tuple[NodeId, ScoreReason]]()

    async def lying(_sender: NodeId, frame: Frame) -> Frame:
        await anyio.lowlevel.checkpoint()
        return lie(frame)

    async def main() -> None:
        with InMemoryNetwork() as network:
            network.join(LIAR).serve("stage/forward", lying, request_limits(Operation.FORWARD, SHAPES))
            transport = network.join(NodeId("driver"))
            hop = RemoteStageClient(transport, LIAR, STAGE, SHAPES, report=lambda *report: reports.append(report))
            with pytest.raises(StageError) as refusal:
                await hop.forward(key(1), activations(2))
            assert refusal.value.retry is Retry.ELSEWHERE

    trio.run(main)
    assert reports == ([(LIAR, ScoreReason.UNEXPECTED_TENSOR)] if is_reported else [])


def logits_of(*values: float, size: int = ARCHITECTURE.vocabulary_size) -> Tensor:
    return torch.tensor([*values, *[0.0] * (size - len(values))])


@pytest.mark.parametrize(
    "answer",
    [
        StageAnswer(logits=logits_of(torch.nan)),
        StageAnswer(logits=logits_of(torch.inf)),
        StageAnswer(logits=logits_of(size=ARCHITECTURE.vocabulary_size + 1)),
        StageAnswer(logits=logits_of(size=3)),
        StageAnswer(losses=logits_of()),
        StageAnswer(output=activations(1)),
        StageAnswer(logits=logits_of(), output=activations(1)),
        StageAnswer(),
    ],
)
def test_logits_that_are_none_are_refused(answer: StageAnswer) -> None:
    reports = list[tuple[NodeId, ScoreReason]]()

    async def lying(_sender: NodeId, frame: Frame) -> Frame:
        await anyio.lowlevel.checkpoint()
        return answer_frame(read_request(frame, LAST, HIDDEN), answer)

    async def main() -> None:
        with InMemoryNetwork() as network:
            shapes = StageShapes.for_layers(ARCHITECTURE, LAST.layers, 4)
            network.join(LIAR).serve("stage/read", lying, request_limits(Operation.READ, shapes))
            transport = network.join(NodeId("asker"))
            hop = RemoteStageClient(transport, LIAR, LAST, shapes, report=lambda *report: reports.append(report))
            with pytest.raises(StageGoneError):
                await hop.read(1, 0, activations(1))

    trio.run(main)
    assert reports == [(LIAR, ScoreReason.UNEXPECTED_TENSOR)]


@pytest.mark.parametrize("seconds", [1e301, -1e301, inf, nan])
def test_a_claimed_time_that_is_no_time_is_refused_with_its_message(seconds: float) -> None:
    """Another program than ours may send it; our own encoder refuses it, too."""
    request = StageRequest(Operation.FORWARD, STAGE)
    packed = pack(answer_frame(request, StageAnswer(output=activations(2), compute_seconds=1.25)).message)
    forged = packed.replace(struct.pack(">d", 1.25), struct.pack(">d", seconds))
    assert len(forged) == len(packed)
    assert forged != packed
    with pytest.raises(MalformedFrameError, match="cannot be read"):
        unpack(forged)
    with pytest.raises(MalformedFrameError):
        encode(answer_frame(request, StageAnswer(output=activations(2), compute_seconds=seconds)))


def test_a_stage_cannot_have_taken_longer_than_its_answer_did() -> None:
    boast = StageAnswer(output=activations(2), compute_seconds=1e297, recompute_seconds=1e298, seconds=1e299)

    async def boasting(_sender: NodeId, frame: Frame) -> Frame:
        await anyio.lowlevel.checkpoint()
        return answer_frame(read_request(frame, STAGE, HIDDEN), boast)

    async def main() -> None:
        with InMemoryNetwork() as network:
            network.join(LIAR).serve("stage/forward", boasting, request_limits(Operation.FORWARD, SHAPES))
            hop = RemoteStageClient(network.join(NodeId("driver")), LIAR, STAGE, SHAPES)
            await hop.forward(key(1), activations(2))
            (timing,) = hop.timings
            assert timing.seconds < 60
            assert timing.recompute_seconds == timing.compute_seconds == timing.stage_seconds == timing.seconds

    trio.run(main)
