"""Protocol between a driver and a stage: frames, number formats and timings. An invalid frame raises StageError."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, isfinite
from typing import TypeVar, assert_never

import anyio.to_thread
import torch
from torch import Tensor

from neuroshard.config.run_parameters import RunParameters
from neuroshard.data.held_out_losses import claim_bytes
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec, WireError, WireValue
from neuroshard.messages.tensors import part_of, tensor_of
from neuroshard.pipeline.activation_codes import (
    BLOCK,
    quantised,
    quantised_to_int4,
    restored_activations,
    restored_from_int4,
)
from neuroshard.pipeline.common_directions import DIRECTIONS, common_part, has_directions, without_common_part
from neuroshard.pipeline.microbatch import (
    ClosedSessionError,
    NotHandedYetError,
    RefusedTensorError,
    SpoiltMicrobatchError,
    StageBusyError,
    StageError,
    StageGoneError,
    StagePausedError,
    UnknownMicrobatchError,
    UnreadTextError,
)
from neuroshard.pipeline.tensor_checks import LARGEST_ROUNDING, LARGEST_ROUNDING_INT4, StageShapes
from neuroshard.types import ID_BYTES, LayerRange, RunId

_SCALES, _AMOUNTS, _ROWS = "/scales", "/amounts", "/rows"


class WirePrecision(StrEnum):
    """Number format of activations on the wire."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"  # with an fp32 scale per block: 1.06 bytes per value
    INT4 = "int4"  # with a bf16 scale per block: 0.53 bytes per value
    INT4_RANK8 = "int4-rank8"  # int4 of what the mean and 8 directions of a microbatch leave: 8 bytes more per token


# what was decoded from these is encoded to other bytes again
COARSE = frozenset({WirePrecision.INT4, WirePrecision.INT4_RANK8})


def wire_precisions(parameters: RunParameters) -> tuple[WirePrecision, WirePrecision]:
    """The formats of a run's activations and of their gradients."""
    activations = parameters.wire_precision
    return WirePrecision(activations), WirePrecision(parameters.wire_precision_gradients or activations)


def largest_rounding(parameters: RunParameters) -> float:
    """Relative norm by which outputs of equal weights may differ in a run."""
    return LARGEST_ROUNDING_INT4 if WirePrecision(parameters.wire_precision) in COARSE else LARGEST_ROUNDING


def wire_specs(name: str, shape: tuple[int, int, int], precision: WirePrecision) -> tuple[TensorSpec, ...]:
    """Specifications of the tensors in which activations of this shape (b, t, n) travel."""
    scales = (*shape[:2], ceil(shape[2] / BLOCK))
    match precision:
        case WirePrecision.FP32:
            return (TensorSpec(name, "float32", shape),)
        case WirePrecision.BF16:
            return (TensorSpec(name, "bfloat16", shape),)
        case WirePrecision.INT8:
            return (TensorSpec(name, "int8", shape), TensorSpec(name + _SCALES, "float32", scales))
        case WirePrecision.INT4:
            halves = (*shape[:2], ceil(shape[2] / 2))
            return (TensorSpec(name, "uint8", halves), TensorSpec(name + _SCALES, "bfloat16", scales))
        case WirePrecision.INT4_RANK8:
            of_rest = wire_specs(name, shape, WirePrecision.INT4)
            if not has_directions(*shape):
                return of_rest
            amounts = TensorSpec(name + _AMOUNTS, "int8", (*shape[:2], DIRECTIONS))
            return (*of_rest, amounts, TensorSpec(name + _ROWS, "bfloat16", (1 + DIRECTIONS, shape[2])))
        case _:
            assert_never(precision)


def wire_bytes(tokens: int, size: int, precision: WirePrecision = WirePrecision.FP32) -> int:
    """Bytes on the wire of this number of tokens with `size` values each."""
    return sum(spec.byte_count for spec in wire_specs("", (1, tokens, size), precision))


def to_wire(name: str, activations: Tensor, precision: WirePrecision) -> tuple[TensorPart, ...]:
    """Encode activations (b, t, n) fp32 as parts of a frame."""
    match precision:
        case WirePrecision.FP32:
            return (part_of(name, activations),)
        case WirePrecision.BF16:
            return (part_of(name, activations.to(torch.bfloat16)),)
        case WirePrecision.INT8:
            values, scales = quantised(activations)
        case WirePrecision.INT4:
            values, scales = quantised_to_int4(activations)
        case WirePrecision.INT4_RANK8:
            if not has_directions(*activations.shape):
                return to_wire(name, activations, WirePrecision.INT4)
            rest, amounts, rows = without_common_part(activations)
            of_rest = to_wire(name, rest, WirePrecision.INT4)
            return (*of_rest, part_of(name + _AMOUNTS, amounts), part_of(name + _ROWS, rows))
        case _:
            assert_never(precision)
    return (part_of(name, values), part_of(name + _SCALES, scales))


def from_wire(name: str, parts: Mapping[str, TensorPart], precision: WirePrecision, size: int) -> Tensor:
    """Decode activations (b, t, size) fp32 that `to_wire` encoded. Raises RefusedTensorError for parts that differ."""
    part = parts.get(name)
    if part is None or len(part.spec.shape) != 3:
        raise RefusedTensorError(f"The tensor {name!r} is missing, or has not three dimensions.")
    sequences, tokens, _ = part.spec.shape
    specs = wire_specs(name, (sequences, tokens, size), precision)
    names = dict.fromkeys((name, name + _SCALES, name + _AMOUNTS, name + _ROWS))
    if tuple(parts[each].spec for each in names if each in parts) != specs:
        raise RefusedTensorError(f"The tensor {name!r} is not what {precision.value} activations are.")
    values = tensor_of(part)
    if precision is WirePrecision.INT8:
        return restored_activations(values, tensor_of(parts[name + _SCALES]))
    if precision in COARSE:
        rest = restored_from_int4(values, tensor_of(parts[name + _SCALES]), size)
        if name + _ROWS not in parts:
            return rest
        return rest.add_(common_part(tensor_of(parts[name + _AMOUNTS]), tensor_of(parts[name + _ROWS])))
    return values.to(torch.float32)


REFUSED = "stage/refused"
MAX_HEADER_BYTES = 2048
MAX_REASON_CHARACTERS = 300
INPUTS, IDS, LABELS, GRADIENT = "inputs", "ids", "labels", "gradient"
OUTPUT, LOSSES, LOGITS = "output", "losses", "logits"
_REQUEST_FIELDS = {"run", "layers", "version", "session", "microbatch", "precision", "gradient_precision"}
_ANSWER_FIELDS = {
    "session",
    "microbatch",
    "root",
    "loss_sum",
    "compute_seconds",
    "recompute_seconds",
    "seconds",
    "claim",
}
_LARGEST_NUMBER = 2**63 - 1


class Operation(StrEnum):
    """Operations of a stage. The value is the kind of the frames."""

    FORWARD = "stage/forward"
    LOSS = "stage/loss"
    BACKWARD = "stage/backward"
    INFER = "stage/infer"
    CLOSE = "stage/close"
    READ = "stage/read"  # the next tokens of the text `session`; `microbatch` is the position of the first one
    FORGET = "stage/forget"  # frees the memory of a text


@dataclass(frozen=True)
class StageAddress:
    """Run, layers and parameter version of a stage. Both sides of a request must agree on them."""

    run_id: RunId
    layers: LayerRange
    version: int  # version of the run's parameters


@dataclass(frozen=True)
class StageRequest:
    """One request to a stage. The answer uses the same precisions."""

    operation: Operation
    stage: StageAddress
    session: int = 0
    microbatch: int = 0
    precision: WirePrecision = WirePrecision.FP32  # of activations
    gradient_precision: WirePrecision = WirePrecision.FP32
    inputs: Tensor | None = None  # token ids (b, t) int64 or activations (b, t, d) fp32
    labels: Tensor | None = None  # (b, t) int64
    gradient: Tensor | None = None  # (b, t, d) fp32
    ids: Tensor | None = None  # (b, t) int64, of the tokens of coefficients of a subspace


@dataclass(frozen=True)
class StageAnswer:
    """Answer of a stage to one request."""

    output: Tensor | None = None  # activations (b, t, d) fp32
    losses: Tensor | None = None  # (b,) fp32, summed over each sequence
    gradient: Tensor | None = None  # of the inputs (b, t, d) fp32
    logits: Tensor | None = None  # (vocabulary,) fp32, of a text's next token
    loss_sum: float | None = None
    root: str = ""  # the stage's state root; "" without one
    compute_seconds: float = 0.0
    recompute_seconds: float = 0.0  # part of `compute_seconds` spent on repeated forward passes
    seconds: float = 0.0  # from the request's arrival to this answer; the rest of it was waiting
    claim: bytes = b""  # the stage's signed claim of the losses


def request_limits(operation: Operation, shapes: StageShapes) -> FrameLimits:
    """Size limits of a request that a stage reads. Shapes are checked after decoding."""
    tokens = shapes.batch_size * shapes.sequence_length
    activations, ids = wire_bytes(tokens, shapes.hidden_size), ID_BYTES * tokens
    inputs = ids if shapes.is_first else activations + ids * shapes.needs_ids
    text = inputs // shapes.batch_size
    body = {
        Operation.FORWARD: inputs,
        Operation.LOSS: inputs + ids,
        Operation.BACKWARD: activations,
        Operation.INFER: inputs + ids,
        Operation.CLOSE: 0,
        Operation.READ: text,
        Operation.FORGET: 0,
    }[operation]
    return FrameLimits(MAX_HEADER_BYTES, body)


def answer_limits(shapes: StageShapes) -> FrameLimits:
    """Size limits of a stage's answer."""
    header = MAX_HEADER_BYTES + 2 * claim_bytes(shapes.batch_size)  # the claim is in base64
    activations = wire_bytes(shapes.batch_size * shapes.sequence_length, shapes.hidden_size)
    logits = 4 * shapes.vocabulary_size if shapes.is_last else 0
    return FrameLimits(header, max(activations, logits))


def request_frame(request: StageRequest) -> Frame:
    """Encode a request as a frame. Raises RefusedTensorError for token ids that do not fit in 32 bits."""
    stage = request.stage
    header: dict[str, WireValue] = {
        "run": stage.run_id,
        "layers": [stage.layers.start, stage.layers.stop],
        "version": stage.version,
        "session": request.session,
        "microbatch": request.microbatch,
        "precision": request.precision.value,
        "gradient_precision": request.gradient_precision.value,
    }
    parts: list[TensorPart] = []
    if request.inputs is not None:
        is_ids = request.inputs.dtype is torch.int64
        parts += ids_part(INPUTS, request.inputs) if is_ids else to_wire(INPUTS, request.inputs, request.precision)
    for name, ids in ((IDS, request.ids), (LABELS, request.labels)):
        if ids is not None:
            parts += ids_part(name, ids)
    if request.gradient is not None:
        parts += to_wire(GRADIENT, request.gradient, request.gradient_precision)
    return Frame(request.operation.value, header, tuple(parts))


def read_request(frame: Frame, stage: StageAddress, size: int) -> StageRequest:
    """Decode a request to this stage. Inputs are token ids if the stage's layers start at 0.

    `size` is the number of values per token.

    Raises RefusedTensorError for an invalid frame and StageGoneError for a request to another stage.
    """
    header = frame.header
    _check_fields(header, _REQUEST_FIELDS)
    if not _is_addressed(frame, stage):
        raise StageGoneError("This node does not hold these layers of this run with these parameters.")
    precision, of_gradient = (_precision(header[name]) for name in ("precision", "gradient_precision"))
    parts = parts_by_name(frame)
    is_first = stage.layers.start == 0
    inputs = None
    if INPUTS in parts:
        inputs = read_ids(INPUTS, parts) if is_first else from_wire(INPUTS, parts, precision, size)
    return StageRequest(
        _operation(frame.kind),
        stage,
        _number(header, "session"),
        _number(header, "microbatch"),
        precision,
        of_gradient,
        inputs,
        read_ids(LABELS, parts) if LABELS in parts else None,
        from_wire(GRADIENT, parts, of_gradient, size) if GRADIENT in parts else None,
        read_ids(IDS, parts) if IDS in parts else None,
    )


def answer_frame(request: StageRequest, answer: StageAnswer) -> Frame:
    """Encode the answer to a request as a frame."""
    header: dict[str, WireValue] = {
        "session": request.session,
        "microbatch": request.microbatch,
        "root": answer.root,
        "loss_sum": answer.loss_sum,
        "compute_seconds": answer.compute_seconds,
        "recompute_seconds": answer.recompute_seconds,
        "seconds": answer.seconds,
        "claim": b64encode(answer.claim).decode(),
    }
    parts: list[TensorPart] = []
    if answer.output is not None:
        parts += to_wire(OUTPUT, answer.output, request.precision)
    if answer.gradient is not None:
        parts += to_wire(GRADIENT, answer.gradient, request.gradient_precision)
    for name, vector in ((LOSSES, answer.losses), (LOGITS, answer.logits)):
        if vector is not None:
            parts.append(part_of(name, vector))
    return Frame(request.operation.value, header, tuple(parts))


def read_answer(frame: Frame, request: StageRequest, size: int) -> StageAnswer:
    """Decode an answer. `size` is the number of values per token.

    Raises RefusedTensorError for a frame that cannot be the answer to this request.
    """
    header = frame.header
    _check_fields(header, _ANSWER_FIELDS)
    named = (frame.kind, header["session"], header["microbatch"])
    if named != (request.operation.value, request.session, request.microbatch):
        raise RefusedTensorError("The answer is for another microbatch.")
    try:
        claim = b64decode(_text(header, "claim"), validate=True)
    except ValueError:
        raise RefusedTensorError("The field 'claim' must be base64.") from None
    parts = parts_by_name(frame)
    loss_sum = header["loss_sum"]
    return StageAnswer(
        from_wire(OUTPUT, parts, request.precision, size) if OUTPUT in parts else None,
        _vector(LOSSES, parts) if LOSSES in parts else None,
        from_wire(GRADIENT, parts, request.gradient_precision, size) if GRADIENT in parts else None,
        _vector(LOGITS, parts) if LOGITS in parts else None,
        None if loss_sum is None else _real(loss_sum),
        _text(header, "root"),
        _seconds(header["compute_seconds"]),
        _seconds(header["recompute_seconds"]),
        _seconds(header["seconds"]),
        claim,
    )


def refusal_frame(error: StageError) -> Frame:
    """Encode a refusal. Its error name determines what the driver may do next."""
    return Frame(REFUSED, {"error": refusal_name(error), "reason": error.message[:MAX_REASON_CHARACTERS]})


def refusal_name(error: StageError) -> str:
    """Name of an error in a message."""
    return next((name for name, kind in REFUSALS.items() if type(error) is kind), "busy")


REFUSALS: Mapping[str, type[StageError]] = {
    "busy": StageBusyError,
    "not_handed": NotHandedYetError,
    "paused": StagePausedError,
    "unknown": UnknownMicrobatchError,
    "gone": StageGoneError,
    "tensor": RefusedTensorError,
    "spoilt": SpoiltMicrobatchError,
    "closed": ClosedSessionError,
    "unread": UnreadTextError,
}


def read_refusal(frame: Frame) -> StageError | None:
    """Decode a refusal; None if the frame is not a refusal. Raises RefusedTensorError for a malformed one."""
    if frame.kind != REFUSED:
        return None
    _check_fields(frame.header, {"error", "reason"})
    reason = _text(frame.header, "reason")
    kind = REFUSALS.get(_text(frame.header, "error"))
    if kind is None or len(reason) > MAX_REASON_CHARACTERS:
        raise RefusedTensorError("The refusal of the stage cannot be read.")
    return kind(reason)


def is_for_layers(frame: Frame, layers: LayerRange) -> bool:
    """Whether a request names exactly these layers."""
    named = frame.header.get("layers")
    return isinstance(named, Sequence) and list(named) == [layers.start, layers.stop]


def _is_addressed(frame: Frame, stage: StageAddress) -> bool:
    header = frame.header
    return is_for_layers(frame, stage.layers) and (header["run"], header["version"]) == (stage.run_id, stage.version)


def _check_fields(header: Mapping[str, WireValue], fields: set[str]) -> None:
    if set(header) != fields:
        raise RefusedTensorError(f"The header must have {', '.join(sorted(fields))}, and nothing else.")


def parts_by_name(frame: Frame) -> dict[str, TensorPart]:
    """Return the tensors of a frame by name. Raises RefusedTensorError if two have one name."""
    parts = {part.spec.name: part for part in frame.tensors}
    if len(parts) != len(frame.tensors):
        raise RefusedTensorError("Two tensors have one name.")
    return parts


def ids_part(name: str, ids: Tensor) -> tuple[TensorPart, ...]:
    """Encode token ids or labels (b, t) as a part of a frame. Raises RefusedTensorError beyond 32 bits."""
    travelling = ids.to(torch.int32)
    if not torch.equal(travelling, ids):
        raise RefusedTensorError(f"The token ids of {name!r} do not fit in 32 bits.")
    return (part_of(name, travelling),)


def _vector(name: str, parts: Mapping[str, TensorPart]) -> Tensor:
    part = parts[name]
    if part.spec.dtype != "float32" or len(part.spec.shape) != 1:
        raise RefusedTensorError(f"The {name} are fp32 values in one row.")
    return tensor_of(part)


def read_ids(name: str, parts: Mapping[str, TensorPart]) -> Tensor:
    """Decode token ids or labels (b, t) int64. Raises RefusedTensorError for another type."""
    part = parts[name]
    if part.spec.dtype != "int32":
        raise RefusedTensorError(f"The tensor {name!r} must be int32.")
    try:
        return tensor_of(part).to(torch.int64)
    except WireError as error:
        raise RefusedTensorError(error.message) from None


def _operation(kind: str) -> Operation:
    try:
        return Operation(kind)
    except ValueError:
        raise RefusedTensorError("No stage has this operation.") from None


def _precision(value: WireValue) -> WirePrecision:
    try:
        return WirePrecision(str(value))
    except ValueError:
        raise RefusedTensorError("Activations do not travel in this precision.") from None


def _number(header: Mapping[str, WireValue], name: str) -> int:
    value = header[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_NUMBER:
        raise RefusedTensorError(f"The field {name!r} must be a whole number of at least 0.")
    return value


def _text(header: Mapping[str, WireValue], name: str) -> str:
    value = header[name]
    if not isinstance(value, str):
        raise RefusedTensorError(f"The field {name!r} must be text.")
    return value


def _real(value: WireValue) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RefusedTensorError("A measured value must be a number.")
    return float(value)


def _seconds(value: WireValue) -> float:
    seconds = _real(value)
    if not (isfinite(seconds) and seconds >= 0):
        raise RefusedTensorError("A time must be a number of seconds.")
    return seconds


def recompute_seconds(operation: Operation, forward_seconds: float, compute_seconds: float) -> float:
    """Seconds that a stage without a kept graph spends on repeating the forward pass, in its backward pass."""
    return min(forward_seconds, compute_seconds) if operation is Operation.BACKWARD else 0.0


T = TypeVar("T")

SMALL_BYTES = 64 * 1024  # handled on the event loop, because changing the thread takes longer


async def run_off_loop(work: Callable[[], T], *tensors: Tensor | TensorPart | None) -> T:
    """Return the value of `work`. With large tensors, `work` runs on another thread."""
    if sum(map(_bytes, tensors)) <= SMALL_BYTES:
        return work()
    return await anyio.to_thread.run_sync(work)


def _bytes(tensor: Tensor | TensorPart | None) -> int:
    if tensor is None:
        return 0
    return tensor.nbytes if isinstance(tensor, Tensor) else tensor.spec.byte_count
