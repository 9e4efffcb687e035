"""Client of one stage, on this node or on a peer. A peer's answer is checked before it is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import anyio
import torch
from torch import Tensor

from neuroshard.data.held_out_losses import LossCheck, Measured
from neuroshard.errors import DataError, NeuroShardError
from neuroshard.messages import Frame, WireError
from neuroshard.network import (
    MessageTooLargeError,
    PeerRefusedError,
    PeerUnreachableError,
    ScoreReason,
    TransportClosedError,
)
from neuroshard.network.transport import Requester
from neuroshard.pipeline.microbatch import DisputedTensorError, MicrobatchKey, RefusedTensorError, StageGoneError
from neuroshard.pipeline.stage_protocol import (
    Operation,
    StageAddress,
    StageAnswer,
    StageRequest,
    WirePrecision,
    answer_limits,
    read_answer,
    read_refusal,
    recompute_seconds,
    request_frame,
    run_off_loop,
)
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.pipeline.tensor_checks import LARGEST_LOSS, LARGEST_RECEIVED, StageShapes, is_loss, is_within
from neuroshard.signals import first_of
from neuroshard.types import NodeId

T = TypeVar("T")
_HERE = NodeId("this node")


REMEMBERED_TIMINGS = 64  # of a hop: more than a driver's microbatches under way can have
TIMED = frozenset({Operation.FORWARD, Operation.LOSS, Operation.BACKWARD})  # a microbatch's requests


@dataclass(frozen=True)
class RequestTiming:
    """One request that was answered."""

    operation: Operation
    session: int
    microbatch: int
    seconds: float  # from the request to the answer
    stage_seconds: float  # of those at the stage, says the stage
    compute_seconds: float  # of those at work, says the stage
    recompute_seconds: float = 0.0  # of those for a forward pass done again, says the stage
    bytes_sent: int = 0  # tensors only
    bytes_received: int = 0

    @property
    def wire_seconds(self) -> float:
        """On the way there and back."""
        return max(0.0, self.seconds - self.stage_seconds)

    @property
    def wait_seconds(self) -> float:
        """At the stage, but not at work."""
        return max(0.0, self.stage_seconds - self.compute_seconds)


class StageClient(Protocol):
    """One stage, here or on a peer. The first stage takes token ids, the last one also labels.

    Every method raises StageError, whose class says what may be tried next; repeating a call does no harm.
    """

    @property
    def node_id(self) -> NodeId:
        """Who does the work."""
        ...

    @property
    def state_root(self) -> str:
        """Names the weights behind the last answer: two hops with one root have equal ones; "" when it is unknown."""
        ...

    @property
    def timings(self) -> Sequence[RequestTiming]:
        """Of the last requests of microbatches, the newest last."""
        ...

    async def forward(self, key: MicrobatchKey, inputs: Tensor) -> Tensor:
        """Activations for the next stage."""
        ...

    async def loss(self, key: MicrobatchKey, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Forward and backward of the last stage in one call: summed loss and gradient of the inputs."""
        ...

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        """Gradient of the inputs; None from the first stage."""
        ...

    async def infer(self, inputs: Tensor) -> Tensor:
        """Forward only: activations for the next stage."""
        ...

    async def measure(self, inputs: Tensor, labels: Tensor) -> Measured:
        """Forward only, of the last stage: the loss of each sequence, summed over its tokens."""
        ...

    async def read(self, session: int, position: int, inputs: Tensor) -> Tensor:
        """The next tokens of one text, whose position 0 begins it anew: activations, or the last stage's logits."""
        ...

    async def forget(self, session: int) -> None:
        """Let the stage forget a text."""
        ...

    async def close(self, driver: NodeId, session: int) -> None:
        """Let the stage forget a session whose microbatches are done."""
        ...


class LocalStageClient:
    """A stage on this node."""

    def __init__(self, service: StageServer, node_id: NodeId = _HERE, root: Callable[[], str] = lambda: "") -> None:
        """`root` names the stage's present weights."""
        self.service = service
        self.node_id = node_id
        self.timings: deque[RequestTiming] = deque(maxlen=REMEMBERED_TIMINGS)
        self._root = root

    @property
    def state_root(self) -> str:
        """See StageClient."""
        return self._root()

    async def forward(self, key: MicrobatchKey, inputs: Tensor) -> Tensor:
        """See StageClient."""
        return await self._timed(Operation.FORWARD, key, self.service.forward(key, inputs))

    async def loss(self, key: MicrobatchKey, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """See StageClient."""
        return await self._timed(Operation.LOSS, key, self.service.loss(key, inputs, labels))

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        """See StageClient."""
        return await self._timed(Operation.BACKWARD, key, self.service.backward(key, gradient))

    async def infer(self, inputs: Tensor) -> Tensor:
        """See StageClient."""
        return await self.service.infer(inputs)

    async def measure(self, inputs: Tensor, labels: Tensor) -> Measured:
        """See StageClient."""
        return Measured(await self.service.infer(inputs, labels))

    async def read(self, session: int, position: int, inputs: Tensor) -> Tensor:
        """See StageClient; also while the node is paused, for its own texts."""
        return await self.service.texts.read(self.node_id, session, position, inputs)

    async def forget(self, session: int) -> None:
        """See StageClient."""
        self.service.texts.forget(self.node_id, session)

    async def close(self, driver: NodeId, session: int) -> None:
        """See StageClient."""
        self.service.close(driver, session)

    async def _timed(self, operation: Operation, key: MicrobatchKey, work: Awaitable[T]) -> T:
        """The value of `work`; what the service did not compute of the time it waited."""
        began, before = anyio.current_time(), self.service.compute_seconds(key)
        answer = await work
        seconds = anyio.current_time() - began
        worked = max(0.0, self.service.compute_seconds(key) - before)
        again = recompute_seconds(operation, before, worked) if self.service.is_recomputed(key) else 0.0
        self.timings.append(RequestTiming(operation, key.session, key.microbatch, seconds, seconds, worked, again))
        return answer


@dataclass(frozen=True)
class MicrobatchResult:
    """What the last stage measured."""

    loss_sum: Tensor  # scalar, nats summed over tokens; still on the last stage's device
    token_count: int


Shape: TypeAlias = "tuple[int, ...]"

CLOSE_SECONDS = 5.0
LEAST_MOVED_BYTES = 1 << 16  # within the timeout: less is keeping a connection up
LOOKS = 30  # at what has moved, within the timeout: a line may fall silent at any moment of it


@dataclass(frozen=True)
class StageClientOptions:
    """How a stage on a peer is used."""

    precision: WirePrecision = WirePrecision.FP32
    timeout_seconds: float = 60.0  # nothing moves for so long; more than a stage lets a microbatch wait
    slowest_bytes_per_second: float = 32_000.0  # a line that moves may take so long for all that is on the way


class RemoteStageClient:
    """See StageClient. `state_root` is what the peer last told of its weights.

    Whatever the peer does ends as a StageError, and none of them is RefusedTensorError: only this node's own stage may
    find that its data are wrong.
    """

    def __init__(
        self,
        transport: Requester,
        peer: NodeId,
        stage: StageAddress,
        shapes: StageShapes,
        options: StageClientOptions | None = None,
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
        self.timings: deque[RequestTiming] = deque(maxlen=REMEMBERED_TIMINGS)
        self._transport = transport
        self._shapes = shapes
        self._options = options or StageClientOptions()
        self._report = report
        self._check = check
        self._moved = moved
        self._on_the_way = 0  # bytes of tensors, of requests and of their answers

    async def forward(self, key: MicrobatchKey, inputs: Tensor) -> Tensor:
        """See StageClient."""
        request = self._request(Operation.FORWARD, key, inputs=inputs)
        return _present((await self._ask(request, output=self._like(inputs))).output)

    async def loss(self, key: MicrobatchKey, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """See StageClient."""
        request = self._request(Operation.LOSS, key, inputs=inputs, labels=labels)
        answer = await self._ask(request, gradient=self._gradient_like(inputs))
        return _present(None if answer.loss_sum is None else torch.tensor(answer.loss_sum)), answer.gradient

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        """See StageClient."""
        request = self._request(Operation.BACKWARD, key, gradient=gradient)
        return (await self._ask(request, gradient=self._gradient_like(gradient))).gradient

    async def infer(self, inputs: Tensor) -> Tensor:
        """See StageClient."""
        request = self._request(Operation.INFER, None, inputs=inputs)
        return _present((await self._ask(request, output=self._like(inputs))).output)

    async def measure(self, inputs: Tensor, labels: Tensor) -> Measured:
        """See StageClient. Losses that are numbers come with the peer's signature."""
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
        """See StageClient."""
        shapes, request = self._shapes, self._request(Operation.READ, self._place(session, position), inputs=inputs)
        if shapes.is_last:
            return _present((await self._ask(request, logits=(shapes.vocabulary_size,))).logits)
        return _present((await self._ask(request, output=self._like(inputs))).output)

    async def forget(self, session: int) -> None:
        """See StageClient."""
        with anyio.move_on_after(CLOSE_SECONDS):
            await self._ask(self._request(Operation.FORGET, self._place(session, 0)))

    async def close(self, driver: NodeId, session: int) -> None:
        """See StageClient; a stage closes the sessions of the driver that asks."""
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
        frame = await run_off_loop(lambda: request_frame(request), request.inputs, request.gradient)
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
            answer = await run_off_loop(checked, *reply.tensors)
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


def _timing(request: StageRequest, answer: StageAnswer, seconds: float, sent: Frame, received: Frame) -> RequestTiming:
    """Nothing that a peer says took longer than its answer did."""
    at_stage = min(answer.seconds, seconds)
    at_work = min(answer.compute_seconds, at_stage)
    return RequestTiming(
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
