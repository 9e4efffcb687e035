"""A stage on a peer, as a hop of a route: requests with a deadline, answers that are checked before they are used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import anyio
import torch
from torch import Tensor

from neuroshard.errors import DataError, NeuroShardError
from neuroshard.network import (
    MessageTooLargeError,
    PeerRefusedError,
    PeerUnreachableError,
    ScoreReason,
    TransportClosedError,
)
from neuroshard.training.beside import beside
from neuroshard.training.control import first_of
from neuroshard.training.held_out_claim import LossCheck, Measured
from neuroshard.training.microbatch import DisputedTensorError, MicrobatchKey, RefusedTensorError, StageGoneError
from neuroshard.training.stage_frames import (
    Operation,
    StageAddress,
    StageAnswer,
    StageRequest,
    answer_limits,
    read_answer,
    read_refusal,
    request_frame,
)
from neuroshard.training.stage_shapes import StageShapes
from neuroshard.training.timing import REMEMBERED_TIMINGS, TIMED, HopTiming
from neuroshard.training.value_bounds import LARGEST_LOSS, LARGEST_RECEIVED, is_loss, is_within
from neuroshard.training.wire_precision import WirePrecision
from neuroshard.types import NodeId
from neuroshard.wire import Frame, FrameLimits, WireError

Shape: TypeAlias = "tuple[int, ...]"

CLOSE_SECONDS = 5.0
LEAST_MOVED_BYTES = 1 << 16  # within the timeout: less is keeping a connection up
LOOKS = 30  # at what has moved, within the timeout: a line may fall silent at any moment of it


@dataclass(frozen=True)
class HopOptions:
    """How a stage on a peer is used."""

    precision: WirePrecision = WirePrecision.FP32
    timeout_seconds: float = 60.0  # nothing moves for so long; more than a stage lets a microbatch wait
    slowest_bytes_per_second: float = 32_000.0  # a line that moves may take so long for all that is on the way


class Requester(Protocol):
    """The part of a Transport that a hop needs."""

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """See Transport.request."""
        ...


class RemoteHop:
    """See Hop. `state_root` is what the peer last told of its weights.

    Whatever the peer does ends as a StageError, and none of them is RefusedTensorError: only this node's own stage may
    find that its data are wrong.
    """

    def __init__(
        self,
        transport: Requester,
        peer: NodeId,
        stage: StageAddress,
        shapes: StageShapes,
        options: HopOptions | None = None,
        *,
        report: Callable[[NodeId, ScoreReason], None] = lambda _peer, _reason: None,
        check: LossCheck | None = None,
        moved: Callable[[NodeId], int] = lambda _peer: 0,
    ) -> None:
        """`report` is told what the peer did well or wrong, `check` reads its signed word for losses.

        `moved` counts the bytes to and from the peer: a request on a slow line is not given up while they rise.
        """
        self.node_id = peer
        self.stage = stage
        self.state_root = ""
        self.timings: deque[HopTiming] = deque(maxlen=REMEMBERED_TIMINGS)
        self._transport = transport
        self._shapes = shapes
        self._options = options or HopOptions()
        self._report = report
        self._check = check
        self._moved = moved
        self._on_the_way = 0  # bytes of tensors, of requests and of their answers

    async def forward(self, key: MicrobatchKey, inputs: Tensor) -> Tensor:
        """See Hop."""
        request = self._request(Operation.FORWARD, key, inputs=inputs)
        return _present((await self._ask(request, output=self._like(inputs))).output)

    async def loss(self, key: MicrobatchKey, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """See Hop."""
        request = self._request(Operation.LOSS, key, inputs=inputs, labels=labels)
        answer = await self._ask(request, gradient=self._gradient_like(inputs))
        return _present(None if answer.loss_sum is None else torch.tensor(answer.loss_sum)), answer.gradient

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        """See Hop."""
        request = self._request(Operation.BACKWARD, key, gradient=gradient)
        return (await self._ask(request, gradient=self._gradient_like(gradient))).gradient

    async def infer(self, inputs: Tensor) -> Tensor:
        """See Hop."""
        request = self._request(Operation.INFER, None, inputs=inputs)
        return _present((await self._ask(request, output=self._like(inputs))).output)

    async def measure(self, inputs: Tensor, labels: Tensor) -> Measured:
        """See Hop. Losses that are numbers come with the peer's signature."""
        request = self._request(Operation.INFER, None, inputs=inputs, labels=labels)
        answer = await self._ask(request, losses=(len(labels),))
        summed = _present(answer.losses)
        if self._check is None or not bool(torch.isfinite(summed).all()):
            return Measured(summed)
        try:
            return Measured(summed, self._check(self.node_id, answer.claim, labels, summed))
        except DataError as error:
            raise self._unusable(error.message, ScoreReason.BAD_SIGNATURE) from error

    async def read(self, session: int, position: int, inputs: Tensor) -> Tensor:
        """See Hop."""
        shapes, request = self._shapes, self._request(Operation.READ, self._place(session, position), inputs=inputs)
        if shapes.is_last:
            return _present((await self._ask(request, logits=(shapes.vocabulary_size,))).logits)
        return _present((await self._ask(request, output=self._like(inputs))).output)

    async def forget(self, session: int) -> None:
        """See Hop."""
        with anyio.move_on_after(CLOSE_SECONDS):
            await self._ask(self._request(Operation.FORGET, self._place(session, 0)))

    async def close(self, driver: NodeId, session: int) -> None:
        """See Hop; a stage closes the sessions of the driver that asks."""
        with anyio.move_on_after(CLOSE_SECONDS):
            await self._ask(self._request(Operation.CLOSE, MicrobatchKey(driver, session, 0)))

    def _request(
        self,
        operation: Operation,
        key: MicrobatchKey | None,
        *,
        inputs: Tensor | None = None,
        labels: Tensor | None = None,
        gradient: Tensor | None = None,
    ) -> StageRequest:
        session, microbatch = (0, 0) if key is None else (key.session, key.microbatch)
        # a text is short, and its tokens shall be those of the model in one piece
        precision = WirePrecision.FP32 if operation is Operation.READ else self._options.precision
        return StageRequest(operation, self.stage, session, microbatch, precision, inputs, labels, gradient)

    def _place(self, session: int, position: int) -> MicrobatchKey:
        return MicrobatchKey(self.node_id, session, position)

    def _like(self, tensor: Tensor) -> Shape:
        """Shape of the activations for as many tokens."""
        return (*tensor.shape[:2], self._shapes.hidden_size)

    def _gradient_like(self, tensor: Tensor) -> Shape | None:
        return None if self._shapes.is_first else self._like(tensor)

    async def _ask(
        self,
        request: StageRequest,
        *,
        output: Shape | None = None,
        gradient: Shape | None = None,
        losses: Shape | None = None,
        logits: Shape | None = None,
    ) -> StageAnswer:
        """The answer, which has exactly the tensors of these shapes."""
        began = anyio.current_time()
        frame = await beside(lambda: request_frame(request), request.inputs, request.gradient)
        reply = await self._sent(frame)

        def checked() -> StageAnswer:
            answer = read_answer(reply, request)
            _check_tensor(answer.output, output)
            _check_tensor(answer.gradient, gradient)
            _check_tensor(answer.logits, logits)
            _check_losses(answer.losses, losses, request)
            _check_loss(answer.loss_sum, request)
            return answer

        try:
            answer = await beside(checked, *reply.tensors)
        except RefusedTensorError as error:
            raise self._unusable(error.message) from error
        self.state_root = answer.root
        self._report(self.node_id, ScoreReason.GOOD_ANSWER)
        if request.operation in TIMED:
            self.timings.append(_timing(request, answer, anyio.current_time() - began, frame, reply))
        return answer

    async def _sent(self, frame: Frame) -> Frame:
        """The reply, whatever it says."""
        try:
            reply = await self._moving(frame)
            refusal = read_refusal(reply)
        except (PeerUnreachableError, PeerRefusedError, TransportClosedError, MessageTooLargeError) as error:
            raise StageGoneError(error.message) from error
        except (WireError, RefusedTensorError) as error:
            raise self._unusable(error.message) from error
        if isinstance(refusal, RefusedTensorError):
            raise DisputedTensorError(f"Peer {self.node_id} refused: {refusal.message}")
        if refusal is not None:
            raise refusal
        return reply

    async def _moving(self, frame: Frame) -> Frame:
        """The reply, however long it takes while bytes move, within the time of the slowest line for all of them."""
        limits, options = answer_limits(self._shapes), self._options
        size = _tensor_bytes(frame) + limits.max_body_bytes
        self._on_the_way += size
        longest = options.timeout_seconds + self._on_the_way / options.slowest_bytes_per_second
        replies = list[Frame | NeuroShardError]()

        async def ask() -> None:
            request = self._transport.request(self.node_id, frame, reply=limits, timeout_seconds=longest)
            try:
                replies.append(await request)
            except NeuroShardError as error:
                replies.append(error)

        try:
            await first_of(ask, self._standstill)
        finally:
            self._on_the_way -= size
        if not replies:
            self._report(self.node_id, ScoreReason.TIMEOUT)
            raise StageGoneError(f"Nothing came from peer {self.node_id} for {options.timeout_seconds:g} s.")
        if isinstance(replies[0], NeuroShardError):
            raise replies[0]
        return replies[0]

    async def _standstill(self) -> None:
        """Wait until next to nothing moves for as long as a request may take on a line that is dead."""
        counts = deque([self._moved(self.node_id)], maxlen=LOOKS + 1)
        while True:
            await anyio.sleep(self._options.timeout_seconds / LOOKS)
            counts.append(self._moved(self.node_id))
            if len(counts) > LOOKS and counts[-1] - counts[0] < LEAST_MOVED_BYTES:
                return

    def _unusable(self, reason: str, fault: ScoreReason = ScoreReason.UNEXPECTED_TENSOR) -> StageGoneError:
        self._report(self.node_id, fault)
        return StageGoneError(f"The answer of peer {self.node_id} cannot be used. {reason}")


def _check_shape(tensor: Tensor | None, shape: Shape | None) -> None:
    if (None if tensor is None else tuple(tensor.shape)) != shape:
        raise RefusedTensorError("It has tensors of other shapes.")


def _check_tensor(tensor: Tensor | None, shape: Shape | None) -> None:
    """Raises RefusedTensorError for a tensor of another shape, or with values that no honest stage gives."""
    _check_shape(tensor, shape)
    if tensor is not None and not is_within(tensor, LARGEST_RECEIVED):
        raise RefusedTensorError("It holds values that are too large, or no numbers.")


def _check_losses(losses: Tensor | None, shape: Shape | None, request: StageRequest) -> None:
    """Of evaluations; they are no numbers when the model has diverged."""
    _check_shape(losses, shape)
    if losses is not None and request.labels is not None:
        most = LARGEST_LOSS * request.labels.shape[1]
        if bool(((losses < 0) | ((losses > most) & torch.isfinite(losses))).any()):
            raise RefusedTensorError("It has losses that cannot be.")


def _check_loss(loss_sum: float | None, request: StageRequest) -> None:
    if (loss_sum is None) == (request.operation is Operation.LOSS):
        raise RefusedTensorError("It has a loss that nobody asked for, or none.")
    if loss_sum is not None and request.labels is not None and not is_loss(loss_sum, request.labels.numel()):
        raise RefusedTensorError("It has a loss that cannot be.")


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("an answer without a tensor passed its checks")
    return tensor


def _timing(request: StageRequest, answer: StageAnswer, seconds: float, sent: Frame, received: Frame) -> HopTiming:
    """Nothing that a peer says took longer than its answer did."""
    at_stage = min(answer.seconds, seconds)
    at_work = min(answer.compute_seconds, at_stage)
    return HopTiming(
        request.operation,
        request.session,
        request.microbatch,
        seconds,
        at_stage,
        at_work,
        min(answer.recompute_seconds, at_work),
        _tensor_bytes(sent),
        _tensor_bytes(received),
    )


def _tensor_bytes(frame: Frame) -> int:
    return sum(part.spec.byte_count for part in frame.tensors)
