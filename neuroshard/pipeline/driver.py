"""The driver: it takes batches from the feed, sends them through the stages, and keeps a ledger of those in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Protocol

import anyio
from anyio.abc import TaskGroup
from torch import Tensor

from neuroshard.data.feed import HeldOut
from neuroshard.data.held_out_losses import PINNED_SEQUENCES
from neuroshard.data.windows import Batch
from neuroshard.pipeline.chain_call import ChainedCall, ChainEdges
from neuroshard.pipeline.microbatch import (
    ClosedSessionError,
    LostGradientError,
    MicrobatchKey,
    RefusedTensorError,
    SpoiltMicrobatchError,
    StageError,
    UnwantedTensorError,
)
from neuroshard.pipeline.microbatch_call import FlowRecord, MicrobatchCall
from neuroshard.pipeline.routing import Routing
from neuroshard.pipeline.stage_client import MicrobatchResult, StageClient
from neuroshard.pipeline.tensor_checks import LARGEST_ROUNDING
from neuroshard.status.data import DataStatus
from neuroshard.types import DataPosition, NodeId
from neuroshard.waiting import Signal


class Feed(Protocol):
    """Data feed of a trainer. The data room's DataFeed implements it."""

    @property
    def position(self) -> DataPosition:
        """First window that has not been read."""
        ...

    async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
        """Return the next batch. A cancelled call consumes nothing."""
        ...

    async def held_out(self, count: int = PINNED_SEQUENCES) -> HeldOut:
        """Return the pinned held-out sequences."""
        ...

    def note_evaluation(self, train_loss: float, held_out_loss: float | None, step: int) -> None:
        """Record the losses of a step, on which the choice of the next shard depends."""
        ...

    def rewind(self, position: DataPosition) -> None:
        """Continue from an earlier position as after a restart from there, except with data that left this node."""
        ...

    def status(self) -> DataStatus:
        """Return the status of the data for the dashboard."""
        ...


@dataclass(frozen=True)
class Speed:
    """Moving average of the training speed. Pauses do not count as time of the steps."""

    tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    observed: int = 0

    def after_step(self, seconds: float, tokens: int) -> Speed:
        """Speed after one more step. Each of the last ten steps has a weight of about 0.1."""
        if seconds <= 0 or not isfinite(seconds):
            return self
        weight = max(0.1, 1 / (self.observed + 1))
        step_seconds = self.step_seconds + weight * (seconds - self.step_seconds)
        average_tokens = self.tokens_per_second * self.step_seconds
        tokens_a_step = average_tokens + weight * (tokens - average_tokens)
        return Speed(tokens_a_step / step_seconds, step_seconds, self.observed + 1)


@dataclass(frozen=True)
class OwnShare:
    """Part of a step that came from this node's own microbatches."""

    position: DataPosition | None = None  # a step has used all windows before it; None: unchanged
    loss_sums: tuple[Tensor, ...] = ()
    tokens: int = 0  # number of tokens in `loss_sums`

    def mean_loss(self) -> float | None:
        """Mean loss in nats per token; None when this node drove nothing in the step."""
        return sum(part.item() for part in self.loss_sums) / self.tokens if self.tokens else None


@dataclass
class _Sent:
    position: DataPosition
    result: MicrobatchResult | None = None
    is_done: bool = False
    is_behind: bool = False


class InFlightLedger:
    """Microbatches in flight, in the order of their data.

    Microbatches may end in any order. The data position of a step therefore advances only to the first microbatch that
    no step has used.
    """

    def __init__(self) -> None:
        self.ended = Signal()  # a microbatch ended and is no longer in flight
        self.cleared = Signal()  # all microbatches in flight were given up: the driver begins again
        self.next_step = 1  # number of the step that will use the next batch
        self.position: DataPosition | None = None  # steps have used all data before it; None before the first step
        self._sent: dict[MicrobatchKey, _Sent] = {}

    @property
    def under_way(self) -> int:
        """Number of microbatches that at least one stage has not accumulated and that were not given up."""
        return sum(not (sent.is_done or sent.is_behind) for sent in self._sent.values())

    @property
    def done(self) -> tuple[MicrobatchKey, ...]:
        """Microbatches that every stage has accumulated and that no known step has used."""
        return tuple(key for key, sent in self._sent.items() if sent.is_done and not sent.is_behind)

    def tokens(self, keys: Iterable[MicrobatchKey]) -> int:
        """Number of tokens in the given microbatches whose loss is known."""
        return sum(sent.result.token_count for key in keys if (sent := self._sent[key]).result is not None)

    def sent(self, key: MicrobatchKey, position: DataPosition) -> None:
        """Add a microbatch that is about to be sent; `position` is the first window after it."""
        self._sent[key] = _Sent(position)

    def measured(self, key: MicrobatchKey, result: MicrobatchResult) -> None:
        """Record the loss that the last stage has returned."""
        if key in self._sent:
            self._sent[key].result = result

    def accumulated(self, key: MicrobatchKey) -> None:
        """Mark a microbatch as done in every stage."""
        if key in self._sent:
            self._sent[key].is_done = True
            self.ended.notify()

    def stepped(self, keys: Iterable[MicrobatchKey]) -> OwnShare:
        """Record a step made of these microbatches, including other drivers', and return this node's share of it."""
        loss_sums, tokens, position = list[Tensor](), 0, None
        for key in keys:
            sent = self._sent.get(key)
            if sent is None:
                continue
            sent.is_behind = True
            if sent.result is not None:
                loss_sums.append(sent.result.loss_sum)
                tokens += sent.result.token_count
        for key, sent in list(self._sent.items()):  # in the order of the data, up to the first one that is not behind
            if not sent.is_behind:
                break
            position = self.position = sent.position
            del self._sent[key]
        return OwnShare(position, tuple(loss_sums), tokens)

    def begin_step(self, number: int) -> None:
        """Assign the data that are read from now on to this step."""
        self.next_step = number

    def dropped(self, key: MicrobatchKey) -> None:
        """Record that a microbatch was given up. Its data are not used again."""
        if key in self._sent:
            self._sent[key].is_behind = True
            self.ended.notify()

    @property
    def is_clear(self) -> bool:
        """Whether a step has used all data that were read."""
        return not self._sent

    def clear(self) -> None:
        """Give up all microbatches in flight."""
        self._sent.clear()
        self.cleared.notify()

    def rewind(self, position: DataPosition | None) -> None:
        """Give up all microbatches in flight. The data after `position` are read again; None: all of this start."""
        self.position = position
        self.clear()


NOTICEABLE_WAIT_SECONDS = 1.0


class Pace:
    """Measures the time of the steps without pauses, evaluations and waits for data."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.monotonic = monotonic
        self.speed = Speed()
        self.step_seconds = 0.0  # duration of the last step
        self._mark = monotonic()

    def step_ended(self, tokens: int) -> None:
        """End the present step and begin the next one. A skipped step has no tokens and does not change the speed."""
        now = self.monotonic()
        self.step_seconds, self._mark = now - self._mark, now
        if tokens:
            self.speed = self.speed.after_step(self.step_seconds, tokens)

    def restart(self) -> None:
        """Exclude the time since the last step from the measurement."""
        self._mark = self.monotonic()

    def skip(self, seconds: float) -> None:
        """Exclude this number of seconds from the present step."""
        self._mark += seconds


class DataWait:
    """Measures how long the driver waits for data and excludes long waits from the pace."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._since: float | None = None

    @property
    def is_noticeable(self) -> bool:
        """Whether the driver has waited for data long enough for the wait to be shown to the user."""
        return self._since is not None and self._pace.monotonic() - self._since > NOTICEABLE_WAIT_SECONDS

    @contextmanager
    def timed(self) -> Generator[None]:
        """Measure the block as a wait for data."""
        began = self._since = self._pace.monotonic()
        try:
            yield
        finally:
            waited = self._pace.monotonic() - began
            self._since = None
            if waited > NOTICEABLE_WAIT_SECONDS:
                self._pace.skip(waited)


_LOG = logging.getLogger(__name__)

# errors after which a microbatch is dropped for good
DROPPED = (ClosedSessionError, LostGradientError, SpoiltMicrobatchError, RefusedTensorError, UnwantedTensorError)
MICROBATCHES_OF_SESSION = 8
SESSION_SECONDS = 30.0  # from a session's first microbatch to the last one that may begin in it
CLOSE_SECONDS = 2.0  # time to notify the stages of the end of sessions when the driver ends


class FirstStageLimits(Protocol):
    """State of the first stage that a driver needs before it reads data."""

    @property
    def is_open(self) -> bool:
        """Whether a microbatch may begin."""
        ...

    @property
    def missing(self) -> int:
        """Number of sequences that the present step still needs."""
        ...

    def counts(self, key: MicrobatchKey) -> bool:
        """Whether `missing` takes a microbatch into account: it is open here, or accumulated for the present step."""
        ...

    @property
    def changed(self) -> Signal:
        """Signal for every change of `is_open`, `missing` and `counts`."""
        ...

    @property
    def closed(self) -> Signal:
        """Signal that no more microbatches may begin."""
        ...


class RemoteFirstStage:
    """First-stage limits of a driver that holds no stage: open or closed. The remote stages refuse any excess.

    The driver's `in_flight` limits the number of microbatches in flight.
    """

    def __init__(self, sequences: int) -> None:
        """`sequences` is the size of a batch. The driver may not begin microbatches before `open`."""
        self.missing = sequences
        self.is_open = False
        self.changed = Signal()
        self.closed = Signal()

    def counts(self, key: MicrobatchKey) -> bool:
        """Return True: only the remote stages count microbatches."""
        return True

    def open(self) -> None:
        """Allow the driver to read data."""
        self.is_open = True
        self.changed.notify()

    def close(self) -> None:
        """Stop the driver from reading data. A driver that waits for data stops waiting."""
        self.is_open = False
        self.changed.notify()
        self.closed.notify()


@dataclass(frozen=True)
class DriverOptions:
    """Options of a driver: batch size, microbatches in flight, first session number, and rounding on the wire."""

    batch_size: int  # sequences per microbatch
    in_flight: int = 1  # microbatches in flight at the same time
    first_session: int = 1  # above all sessions of this node's earlier starts, which other nodes may remember as closed
    rounding: float = LARGEST_ROUNDING  # relative norm, between outputs of equal weights
    edges: ChainEdges | None = None  # which stages hand their results to each other; None: every edge is a star


@dataclass
class _Session:
    left: int = 0  # microbatches that have not ended
    is_closing: bool = False
    asked: dict[tuple[int, int], tuple[int, StageClient]] = field(
        default_factory=dict[tuple[int, int], tuple[int, StageClient]]
    )


class Driver:
    """Feeds the stages of a run. Keys follow the order of the data; microbatches may end in any order."""

    def __init__(
        self,
        node_id: NodeId,
        options: DriverOptions,
        *,
        routing: Routing,
        feed: Feed,
        room: FirstStageLimits,
        ledger: InFlightLedger,
        waiting: DataWait,
        flow: FlowRecord,
    ) -> None:
        self._node_id = node_id
        self._options = options
        self._routing = routing
        self._feed = feed
        self._room = room
        self._ledger = ledger
        self._waiting = waiting
        self._turn = anyio.Lock(fast_acquire=True)  # batches are read one after the other
        self._session = options.first_session - 1
        self._begun_at = -SESSION_SECONDS
        self._begun = MICROBATCHES_OF_SESSION  # in the present session; full at first: the first key opens one
        self._under_way: dict[int, _Session] = {}
        self._calls: dict[MicrobatchKey, MicrobatchCall] = {}  # microbatches in flight
        self._may_read = Signal()  # for every change of `_room` and `_calls`
        room.changed.feed(self._may_read)
        self.flow = flow

    async def run(self) -> None:
        """Drive until cancelled, and begin again when the ledger is cleared.

        Raises DataError from the feed and StageError for data that no stage can accept.
        """
        while True:
            try:
                with self._ledger.cleared.cancels():
                    async with anyio.create_task_group() as lines:
                        for _ in range(self._options.in_flight):
                            lines.start_soon(self._drive_on, lines)
            finally:
                self._calls.clear()
                with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                    for number, session in list(self._under_way.items()):
                        await self._close(number, session)
            self._begun = MICROBATCHES_OF_SESSION  # the present session is closed: the next key opens one

    async def _drive_on(self, lines: TaskGroup) -> None:
        while True:
            async with self._turn:
                batch = await self._next_batch()
                key = self._next_key()
                self._ledger.sent(key, batch.position)
                rounding, edges = self._options.rounding, self._options.edges
                called = MicrobatchCall if edges is None else partial(ChainedCall, edges)
                call = called(self._routing, key, batch.input_ids, batch.labels, rounding=rounding)
                self._calls[key] = call
            await self._drive(key, call)  # calls the first stage before another line can read a batch
            self._under_way[key.session].left -= 1
            for number, session in self._under_way.items():
                may_grow = number == self._session and self._begun < MICROBATCHES_OF_SESSION
                if session.left == 0 and not (may_grow or session.is_closing):
                    session.is_closing = True
                    lines.start_soon(self._close, number, session)

    async def _next_batch(self) -> Batch:
        """Read the next batch only when the first stage needs it."""
        room = self._room
        # The first stage does not count the microbatches that it gave up before a pause. They come back and have the
        # first claim to the room: the later stages have kept them, so a new microbatch in their place would make the
        # stages step on different microbatches. A microbatch that another replica of the first stage does needs no
        # room here.
        #
        # The intake may close again while the feed is read. `closed` then cancels the read, which consumes nothing,
        # and the loop waits for the next opening.
        while True:
            missing = room.missing if room.is_open else 0
            for call in self._calls.values():
                if self._is_expected(call):
                    missing -= len(call.labels)
            if missing <= 0:
                await self._may_read.wait()
                continue
            with self._waiting.timed(), room.closed.cancels():
                sequences = min(missing, self._options.batch_size)
                return await self._feed.next_batch(sequences, step=self._ledger.next_step)

    def _is_expected(self, call: MicrobatchCall) -> bool:
        """Whether the first stage of this node will get a microbatch in flight that it does not count now."""
        first = call.hops[0]
        return (first is None or first.node_id == self._node_id) and not self._room.counts(call.key)

    def _next_key(self) -> MicrobatchKey:
        now = anyio.current_time()
        if self._begun >= MICROBATCHES_OF_SESSION or now - self._begun_at > SESSION_SECONDS:
            self._session += 1
            self._begun, self._begun_at = 0, now
            self._under_way[self._session] = _Session()
        self._begun += 1
        self._under_way[self._session].left += 1
        return MicrobatchKey(self._node_id, self._session, self._begun)

    async def _drive(self, key: MicrobatchKey, run: MicrobatchCall) -> None:
        """Send a microbatch through all stages until each has accumulated it.

        Only the start waits for the first stage to be open. The rest must not wait: a full first stage may wait for the
        end of this very microbatch.
        """
        while not self._room.is_open:
            await self._room.changed.wait()
        self.flow.began(run)
        is_accumulated = False
        try:
            self._ledger.measured(key, await run.forward())  # noted before the backward passes, after which stages step
            await run.backward()
        except DROPPED as error:
            if isinstance(error, RefusedTensorError) and not run.has_left_first_stage:
                raise  # no peer has changed the data: they are wrong, and the next ones would be wrong as well
            _LOG.warning("A microbatch was dropped: %s", error)
            self._give_up(key)
        else:
            is_accumulated = True
            self._ledger.accumulated(key)
        finally:
            self.flow.ended(run, is_accumulated=is_accumulated)
            self._under_way[key.session].asked.update(run.asked)
            del self._calls[key]
            self._may_read.notify()

    def _give_up(self, key: MicrobatchKey) -> None:
        """Drop a microbatch for good. Its session ends soon, so that no stage waits for the rest of it."""
        self._ledger.dropped(key)
        self.flow.gave_up()
        if key.session == self._session:
            self._begun = MICROBATCHES_OF_SESSION

    async def _close(self, number: int, session: _Session) -> None:
        """Notify the stages that a session has ended. A stage without this message closes it after a timeout."""
        for _, hop in session.asked.values():
            try:
                await hop.close(self._node_id, number)
            except StageError as error:
                _LOG.debug("A session was not closed: %s", error)
        self._under_way.pop(number, None)
