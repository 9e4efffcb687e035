"""Messages of the chain: questions to a stage that name its neighbours, receipts, and tensors that stages hand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, TypeAlias

import torch
from blake3 import blake3
from msgspec import Meta, Struct
from torch import Tensor

from neuroshard.config.run_parameters import WirePrecisionName
from neuroshard.messages import Frame, FrameLimits, TensorPart
from neuroshard.pipeline.microbatch import MicrobatchKey, RefusedTensorError, StageError, StageGoneError
from neuroshard.pipeline.stage_protocol import (
    GRADIENT,
    IDS,
    INPUTS,
    LABELS,
    MAX_REASON_CHARACTERS,
    REFUSALS,
    Operation,
    StageAddress,
    WirePrecision,
    from_wire,
    ids_part,
    parts_by_name,
    read_ids,
    refusal_name,
    to_wire,
    wire_bytes,
)
from neuroshard.pipeline.tensor_checks import LARGEST_RECEIVED, StageShapes, is_loss, is_within
from neuroshard.types import ID_BYTES, MAX_NODE_ID_CHARACTERS, HexDigest, LayerRange, NamedRun, NodeId

PASS, HAND = "chain/pass", "chain/hand"  # kinds of frames
FORWARD, LOSS, BACKWARD = "forward", "loss", "backward"  # passes
MAX_HEADER_BYTES = 2048

OPERATIONS = {FORWARD: Operation.FORWARD, LOSS: Operation.LOSS, BACKWARD: Operation.BACKWARD}  # the same in a star

PassName: TypeAlias = Literal["forward", "loss", "backward"]
TensorName: TypeAlias = Literal["inputs", "gradient"]  # INPUTS and GRADIENT of the star's messages
_Number = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_Node = Annotated[NodeId, Meta(min_length=1, max_length=MAX_NODE_ID_CHARACTERS)]
_Digest = Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]  # of a tensor's bytes on the wire, or ""


class Neighbour(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The node and the layers that come directly before or after a stage."""

    node_id: _Node
    layers: LayerRange


class PassQuestion(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Asks a stage for one pass of a microbatch. Tensors without a neighbour are in the frame.

    `previous` gives the inputs and gets their gradient; `next` gets the output and gives its gradient.
    """

    run: NamedRun
    layers: LayerRange
    version: _Number
    session: _Number
    microbatch: _Number
    name: PassName
    precision: WirePrecisionName
    gradient_precision: WirePrecisionName
    previous: Neighbour | None = None
    next: Neighbour | None = None

    @property
    def source(self) -> Neighbour | None:
        """The neighbour that gives the tensor of this pass; None: it is in the frame, or the stage has it already."""
        return self.next if self.name == BACKWARD else self.previous

    @property
    def target(self) -> Neighbour | None:
        """The neighbour that gets the result; None: the driver gets it."""
        return self.next if self.name == FORWARD else self.previous

    @property
    def given_name(self) -> TensorName:
        """Name of the tensor that the pass needs."""
        return "gradient" if self.name == BACKWARD else "inputs"

    @property
    def result_name(self) -> TensorName:
        """Name that the result has at the target."""
        return "inputs" if self.name == FORWARD else "gradient"

    def precision_of(self, name: str) -> WirePrecision:
        """Number format of a tensor of this microbatch on the wire."""
        return WirePrecision(self.gradient_precision if name == GRADIENT else self.precision)

    def key(self, driver: NodeId) -> MicrobatchKey:
        """The microbatch of the driver that asks."""
        return MicrobatchKey(driver, self.session, self.microbatch)


class StageRefusal(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Why a stage did not do what it was asked. The name determines what may be done next."""

    error: Annotated[str, Meta(max_length=32)]
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS)]

    @classmethod
    def of(cls, error: StageError) -> StageRefusal:
        """The refusal that a StageError becomes."""
        return cls(refusal_name(error), error.message[:MAX_REASON_CHARACTERS])

    def as_error(self) -> StageError:
        """The StageError. Raises RefusedTensorError for an unknown name."""
        kind = REFUSALS.get(self.error)
        if kind is None:
            raise RefusedTensorError("The refusal of the stage cannot be read.")
        return kind(self.reason)


class Receipt(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The work of a stage for a PassQuestion. The result is in the frame unless it was handed on, or there is none."""

    root: Annotated[str, Meta(max_length=64)]  # the stage's state root; "" without one
    was_handed: bool  # to the target
    taken: _Digest  # of the tensor that a neighbour gave; "" if none did, or for a repeated pass
    given: _Digest  # of the result; "" if there is none
    bytes_handed: _Number
    loss_sum: float | None  # nats; of the last stage
    arrival_seconds: _Seconds  # from the question to the neighbour's tensor
    compute_seconds: _Seconds
    recompute_seconds: _Seconds  # part of `compute_seconds` spent on a repeated forward pass
    hand_seconds: _Seconds  # spent on handing the result on
    seconds: _Seconds  # from the question to this receipt


class PassAnswer(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answer to a PassQuestion: exactly one of the two."""

    receipt: Receipt | None = None
    refusal: StageRefusal | None = None


class HandedTensor(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor for the neighbour, as the driver's questions to both have announced it.

    Without the tensor in the frame, this asks whether the neighbour wants it.
    """

    run: NamedRun
    layers: LayerRange  # of the receiver
    version: _Number
    driver: _Node
    session: _Number
    microbatch: _Number
    name: TensorName
    precision: WirePrecisionName
    digest: HexDigest  # BLAKE3 of the bytes of the tensor on the wire

    @property
    def key(self) -> MicrobatchKey:
        """The microbatch to which it belongs."""
        return MicrobatchKey(self.driver, self.session, self.microbatch)


class HandAnswer(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Answer to a HandedTensor."""

    is_wanted: bool = False  # False: the stage has it, or had it
    refusal: StageRefusal | None = None


HAND_ANSWER = FrameLimits(MAX_HEADER_BYTES, message=HandAnswer)


def pass_limits(shapes: StageShapes) -> FrameLimits:
    """Size limits of a question to a stage."""
    labels = ID_BYTES * shapes.batch_size * shapes.sequence_length if shapes.is_last else 0
    return FrameLimits(MAX_HEADER_BYTES, _largest_tensor(shapes) + labels, message=PassQuestion)


def hand_limits(shapes: StageShapes) -> FrameLimits:
    """Size limits of a tensor that is handed to a stage."""
    return FrameLimits(MAX_HEADER_BYTES, _largest_tensor(shapes), message=HandedTensor)


def receipt_limits(shapes: StageShapes) -> FrameLimits:
    """Size limits of a receipt."""
    return FrameLimits(MAX_HEADER_BYTES, _largest_tensor(shapes), message=PassAnswer)


def _largest_tensor(shapes: StageShapes) -> int:
    tokens = shapes.batch_size * shapes.sequence_length
    return wire_bytes(tokens, shapes.hidden_size) + ID_BYTES * tokens * (shapes.needs_ids or shapes.sends_ids)


def check_address(asked: PassQuestion | HandedTensor, stage: StageAddress) -> None:
    """Raise StageGoneError if a message is for another stage, run or version."""
    if (asked.run, asked.layers, asked.version) != (stage.run_id, stage.layers, stage.version):
        raise StageGoneError("This node does not hold these layers of this run with these parameters.")


def check_neighbours(question: PassQuestion) -> None:
    """Raise RefusedTensorError for neighbours whose layers leave a gap or overlap."""
    before, after = question.previous, question.next
    if before is not None and before.layers.stop != question.layers.start:
        raise RefusedTensorError("The layers of the previous stage do not end where those of this stage begin.")
    if after is not None and after.layers.start != question.layers.stop:
        raise RefusedTensorError("The layers of the next stage do not begin where those of this stage end.")


class Given(NamedTuple):
    """Inputs or a gradient of a stage. Coefficients of a subspace come with the ids of their tokens."""

    tensor: Tensor
    ids: Tensor | None = None  # (b, t)


@dataclass(frozen=True)
class PassTensors:
    """The tensors of a question, decoded."""

    given: Given | None = None
    labels: Tensor | None = None


def question_frame(question: PassQuestion, given: Given | None = None, labels: Tensor | None = None) -> Frame:
    """Encode a question as a frame. Raises RefusedTensorError for token ids that do not fit in 32 bits."""
    parts: list[TensorPart] = []
    name = question.given_name
    if given is not None and given.tensor.dtype is torch.int64:
        parts += ids_part(name, given.tensor)
    elif given is not None:
        parts += to_wire(name, given.tensor, question.precision_of(name))
    for of_tokens, ids in ((IDS, None if given is None else given.ids), (LABELS, labels)):
        if ids is not None:
            parts += ids_part(of_tokens, ids)
    return Frame(PASS, question, tuple(parts))


def read_tensors(frame: Frame, question: PassQuestion, shapes: StageShapes) -> PassTensors:
    """Decode the tensors of a question. Raises RefusedTensorError if they are not those of this pass."""
    parts = parts_by_name(frame)
    labels = read_ids(LABELS, parts) if LABELS in parts else None
    given = None
    name = question.given_name
    if name in parts:
        if question.source is not None:
            raise RefusedTensorError("The tensor of this pass must come from the neighbour.")
        given = read_given(name, parts, question.precision_of(name), shapes)
    return PassTensors(given, labels)


def read_given(name: str, parts: Mapping[str, TensorPart], precision: WirePrecision, shapes: StageShapes) -> Given:
    """Decode inputs or a gradient of a stage. Raises RefusedTensorError for parts that are neither."""
    if name == INPUTS and shapes.is_first:
        return Given(read_ids(INPUTS, parts))
    tensor = from_wire(name, parts, precision, shapes.hidden_size)
    return Given(tensor, read_ids(IDS, parts) if IDS in parts else None)


@dataclass(frozen=True)
class Passed:
    """A receipt that its driver has checked, and the result if it was not handed on."""

    receipt: Receipt
    tensor: Tensor | None


def refusal_of(frame: Frame) -> StageError | None:
    """The refusal in the answer to a question; None if there is none. Raises RefusedTensorError for an unknown one."""
    refusal = frame.read(PassAnswer).refusal
    return None if refusal is None else refusal.as_error()


def read_passed(frame: Frame, question: PassQuestion, shapes: StageShapes, labels: Tensor | None) -> Passed:
    """Decode the answer to a question. Raises RefusedTensorError if it cannot be the answer to this one."""
    receipt = frame.read(PassAnswer).receipt
    if receipt is None:
        raise RefusedTensorError("The answer contains neither a receipt nor a refusal.")
    name, tensor = question.result_name, None
    if frame.tensors:
        tensor = from_wire(name, parts_by_name(frame), question.precision_of(name), shapes.hidden_size)
        if not is_within(tensor, LARGEST_RECEIVED):
            raise RefusedTensorError("It contains values that are too large or not numbers.")
        if wire_digest(frame.tensors) != receipt.given:
            raise RefusedTensorError("The digest of the result is that of another tensor.")
    has_result = question.name == FORWARD or not shapes.is_first
    if has_result != bool(receipt.given) or (has_result and receipt.was_handed == (tensor is not None)):
        raise RefusedTensorError("The result is missing, or there is one too many.")
    if receipt.was_handed and question.target is None:
        raise RefusedTensorError("The result was handed to nobody.")
    is_loss_due = question.name == LOSS
    if (receipt.loss_sum is None) == is_loss_due:
        raise RefusedTensorError("It has a loss that was not requested, or no loss.")
    if receipt.loss_sum is not None and labels is not None and not is_loss(receipt.loss_sum, labels.numel()):
        raise RefusedTensorError("It has an impossible loss.")
    return Passed(receipt, tensor)


def wire_digest(parts: Sequence[TensorPart]) -> str:
    """BLAKE3 of the bytes of a tensor on the wire, in hex. Ids that come with it are the same at every stage."""
    digest = blake3()
    for part in (part for part in parts if part.spec.name != IDS):
        for data in (part.data, *part.more):
            digest.update(data)
    return digest.hexdigest()
