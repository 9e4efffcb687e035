from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.messages import Frame, FrameDecoder, FrameLimits, FrameTooLargeError, as_received, encode
from neuroshard.pipeline.microbatch import (
    DisputedTensorError,
    LostGradientError,
    RefusedTensorError,
    StageError,
    StageGoneError,
    UnwantedTensorError,
)
from neuroshard.pipeline.stage_protocol import (
    Operation,
    StageAddress,
    StageAnswer,
    StageRequest,
    WirePrecision,
    answer_frame,
    answer_limits,
    read_answer,
    read_refusal,
    read_request,
    refusal_frame,
    request_frame,
    request_limits,
)
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import LayerRange, RunId
from tests.worlds.stages import ARCHITECTURE, HIDDEN, INPUTS, LABELS, activations

FIRST = StageAddress(RunId("1" * 64), LayerRange(0, 1), 1)
LAST = replace(FIRST, layers=LayerRange(1, 3))


def shapes_of(stage: StageAddress) -> StageShapes:
    return StageShapes.for_layers(ARCHITECTURE, stage.layers, 4)


def travelled(frame: Frame, limits: FrameLimits) -> Frame:
    """The frame after it was bytes."""
    encoded = encode(frame)
    decoder = FrameDecoder(lambda _: limits)
    data = b"".join((encoded.head, *encoded.body))
    decoder.feed(data[decoder.feed(data) :])
    return decoder.frame()


REQUESTS = [
    StageRequest(Operation.FORWARD, FIRST, 3, 7, inputs=INPUTS[:4]),
    StageRequest(Operation.BACKWARD, FIRST, 3, 7, gradient=activations(4)),
    StageRequest(Operation.LOSS, LAST, 2**62, 0, inputs=activations(4), labels=LABELS[:4]),
    StageRequest(Operation.INFER, LAST, inputs=activations(2)),
    StageRequest(Operation.INFER, LAST, inputs=activations(2), labels=LABELS[:2]),
    StageRequest(Operation.CLOSE, LAST, 4),
    StageRequest(Operation.READ, FIRST, 2, 40, inputs=INPUTS[:1]),
    StageRequest(Operation.READ, LAST, 2, 2**40, inputs=activations(1)),
    StageRequest(Operation.FORGET, LAST, 2),
]


ROUNDING = {
    WirePrecision.FP32: 0.0,
    WirePrecision.BF16: 0.002,
    WirePrecision.INT8: 0.007,
    WirePrecision.INT4: 0.12,
    WirePrecision.INT4_RANK8: 0.12,
}


@pytest.mark.parametrize("precision", WirePrecision)
@pytest.mark.parametrize("asked_", REQUESTS, ids=lambda request: request.operation.name)
def test_a_request_travels(asked_: StageRequest, precision: WirePrecision) -> None:
    asked = replace(asked_, precision=precision, gradient_precision=precision)
    limits = request_limits(asked.operation, shapes_of(asked.stage))
    found = read_request(travelled(request_frame(asked), limits), asked.stage, HIDDEN)
    names = ("inputs", "labels", "gradient")
    assert replace(found, **dict.fromkeys(names)) == replace(asked, **dict.fromkeys(names))
    for name in names:
        sent, received = getattr(asked, name), getattr(found, name)
        assert (sent is None) == (received is None)
        if sent is not None:
            assert sent.dtype == received.dtype
            apart = (received - sent).double().norm() / sent.double().norm()
            assert apart <= (0.0 if sent.dtype == torch.int64 else ROUNDING[precision])


def test_activations_and_gradients_travel_in_precisions_of_their_own() -> None:
    asked = StageRequest(Operation.LOSS, LAST, 1, 2, WirePrecision.INT4, WirePrecision.INT8, activations(2), LABELS[:2])
    types = {part.spec.name: part.spec.dtype for part in request_frame(asked).tensors}
    assert (types["inputs"], types["inputs/scales"]) == ("uint8", "bfloat16")
    answer = answer_frame(asked, StageAnswer(output=activations(2), gradient=activations(2), loss_sum=1.0))
    types = {part.spec.name: part.spec.dtype for part in answer.tensors}
    assert (types["output"], types["gradient"]) == ("uint8", "int8")
    found = read_answer(travelled(answer, answer_limits(shapes_of(LAST))), asked, HIDDEN).gradient
    assert found is not None
    assert (found - activations(2)).norm() <= 0.007 * activations(2).norm()
    with pytest.raises(RefusedTensorError):
        read_answer(answer, replace(asked, gradient_precision=WirePrecision.BF16), HIDDEN)


ANSWERS = [
    StageAnswer(output=activations(4), root="cd" * 32, compute_seconds=0.5, recompute_seconds=0.25, seconds=1.0),
    StageAnswer(gradient=activations(4), loss_sum=312.25, seconds=1e-3),
    StageAnswer(losses=torch.tensor([1.0, 2.0]), seconds=0.0),
    StageAnswer(logits=torch.linspace(-3, 3, ARCHITECTURE.vocabulary_size)),
    StageAnswer(),
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_travels(answer: StageAnswer) -> None:
    asked = StageRequest(Operation.LOSS, LAST, 5, 6)
    found = read_answer(travelled(answer_frame(asked, answer), answer_limits(shapes_of(LAST))), asked, HIDDEN)
    for name in ("output", "losses", "gradient", "logits"):
        sent, received = getattr(answer, name), getattr(found, name)
        assert (sent is None and received is None) or torch.equal(sent, received)
    assert repr(found.loss_sum) == repr(answer.loss_sum)
    for name in ("root", "compute_seconds", "recompute_seconds", "seconds"):
        assert getattr(found, name) == getattr(answer, name)
    for other in (replace(asked, session=6), replace(asked, microbatch=7), replace(asked, operation=Operation.INFER)):
        with pytest.raises(RefusedTensorError, match="another microbatch"):
            read_answer(answer_frame(asked, answer), other, HIDDEN)


RAISED_BY_DRIVERS = {DisputedTensorError, LostGradientError, UnwantedTensorError}  # no stage sends them


@pytest.mark.parametrize("error", [each for each in StageError.__subclasses__() if each not in RAISED_BY_DRIVERS])
def test_a_refusal_keeps_its_class(error: type[StageError]) -> None:
    refusal = read_refusal(travelled(refusal_frame(error("x" * 1000)), answer_limits(shapes_of(FIRST))))
    assert type(refusal) is error
    assert refusal.message == "x" * 300


def test_other_frames_are_no_refusals() -> None:
    assert read_refusal(Frame("stage/forward")) is None
    for header in ({}, {"error": "busy"}, {"error": "odd", "reason": ""}, {"error": "busy", "reason": "x" * 301}):
        with pytest.raises(RefusedTensorError):
            read_refusal(Frame("stage/refused", header))


@pytest.mark.parametrize(
    "other",
    [
        replace(FIRST, run_id=RunId("2" * 64)),
        replace(FIRST, layers=LayerRange(0, 2)),
        replace(FIRST, version=2),
    ],
)
def test_a_request_to_another_stage_is_sent_elsewhere(other: StageAddress) -> None:
    with pytest.raises(StageGoneError):
        read_request(request_frame(replace(REQUESTS[0], stage=other)), FIRST, HIDDEN)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["run", "layers", "version", "session", "microbatch", "precision", "more"]),
    st.one_of(
        st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=9), st.binary(max_size=9),
        st.lists(st.integers(0, 3), max_size=3), st.just(2**63),
    ),
)  # fmt: skip
def test_odd_headers_are_refused_and_never_an_accident(name: str, value: object) -> None:
    frame = request_frame(REQUESTS[0])
    header = {**frame.header, name: value}
    try:
        found = read_request(replace(frame, message=header), FIRST, HIDDEN)  # type: ignore[arg-type]
    except StageError:
        return
    assert name != "more"
    assert request_frame(found).header[name] == value


def test_odd_tensors_are_refused() -> None:
    frame = request_frame(REQUESTS[0])
    ids = frame.tensors[0]
    floats = request_frame(replace(REQUESTS[2], labels=None)).tensors[0]
    for tensors in ((floats,), (ids, ids)):
        with pytest.raises(RefusedTensorError):
            read_request(replace(frame, tensors=tensors), FIRST, HIDDEN)
    with pytest.raises(RefusedTensorError):
        read_request(replace(request_frame(REQUESTS[2]), tensors=(ids,)), LAST, HIDDEN)
    with pytest.raises(RefusedTensorError):
        read_request(replace(frame, kind="stage/other"), FIRST, HIDDEN)


@pytest.mark.parametrize("asked", REQUESTS, ids=lambda request: request.operation.name)
def test_a_request_beyond_the_batch_is_not_read(asked: StageRequest) -> None:
    limits = request_limits(asked.operation, shapes_of(asked.stage))
    as_received(request_frame(asked), limits)
    shorter = StageShapes.for_layers(replace(ARCHITECTURE, sequence_length=1), asked.stage.layers, 1)
    if asked.operation not in (Operation.CLOSE, Operation.FORGET):
        with pytest.raises(FrameTooLargeError):
            as_received(request_frame(asked), request_limits(asked.operation, shorter))


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 2**40])
def test_token_ids_that_do_not_fit_on_the_wire_are_refused_and_not_changed(token: int) -> None:
    with pytest.raises(RefusedTensorError, match="32 bits"):
        request_frame(StageRequest(Operation.FORWARD, FIRST, inputs=torch.tensor([[1, token]])))
