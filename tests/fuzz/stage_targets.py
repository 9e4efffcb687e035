"""Readers of tensors: what drivers and stages send each other, statistics and encoded contributions of a round.

These are the only targets that need PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from math import inf, isnan

import torch
from torch import Tensor

from neuroshard.aggregation import (
    MalformedStatisticsError,
    MemberFacts,
    SliceRows,
    judge_statistics,
    read_statistics,
    slice_statistics,
    statistics_bytes,
    sum_statistics,
)
from neuroshard.compression import BLOCK, MalformedVectorError, make_codec
from neuroshard.messages import Frame, FrameLimits, TensorSpec, WireError, encode
from neuroshard.messages.frame import unpack
from neuroshard.pipeline.microbatch import RefusedTensorError, StageBusyError, StageGoneError
from neuroshard.pipeline.stage_protocol import (
    REFUSED,
    Operation,
    StageAddress,
    StageAnswer,
    StageRequest,
    WirePrecision,
    answer_frame,
    answer_limits,
    is_for_layers,
    read_answer,
    read_refusal,
    read_request,
    refusal_frame,
    request_frame,
    request_limits,
)
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import LayerRange, RunId
from tests.fuzz.message_targets import read_frame, written
from tests.fuzz.target import Target, golden

FIRST = StageAddress(RunId("1" * 64), LayerRange(0, 1), 1)
LAST = replace(FIRST, layers=LayerRange(1, 2))
BATCH, TOKENS, WIDTH = 2, 3, 4
OPERATIONS = tuple(Operation)
_ASKED = StageRequest(Operation.FORWARD, FIRST, 3, 7)
_MEMORY_BYTES = 4_000_000


def shapes_of(stage: StageAddress) -> StageShapes:
    """A very small model's."""
    is_first = stage.layers.start == 0
    return StageShapes(BATCH, TOKENS, WIDTH, 32, is_first=is_first, is_last=not is_first)


def check_stage_request(data: bytes) -> None:
    """The first byte chooses stage and operation. A request that is read can be made again and asks for the same."""
    if not data:
        return
    stage = (FIRST, LAST)[data[0] % 2]
    operation = OPERATIONS[data[0] // 2 % len(OPERATIONS)]
    frame = framed(operation.value, data[1:], request_limits(operation, shapes_of(stage)))
    if frame is None:
        return
    try:
        request = read_request(frame, stage, WIDTH)
    except (RefusedTensorError, StageGoneError):
        return
    assert is_for_layers(frame, stage.layers)
    assert request.operation is operation
    check_shapes(request)
    if {request.precision, request.gradient_precision}.isdisjoint(_ROUNDED_AGAIN):
        again = written(request_frame(request), FrameLimits(max_body_bytes=65_536))
        assert again is not None
        assert_same(read_request(again, stage, WIDTH), request)


_ROUNDED_AGAIN = frozenset({WirePrecision.INT8, WirePrecision.INT4})  # decoded values may get other codes


def check_shapes(request: StageRequest) -> None:
    """As the stage does before it works: whatever passes is of the right shape and in the vocabulary."""
    shapes = shapes_of(request.stage)
    with suppress(RefusedTensorError):
        if request.gradient is not None:
            shapes.check_activations(request.gradient)
            assert request.gradient.dtype is torch.float32
    if request.inputs is None:
        return
    with suppress(RefusedTensorError):
        if request.labels is None:
            shapes.check_inputs(request.inputs, request.ids)
        else:
            shapes.check_loss(request.inputs, request.labels, request.ids)
        shapes.check_values(request.inputs, request.labels)
        assert request.inputs.numel() <= BATCH * TOKENS * WIDTH
        assert bool(torch.isfinite(request.inputs).all())


def check_stage_answer(data: bytes) -> None:
    """The first byte chooses the precision. An answer that is read can be given again and says the same."""
    if not data:
        return
    precision = tuple(WirePrecision)[data[0] % len(WirePrecision)]
    asked = replace(_ASKED, precision=precision, gradient_precision=precision)
    frame = framed(asked.operation.value, data[1:], answer_limits(shapes_of(FIRST)))
    if frame is None:
        return
    try:
        answer = read_answer(frame, asked, WIDTH)
    except RefusedTensorError:
        return
    assert all(0 <= seconds < inf for seconds in (answer.compute_seconds, answer.recompute_seconds, answer.seconds))
    if asked.precision not in _ROUNDED_AGAIN:
        again = written(answer_frame(asked, answer), FrameLimits(max_body_bytes=65_536))
        assert again is not None
        assert_same(read_answer(again, asked, WIDTH), answer)


def check_stage_refusal(data: bytes) -> None:
    """A refusal that is read is one of those there are, and can be said again."""
    frame = framed(REFUSED, data, FrameLimits(2048))
    if frame is None:
        return
    try:
        refusal = read_refusal(frame)
    except RefusedTensorError:
        return
    assert refusal is not None
    again = read_refusal(refusal_frame(refusal))
    assert (type(again), str(again)) == (type(refusal), str(refusal))


def framed(kind: str, data: bytes, limits: FrameLimits) -> Frame | None:
    """Header length u16, header, body; the body is made as long as the header says, so that more is read."""
    size = int.from_bytes(data[:2], "little")
    header, body = data[2 : 2 + size], data[2 + size :]
    wanted = min(wanted_bytes(header), 4096)
    return read_frame(kind, header, limits, (body + bytes(wanted))[:wanted])


def wanted_bytes(header: bytes) -> int:
    """What the tensors in a header need; 0 when it cannot be read."""
    try:
        value = unpack(header)
        tensors = value["t"] if isinstance(value, dict) else []  # type: ignore[index]
        return sum(TensorSpec(name, dtype, tuple(shape)).byte_count for name, dtype, shape in tensors)
    except (WireError, KeyError, TypeError, ValueError):
        return 0


def assert_same(one: StageRequest | StageAnswer, other: StageRequest | StageAnswer) -> None:
    """Equal in every field, tensors in every value."""
    for name in one.__dataclass_fields__:
        mine, yours = getattr(one, name), getattr(other, name)
        if isinstance(mine, Tensor):
            assert isinstance(yours, Tensor)
            assert mine.dtype is yours.dtype
            assert torch.equal(mine.nan_to_num(7.0), yours.nan_to_num(7.0))
        elif not (isinstance(mine, float) and isnan(mine) and isnan(yours)):
            assert mine == yours


def ids() -> Tensor:
    """Token ids, (b, t)."""
    return torch.arange(BATCH * TOKENS).reshape(BATCH, TOKENS)


def activations() -> Tensor:
    """Activations, (b, t, d)."""
    return torch.arange(BATCH * TOKENS * WIDTH).reshape(BATCH, TOKENS, WIDTH) / 7.0


def parts_of(frame: Frame) -> bytes:
    """What `framed` makes this frame of."""
    encoded = encode(frame)
    kind_bytes, header_bytes = encoded.head[6], int.from_bytes(encoded.head[8:12], "little")
    start = 20 + kind_bytes
    header = encoded.head[start : start + header_bytes]
    return header_bytes.to_bytes(2, "little") + header + b"".join(bytes(piece) for piece in encoded.body)


def stage_request_seeds() -> tuple[bytes, ...]:
    """Every operation, in every precision."""
    requests = [
        StageRequest(Operation.FORWARD, FIRST, 3, 7, inputs=ids()),
        *(
            StageRequest(Operation.LOSS, LAST, 2**62, 0, precision, precision, activations(), ids())
            for precision in WirePrecision
        ),
        StageRequest(Operation.BACKWARD, FIRST, 3, 7, gradient=activations()),
        StageRequest(Operation.INFER, LAST, inputs=activations()),
        StageRequest(Operation.CLOSE, LAST, 4),
        StageRequest(Operation.CLOSE, replace(LAST, version=2), 4),
    ]
    return tuple(
        bytes([2 * OPERATIONS.index(request.operation) + (request.stage.layers.start > 0)])
        + parts_of(request_frame(request))
        for request in requests
    )


def stage_answer_seeds() -> tuple[bytes, ...]:
    """What there is to answer, in every precision."""
    answers = (
        StageAnswer(output=activations(), root="ab" * 32, compute_seconds=0.5, seconds=1.0),
        StageAnswer(losses=torch.tensor([1.5, 2.5]), gradient=activations(), loss_sum=4.0),
        StageAnswer(),
    )
    return tuple(
        bytes([number])
        + parts_of(answer_frame(replace(_ASKED, precision=precision, gradient_precision=precision), answer))
        for number, precision in enumerate(WirePrecision)
        for answer in answers
    )


def stage_refusal_seeds() -> tuple[bytes, ...]:
    """Some, and one without an error that exists."""
    refusals = (StageBusyError("busy"), StageGoneError("gone"), RefusedTensorError("x" * 400))
    frames = (*map(refusal_frame, refusals), Frame(REFUSED, {"error": "other", "reason": ""}))
    return tuple(map(parts_of, frames))


def stage_target(name: str, check: Callable[[bytes], None], seeds: Callable[[], tuple[bytes, ...]]) -> Target:
    """One of this file."""
    return Target(name, check, seeds, _MEMORY_BYTES, short_inputs=1_000)


def check_statistics(data: bytes) -> None:
    """Statistics that are read say the same again, add up, and can be judged. The first byte: members, Gram matrix."""
    count, with_gram = divmod(data[0] if data else 0, 2)
    try:
        statistics = read_statistics(data[1:], count, with_gram=with_gram == 1)
    except MalformedStatisticsError:
        return
    assert statistics_bytes(statistics) == data[1:]
    members = MemberFacts.of_equals(count, are_friends=not with_gram)
    judge_statistics(sum_statistics([statistics, statistics]), members)


def statistics_seeds() -> tuple[bytes, ...]:
    """Statistics of one, three and seven members."""
    seeds: list[bytes] = []
    for count in (1, 3, 7):
        rows = torch.arange(count * 40, dtype=torch.float32).view(count, 40).sin()
        rows[count // 2, 3] = float("nan")
        for with_gram in (False, True):
            statistics = slice_statistics(SliceRows.of(rows), with_gram=with_gram)
            seeds.append(bytes([2 * count + with_gram]) + statistics_bytes(statistics))
    return (*seeds, b"", b"\x02")


NAMES = ("int8", "bf16", "fp32", "int4")
CODECS = tuple(map(make_codec, NAMES))
LENGTHS = (0, 1, 2, 7, 100, BLOCK, BLOCK + 1)


def check_encoded_vector(data: bytes) -> None:
    """The first two bytes choose codec and length. What is decoded is finite, and the same as a whole and in ranges."""
    if len(data) < 2:
        return
    codec, length, encoded = CODECS[data[0] % len(CODECS)], LENGTHS[data[1] % len(LENGTHS)], data[2:]
    try:
        vector = codec.decode(encoded, length)
    except MalformedVectorError:
        try:
            codec.check(encoded, length)
        except MalformedVectorError:
            return
        raise AssertionError("decode refuses what check lets through") from None
    codec.check(encoded, length)
    assert codec.name == "fp32" or vector.isfinite().all()
    half = length // 2
    ranges = [codec.decode_range(encoded, 0, half, length), codec.decode_range(encoded, half, length, length)]
    assert torch.cat(ranges).numpy().tobytes() == vector.numpy().tobytes()


def encoded_vector_seeds() -> tuple[bytes, ...]:
    vectors = [
        bytes([NAMES.index(item["codec"]), LENGTHS.index(len(item["values"]))]) + bytes.fromhex(item["bytes"])
        for item in golden("compression.json")["encoded"]
        if len(item["values"]) in LENGTHS
    ]
    made = [
        bytes([number, place]) + codec.encode(torch.linspace(-1, 1, length))
        for number, codec in enumerate(CODECS)
        for place, length in enumerate(LENGTHS)
    ]
    return (*vectors, *made)


TARGETS = (
    stage_target("stage-request", check_stage_request, stage_request_seeds),
    stage_target("stage-answer", check_stage_answer, stage_answer_seeds),
    stage_target("stage-refusal", check_stage_refusal, stage_refusal_seeds),
    Target("slice statistics", check_statistics, statistics_seeds),
    Target("encoded-vector", check_encoded_vector, encoded_vector_seeds),
)
