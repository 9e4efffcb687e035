"""The chain at one stage: answers to a driver's questions, tensors taken from neighbours, results handed to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import anyio
from torch import Tensor

from neuroshard.errors import NeuroShardError
from neuroshard.messages import Frame, TensorPart
from neuroshard.network import ScoreReason, Transport
from neuroshard.network.transport import Requester, RequestHandler
from neuroshard.pipeline.chain_protocol import (
    FORWARD,
    HAND,
    HAND_ANSWER,
    LOSS,
    OPERATIONS,
    PASS,
    Given,
    HandAnswer,
    HandedTensor,
    Neighbour,
    PassAnswer,
    PassQuestion,
    PassTensors,
    Receipt,
    StageRefusal,
    check_address,
    check_neighbours,
    hand_limits,
    pass_limits,
    read_given,
    read_tensors,
    wire_digest,
)
from neuroshard.pipeline.handed_tensors import HandedTensors
from neuroshard.pipeline.microbatch import (
    MicrobatchKey,
    RefusedTensorError,
    Retry,
    StageBusyError,
    StageError,
    UnknownMicrobatchError,
)
from neuroshard.pipeline.stage_protocol import (
    GRADIENT,
    IDS,
    INPUTS,
    MAX_REASON_CHARACTERS,
    StageAddress,
    WirePrecision,
    ids_part,
    parts_by_name,
    recompute_seconds,
    run_off_loop,
    to_wire,
)
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.pipeline.tensor_checks import StageShapes, checked_loss
from neuroshard.types import LayerRange, NodeId

_LOG = logging.getLogger(__name__)

# A question must be answered before the driver gives this stage up, after 60 s without a moving byte. It waits for its
# tensor, for room (10 s), for a busy neighbour and for an answer of it. The driver then asks again.
ARRIVAL_SECONDS = 15.0
HAND_SECONDS = 10.0
ANSWER_SECONDS = 15.0
SLOWEST_BYTES_PER_SECOND = 32_000.0  # of a line to a neighbour
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 0.05, 1.0  # before a busy neighbour is asked again
MOST_WAITING = 64  # questions that wait for inputs; those that wait for gradients are bounded by open microbatches
MAX_CONCURRENT = 128  # questions, and handed tensors


@dataclass(frozen=True)
class Neighbours:
    """The way from a node to the holders of the stages before and after its own."""

    requester: Requester
    holds: Callable[[NodeId, LayerRange], bool]  # whether a node is known to hold these layers


@dataclass(frozen=True)
class _Result:
    """Tensor, loss and times of a pass."""

    tensor: Tensor | None  # output or gradient; None in the first stage's backward pass
    loss_sum: float | None = None
    taken: str = ""  # digest of the tensor that the neighbour gave
    arrival_seconds: float = 0.0
    is_new: bool = True  # False: it was done before


class ChainRequestHandler:
    """Answers the questions of drivers to one stage, and takes the tensors that its neighbours hand to it."""

    def __init__(
        self,
        service: StageServer,
        stage: StageAddress,
        shapes: StageShapes,
        neighbours: Neighbours,
        *,
        root: Callable[[], str] = lambda: "",
        may_drive: Callable[[NodeId], bool] = lambda _: True,
        report: Callable[[NodeId, ScoreReason], None] = lambda _peer, _reason: None,
    ) -> None:
        """`root` returns the stage's present state root; `report` gets misbehaviour of peers."""
        self._service = service
        self._stage = stage
        self._shapes = shapes
        self._neighbours = neighbours
        self._root = root
        self._may_drive = may_drive
        self._report = report
        self._handed = HandedTensors(service.most_open, service.open_of_driver)
        self._waiting = 0

    def serve(self, transport: Transport) -> None:
        """Register the request handlers. Raises ValueError if the transport already has those of a stage."""
        serve_chain(transport, (self._shapes,), self.answer, self.take)

    def close(self, driver: NodeId, session: int) -> None:
        """Forget the tensors of a session."""
        self._handed.close(driver, session)

    def keep_only(self, drivers: Container[NodeId]) -> None:
        """Forget the tensors of all other drivers."""
        self._handed.keep_only(drivers)

    async def answer(self, sender: NodeId, frame: Frame) -> Frame:
        """Answer a question of a driver. Every StageError becomes a refusal frame."""
        if not self._may_drive(sender):
            return refused(PASS, StageBusyError("This node works for members of its run only."))
        question = frame.read(PassQuestion)
        try:
            check_address(question, self._stage)
            check_neighbours(question)
            tensors = await run_off_loop(lambda: read_tensors(frame, question, self._shapes), *frame.tensors)
            return await self._receipt(question.key(sender), question, tensors)
        except RefusedTensorError as error:
            if question.source is None:  # otherwise the tensor was not the driver's
                self._report(sender, ScoreReason.UNEXPECTED_TENSOR)
            return refused(PASS, error)
        except StageError as error:
            return refused(PASS, error)

    async def take(self, sender: NodeId, frame: Frame) -> Frame:
        """Take a neighbour's tensor that a driver has announced. Every StageError becomes a refusal frame."""
        offer = frame.read(HandedTensor)
        try:
            check_address(offer, self._stage)
            if offer.name == GRADIENT and not self._service.is_open(offer.key):
                raise StageBusyError("The microbatch is not open here.")
            precision = WirePrecision(offer.precision)
            is_wanted = self._handed.check(sender, offer.key, offer.name, precision, offer.digest)
            if is_wanted and frame.tensors:
                given = await run_off_loop(lambda: self._decoded(offer, frame), *frame.tensors)
                self._handed.put(offer.key, offer.name, given, offer.digest)
                is_wanted = False
            return Frame(HAND, HandAnswer(is_wanted))
        except RefusedTensorError as error:
            self._report(sender, ScoreReason.UNEXPECTED_TENSOR)
            return refused(HAND, error)
        except StageError as error:
            return refused(HAND, error)

    def _decoded(self, offer: HandedTensor, frame: Frame) -> Given:
        if wire_digest(frame.tensors) != offer.digest:
            raise RefusedTensorError("The digest is that of another tensor.")
        return read_given(offer.name, parts_by_name(frame), WirePrecision(offer.precision), self._shapes)

    async def _receipt(self, key: MicrobatchKey, question: PassQuestion, tensors: PassTensors) -> Frame:
        began = time.perf_counter()
        before, _ = self._service.computed(key)
        result = await self._result(key, question, tensors)
        after, is_recomputed = self._service.computed(key)
        worked = max(0.0, after - before)
        parts = await run_off_loop(lambda: self._encoded(question, result.tensor), result.tensor)
        handed = parts + self._ids_parts(key, question)
        given, hand_began = wire_digest(parts) if parts else "", time.perf_counter()
        was_handed = bool(parts) and await self._hand(key, question, handed, given, is_new=result.is_new)
        ended = time.perf_counter()
        receipt = Receipt(
            root=self._root(),
            was_handed=was_handed,
            taken=result.taken,
            given=given,
            bytes_handed=sum(part.spec.byte_count for part in handed) if was_handed else 0,
            loss_sum=result.loss_sum,
            arrival_seconds=result.arrival_seconds,
            compute_seconds=worked,
            recompute_seconds=recompute_seconds(OPERATIONS[question.name], before, worked) if is_recomputed else 0.0,
            hand_seconds=ended - hand_began,
            seconds=ended - began,
        )
        return Frame(PASS, PassAnswer(receipt), () if was_handed else parts)

    @staticmethod
    def _encoded(question: PassQuestion, tensor: Tensor | None) -> tuple[TensorPart, ...]:
        name = question.result_name
        return () if tensor is None else to_wire(name, tensor, question.precision_of(name))

    def _ids_parts(self, key: MicrobatchKey, question: PassQuestion) -> tuple[TensorPart, ...]:
        ids = self._service.ids_to_send(key) if question.name == FORWARD else None
        return () if ids is None else ids_part(IDS, ids)

    async def _result(self, key: MicrobatchKey, question: PassQuestion, tensors: PassTensors) -> _Result:
        """Do the pass, or return its result from memory."""
        is_forward = question.name == FORWARD
        self._announce(key, question)
        known = await self._service.remembered(key, is_forward=is_forward)
        if known is not None:
            loss = None if known.loss_sum is None else known.loss_sum.item()
            return _Result(known.output if is_forward else known.gradient_to_send(), loss, is_new=False)
        given, taken, began = tensors.given, "", time.perf_counter()
        if question.source is not None:
            given, taken = await self._arrival(key, question.given_name)
        elif given is None:
            raise UnknownMicrobatchError(f"Microbatch {key.microbatch} has not had this pass here.")
        arrival_seconds = time.perf_counter() - began
        loss_sum: float | None = None
        if question.name == LOSS:
            if tensors.labels is None:
                raise RefusedTensorError("The last stage needs labels.")
            summed, tensor = await self._service.loss(key, given.tensor, tensors.labels, given.ids)
            loss_sum = checked_loss(summed, tensors.labels)
        elif is_forward:
            tensor = await self._service.forward(key, *given)
        else:
            tensor = await self._service.backward(key, given.tensor)
        self._handed.used(key, question.given_name)
        return _Result(tensor, loss_sum, taken, arrival_seconds)

    def _announce(self, key: MicrobatchKey, question: PassQuestion) -> None:
        """Take the tensors that this question announces: the one of this pass, and the gradient of a later one."""
        source, after = question.source, question.next
        if source is not None:
            if not self._neighbours.holds(source.node_id, source.layers):
                raise StageBusyError("The neighbour is not known to hold its layers.")
            name = question.given_name
            self._handed.announce(key, name, source.node_id, question.precision_of(name))
        if question.name == FORWARD and after is not None:
            self._handed.announce(key, GRADIENT, after.node_id, question.precision_of(GRADIENT))

    async def _arrival(self, key: MicrobatchKey, name: str) -> tuple[Given, str]:
        if name == INPUTS and self._waiting >= MOST_WAITING:
            raise StageBusyError("Too many questions wait here for the tensors of neighbours.")
        self._waiting += 1
        try:
            return await self._handed.wait_for(key, name, ARRIVAL_SECONDS)
        finally:
            self._waiting -= 1

    async def _hand(
        self,
        key: MicrobatchKey,
        question: PassQuestion,
        parts: tuple[TensorPart, ...],
        digest: str,
        *,
        is_new: bool,
    ) -> bool:
        """Hand a result to the target of a question; whether it has it now. Raises StageBusyError if it stays busy.

        A new result is sent at once. Later the target is asked first whether it wants it: otherwise anybody could make
        this node send the same tensor again and again.
        """
        target = question.target
        if target is None or not self._neighbours.holds(target.node_id, target.layers):
            return False
        name = question.result_name
        precision = question.gradient_precision if name == GRADIENT else question.precision
        address = question.run, target.layers, question.version, key.driver, key.session, key.microbatch
        offer = HandedTensor(*address, name, precision, digest)
        until, pause = anyio.current_time() + HAND_SECONDS, FIRST_RETRY_SECONDS
        sends = parts if is_new else ()
        while True:
            reply = await self._sent(target, Frame(HAND, offer, sends))
            if reply is None:
                return False
            if reply.refusal is None:
                if not reply.is_wanted:
                    return True
                sends = parts
                continue
            if reply.refusal.as_error().retry is not Retry.HERE:
                return False
            if anyio.current_time() >= until:
                raise StageBusyError(f"The neighbour takes nothing now: {reply.refusal.reason}"[:MAX_REASON_CHARACTERS])
            await anyio.sleep(pause)
            pause, sends = min(2 * pause, LAST_RETRY_SECONDS), ()

    async def _sent(self, target: Neighbour, frame: Frame) -> HandAnswer | None:
        """Return the target's answer; None if it cannot be reached or does not understand."""
        size = sum(part.spec.byte_count for part in frame.tensors)
        seconds = ANSWER_SECONDS + size / SLOWEST_BYTES_PER_SECOND
        try:
            return (
                await self._neighbours.requester.request(
                    target.node_id, frame, reply=HAND_ANSWER, timeout_seconds=seconds
                )
            ).read(HandAnswer)
        except NeuroShardError as error:
            _LOG.debug("A tensor was not handed to %s: %s", target.node_id, error)
            return None


def serve_chain(
    transport: Transport, every: Sequence[StageShapes], answer: RequestHandler, take: RequestHandler
) -> None:
    """Register the handlers of questions and of handed tensors for stages of these shapes. Raises ValueError."""
    for kind, handler, limits_of in ((PASS, answer, pass_limits), (HAND, take, hand_limits)):
        limits = max(map(limits_of, every), key=lambda one: one.max_body_bytes)
        transport.serve(kind, handler, limits, max_concurrent=MAX_CONCURRENT)


def refused(kind: str, error: StageError) -> Frame:
    """The answer of this kind that refuses."""
    refusal = StageRefusal.of(error)
    return Frame(kind, PassAnswer(refusal=refusal) if kind == PASS else HandAnswer(refusal=refusal))
