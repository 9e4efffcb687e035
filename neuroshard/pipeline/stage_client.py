"""Client of one stage, on this node or on a peer. A peer's answer is checked before it is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, TypeVar

import anyio
import torch
from torch import Tensor

from neuroshard.data.held_out_losses import LossCheck, Measured
from neuroshard.errors import DataError, NeuroShardError
from neuroshard.messages import Frame, FrameLimits, WireError
from neuroshard.network import (
    MessageTooLargeError,
    PeerRefusedError,
    PeerUnreachableError,
    ScoreReason,
    TransportClosedError,
)
from neuroshard.network.transport import Requester
from neuroshard.pipeline.chain_protocol import (
    OPERATIONS,
    Given,
    Neighbour,
    Passed,
    PassName,
    PassQuestion,
    Receipt,
    question_frame,
    read_passed,
    receipt_limits,
    refusal_of,
)
from neuroshard.pipeline.microbatch import (
    DisputedTensorError,
    MicrobatchKey,
    RefusedTensorError,
    StageError,
    StageGoneError,
)
from neuroshard.pipeline.stage_protocol import (
    INPUTS,
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
from neuroshard.pipeline.tensor_checks import LARGEST_RECEIVED, StageShapes, is_loss, is_within
from neuroshard.types import MAX_LOSS, NodeId
from neuroshard.waiting import first_of

T = TypeVar("T")
_HERE = NodeId("this node")


REMEMBERED_TIMINGS = 128  # of a stage client: more than a driver's microbatches in flight can have
TIMED = frozenset({Operation.FORWARD, Operation.LOSS, Operation.BACKWARD})  # requests of a microbatch


@dataclass(frozen=True)
class RequestTiming:
    """Durations and sizes of one request that was answered."""

    operation: Operation
    session: int
    microbatch: int
    seconds: float  # from the request to the answer
    stage_seconds: float  # part of `seconds` spent at the stage, as the stage reports it
    compute_seconds: float  # part of `stage_seconds` spent computing, as the stage reports it
    recompute_seconds: float = 0.0  # part of `compute_seconds` for a repeated forward pass, as the stage reports it
    bytes_sent: int = 0  # tensors only
    bytes_received: int = 0
    bytes_handed: int = 0  # tensors that the stage handed to its neighbour, as it reports

    @property
    def wire_seconds(self) -> float:
        """Seconds on the way to the stage and back."""
        return max(0.0, self.seconds - self.stage_seconds)

    @property
    def wait_seconds(self) -> float:
        """Seconds at the stage without computing."""
        return max(0.0, self.stage_seconds - self.compute_seconds)


class StageClient(Protocol):
    """One stage, on this node or on a peer. The first stage takes token ids; the last one also takes labels.

    `ids` (b, t) are those of the tokens. A client uses them where the run has a subspace.

    Every method raises StageError, whose class determines what may be tried next. Calls can be repeated safely.
    """

    @property
    def node_id(self) -> NodeId:
        """Node that does the work."""
        ...

    @property
    def state_root(self) -> str:
        """Root of the weights behind the last answer: equal roots mean equal weights; "" when it is unknown."""
        ...

    @property
    def timings(self) -> Sequence[RequestTiming]:
        """Timings of the last requests of microbatches, newest last."""
        ...

    async def forward(self, key: MicrobatchKey, inputs: Tensor, ids: Tensor | None = None) -> Tensor:
        """Compute the activations (b, t, d) for the next stage."""
        ...

    async def loss(
        self, key: MicrobatchKey, inputs: Tensor, labels: Tensor, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run forward and backward of the last stage in one call. Returns the summed loss and the inputs' gradient."""
        ...

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        """Accumulate gradients. Returns the gradient of the inputs; None from the first stage."""
        ...

    async def infer(self, inputs: Tensor, ids: Tensor | None = None) -> Tensor:
        """Compute the activations (b, t, d) for the next stage without keeping a microbatch."""
        ...

    async def measure(self, inputs: Tensor, labels: Tensor, ids: Tensor | None = None) -> Measured:
        """Compute the last stage's loss of each sequence, summed over its tokens, without gradients."""
        ...

    async def read(self, session: int, position: int, inputs: Tensor, ids: Tensor | None = None) -> Tensor:
        """Read the next tokens of a text; position 0 starts it again. Returns activations or, at the end, logits."""
        ...

    async def forget(self, session: int) -> None:
        """Free the stage's memory of a text."""
        ...

    async def close(self, driver: NodeId, session: int) -> None:
        """Close a session at the stage. Its microbatches are done."""
        ...


class LocalStageClient:
    """Client of a stage on this node."""

    def __init__(self, service: StageServer, node_id: NodeId = _HERE, root: Callable[[], str] = lambda: "") -> None:
        """`root` returns the root of the stage's present weights."""
        self.service = service
        self.node_id = node_id
        self.timings: deque[RequestTiming] = deque(maxlen=REMEMBERED_TIMINGS)
        self._root = root
        self._needs_ids = service.needs_ids

    @property
    def state_root(self) -> str:
        return self._root()

    async def forward(self, key: MicrobatchKey, inputs: Tensor, ids: Tensor | None = None) -> Tensor:
        return await self._timed(
            Operation.FORWARD, key, self.service.forward(key, inputs, ids if self._needs_ids else None)
        )

    async def loss(
        self, key: MicrobatchKey, inputs: Tensor, labels: Tensor, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return await self._timed(
            Operation.LOSS, key, self.service.loss(key, inputs, labels, ids if self._needs_ids else None)
        )

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        return await self._timed(Operation.BACKWARD, key, self.service.backward(key, gradient))

    async def infer(self, inputs: Tensor, ids: Tensor | None = None) -> Tensor:
        return await self.service.infer(inputs, ids=ids if self._needs_ids else None)

    async def measure(self, inputs: Tensor, labels: Tensor, ids: Tensor | None = None) -> Measured:
        return Measured(await self.service.infer(inputs, labels, ids if self._needs_ids else None))

    async def read(self, session: int, position: int, inputs: Tensor, ids: Tensor | None = None) -> Tensor:
        """Read this node's own text, also while the node is paused."""
        return await self.service.texts.read(self.node_id, session, position, inputs, ids if self._needs_ids else None)

    async def forget(self, session: int) -> None:
        self.service.texts.forget(self.node_id, session)

    async def close(self, driver: NodeId, session: int) -> None:
        self.service.close(driver, session)

    async def _timed(self, operation: Operation, key: MicrobatchKey, work: Awaitable[T]) -> T:
        """Await `work` and record its duration; time that the server did not compute counts as waiting."""
        began, (before, _) = anyio.current_time(), self.service.computed(key)
        answer = await work
        seconds = anyio.current_time() - began
        after, is_recomputed = self.service.computed(key)
        worked = max(0.0, after - before)
        again = recompute_seconds(operation, before, worked) if is_recomputed else 0.0
        self.timings.append(RequestTiming(operation, key.session, key.microbatch, seconds, seconds, worked, again))
        return answer


@dataclass(frozen=True)
class MicrobatchResult:
    """Loss of one microbatch from the last stage."""

    loss_sum: Tensor  # scalar, nats summed over tokens; still on the last stage's device
    token_count: int


Shape: TypeAlias = "tuple[int, ...]"

CLOSE_SECONDS = 5.0
LEAST_MOVED_BYTES = 1 << 16  # within the timeout; keepalive traffic moves less
LOOKS = 30  # number of checks of the moved bytes within the timeout, because a connection may become silent at any time


@dataclass(frozen=True)
class StageClientOptions:
    """Precisions and timeouts for a stage on a peer."""

    precision: WirePrecision = WirePrecision.FP32  # of activations
    gradient_precision: WirePrecision | None = None  # None: the same
    timeout_seconds: float = 60.0  # without progress; longer than a stage lets a microbatch wait
    slowest_bytes_per_second: float = 32_000.0  # a connection that makes progress has this long for all bytes in flight


class RemoteStageClient:
    """Client of a stage on a peer. `state_root` is the root in the peer's last answer.

    Every failure of the peer raises a StageError other than RefusedTensorError: only this node's own stage may decide
    that this node's data are wrong.
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
        """`report` gets good and bad behaviour of the peer; `check` verifies its signed claim of losses.

        `moved` returns the bytes exchanged with the peer. A request on a slow connection is not given up while they
        increase.
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
        self._on_the_way = 0  # bytes of tensors in requests and of the largest answers to them

    async def forward(self, key: MicrobatchKey, inputs: Tensor, ids: Tensor | None = None) -> Tensor:
        request = self._request(Operation.FORWARD, key, inputs=inputs, ids=ids)
        return _present((await self._ask(request, output=self._like(inputs))).output)

    async def loss(
        self, key: MicrobatchKey, inputs: Tensor, labels: Tensor, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        request = self._request(Operation.LOSS, key, inputs=inputs, labels=labels, ids=ids)
        answer = await self._ask(request, gradient=self._gradient_like(inputs))
        return _present(None if answer.loss_sum is None else torch.tensor(answer.loss_sum)), answer.gradient

    async def backward(self, key: MicrobatchKey, gradient: Tensor) -> Tensor | None:
        request = self._request(Operation.BACKWARD, key, gradient=gradient)
        return (await self._ask(request, gradient=self._gradient_like(gradient))).gradient

    @property
    def neighbour(self) -> Neighbour:
        """This stage as its neighbours in a chain name it."""
        return Neighbour(self.node_id, self.stage.layers)

    async def pass_on(
        self,
        name: PassName,
        key: MicrobatchKey,
        *,
        before: Neighbour | None = None,
        after: Neighbour | None = None,
        given: Tensor | None = None,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Passed:
        """Ask for one pass whose tensors come from and go to these neighbours, as PassQuestion describes.

        `ids` are those of the microbatch's tokens; they are sent with `given` if the stage needs them. Without `given`
        and without a neighbour that gives it, only a stage that has done the pass before can answer.
        """
        options, stage = self._options, self.stage
        formats = options.precision.value, (options.gradient_precision or options.precision).value
        address = stage.run_id, stage.layers, stage.version, key.session, key.microbatch
        question = PassQuestion(*address, name, *formats, before, after)
        began = anyio.current_time()
        sent_ids = ids if self._shapes.needs_ids and question.given_name == INPUTS else None
        sent = None if given is None else Given(given, sent_ids)
        frame = await run_off_loop(lambda: question_frame(question, sent, labels), given)
        handed = 0 if before is None and after is None else 2 * answer_limits(self._shapes).max_body_bytes
        reply = await self._sent(frame, receipt_limits(self._shapes), handed=handed, refusal=refusal_of)
        try:
            passed = await run_off_loop(lambda: read_passed(reply, question, self._shapes, labels), *reply.tensors)
        except RefusedTensorError as error:
            raise self._unusable(error.message) from error
        self.state_root = passed.receipt.root
        self._report(self.node_id, ScoreReason.GOOD_ANSWER)
        self.timings.append(_pass_timing(question, passed.receipt, anyio.current_time() - began, frame, reply))
        return passed

    async def infer(self, inputs: Tensor, ids: Tensor | None = None) -> Tensor:
        request = self._request(Operation.INFER, None, inputs=inputs, ids=ids)
        return _present((await self._ask(request, output=self._like(inputs))).output)

    async def measure(self, inputs: Tensor, labels: Tensor, ids: Tensor | None = None) -> Measured:
        """Measure as StageClient does. Finite losses come with the peer's signature."""
        request = self._request(Operation.INFER, None, inputs=inputs, labels=labels, ids=ids)
        answer = await self._ask(request, losses=(len(labels),))
        summed = _present(answer.losses)
        if self._check is None or not bool(torch.isfinite(summed).all()):
            return Measured(summed)
        try:
            return Measured(summed, self._check(self.node_id, answer.claim, labels, summed))
        except DataError as error:
            raise self._unusable(error.message, ScoreReason.BAD_SIGNATURE) from error

    async def read(self, session: int, position: int, inputs: Tensor, ids: Tensor | None = None) -> Tensor:
        shapes, place = self._shapes, self._place(session, position)
        request = self._request(Operation.READ, place, inputs=inputs, ids=ids)
        if shapes.is_last:
            return _present((await self._ask(request, logits=(shapes.vocabulary_size,))).logits)
        return _present((await self._ask(request, output=self._like(inputs))).output)

    async def forget(self, session: int) -> None:
        with anyio.move_on_after(CLOSE_SECONDS):
            await self._ask(self._request(Operation.FORGET, self._place(session, 0)))

    async def close(self, driver: NodeId, session: int) -> None:
        """Close one of this node's sessions: a stage closes only sessions of the driver that asks."""
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
        ids: Tensor | None = None,
    ) -> StageRequest:
        session, microbatch = (0, 0) if key is None else (key.session, key.microbatch)
        # texts are short, and their tokens must equal those of the unsplit model
        options = self._options
        precision = WirePrecision.FP32 if operation is Operation.READ else options.precision
        precisions = precision, options.gradient_precision or options.precision
        ids = ids if self._shapes.needs_ids else None
        return StageRequest(operation, self.stage, session, microbatch, *precisions, inputs, labels, gradient, ids)

    def _place(self, session: int, position: int) -> MicrobatchKey:
        return MicrobatchKey(self.node_id, session, position)

    def _like(self, tensor: Tensor) -> Shape:
        """Shape of activations for the same number of tokens."""
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
        """Send a request and return its answer, which has exactly the tensors of the given shapes."""
        began = anyio.current_time()
        frame = await run_off_loop(lambda: request_frame(request), request.inputs, request.gradient)
        reply = await self._sent(frame, answer_limits(self._shapes))

        def checked() -> StageAnswer:
            answer = read_answer(reply, request, self._shapes.hidden_size)
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

    async def _sent(
        self,
        frame: Frame,
        limits: FrameLimits,
        *,
        handed: int = 0,
        refusal: Callable[[Frame], StageError | None] = read_refusal,
    ) -> Frame:
        """Send a frame and return the reply. Raises StageError for a refusal or a failed connection.

        `handed` is the size of tensors that the peer exchanges with others before it replies, in bytes.

        A refused tensor becomes DisputedTensorError: another replica must confirm that the tensor is wrong.
        """
        try:
            reply = await self._moving(frame, limits, handed)
            error = refusal(reply)
        except (PeerUnreachableError, PeerRefusedError, TransportClosedError, MessageTooLargeError) as failure:
            raise StageGoneError(failure.message) from failure
        except (WireError, RefusedTensorError) as failure:
            raise self._unusable(failure.message) from failure
        if isinstance(error, RefusedTensorError):
            raise DisputedTensorError(f"Peer {self.node_id} refused: {error.message}")
        if error is not None:
            raise error
        return reply

    async def _moving(self, frame: Frame, limits: FrameLimits, handed: int) -> Frame:
        """Return the reply. The timeout restarts while bytes move, up to the time that the slowest line needs."""
        options = self._options
        silence = options.timeout_seconds + handed / options.slowest_bytes_per_second
        size = _tensor_bytes(frame) + limits.max_body_bytes + handed
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
            await first_of(ask, partial(self._standstill, silence))
        finally:
            self._on_the_way -= size
        if not replies:
            self._report(self.node_id, ScoreReason.TIMEOUT)
            raise StageGoneError(f"Nothing came from peer {self.node_id} for {silence:g} s.")
        if isinstance(replies[0], NeuroShardError):
            raise replies[0]
        return replies[0]

    async def _standstill(self, seconds: float) -> None:
        """Return when the connection has moved almost nothing for this time."""
        counts = deque([self._moved(self.node_id)], maxlen=LOOKS + 1)
        while True:
            await anyio.sleep(seconds / LOOKS)
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
    """Check shape and value range of a tensor. Raises RefusedTensorError."""
    _check_shape(tensor, shape)
    if tensor is not None and not is_within(tensor, LARGEST_RECEIVED):
        raise RefusedTensorError("It contains values that are too large or not numbers.")


def _check_losses(losses: Tensor | None, shape: Shape | None, request: StageRequest) -> None:
    """Check losses of an evaluation. They may be non-finite, because the model may have diverged."""
    _check_shape(losses, shape)
    if losses is not None and request.labels is not None:
        most = MAX_LOSS * request.labels.shape[1]
        if bool(((losses < 0) | ((losses > most) & torch.isfinite(losses))).any()):
            raise RefusedTensorError("It has impossible losses.")


def _check_loss(loss_sum: float | None, request: StageRequest) -> None:
    if (loss_sum is None) == (request.operation is Operation.LOSS):
        raise RefusedTensorError("It has a loss that was not requested, or no loss.")
    if loss_sum is not None and request.labels is not None and not is_loss(loss_sum, request.labels.numel()):
        raise RefusedTensorError("It has an impossible loss.")


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("an answer without a tensor passed its checks")
    return tensor


def _timing(request: StageRequest, answer: StageAnswer, seconds: float, sent: Frame, received: Frame) -> RequestTiming:
    """Create a timing, with the peer's reported times bounded by the measured time."""
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


def _pass_timing(
    question: PassQuestion, receipt: Receipt, seconds: float, sent: Frame, received: Frame
) -> RequestTiming:
    """Create the timing of a pass in a chain. The wait for a neighbour's tensor is not counted."""
    own = max(0.0, seconds - receipt.arrival_seconds)
    at_stage = min(max(0.0, receipt.seconds - receipt.arrival_seconds - receipt.hand_seconds), own)
    at_work = min(receipt.compute_seconds, at_stage)
    return RequestTiming(
        OPERATIONS[question.name],
        question.session,
        question.microbatch,
        own,
        at_stage,
        at_work,
        min(receipt.recompute_seconds, at_work),
        _tensor_bytes(sent),
        _tensor_bytes(received),
        receipt.bytes_handed,
    )


def _tensor_bytes(frame: Frame) -> int:
    return sum(part.spec.byte_count for part in frame.tensors)
