"""The driver: it takes batches from the feed, sends them through the stages, and keeps a ledger of those in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol

import anyio
from anyio.abc import TaskGroup
from torch import Tensor

from neuroshard.data.feed import HeldOut
from neuroshard.data.held_out_losses import PINNED_SEQUENCES
from neuroshard.data.windows import Batch
from neuroshard.pipeline.microbatch import (
    ClosedSessionError,
    MicrobatchKey,
    RefusedTensorError,
    SpoiltMicrobatchError,
    StageError,
    UnwantedTensorError,
)
from neuroshard.pipeline.microbatch_call import FlowRecord, MicrobatchCall
from neuroshard.pipeline.routing import Routing
from neuroshard.pipeline.stage_client import MicrobatchResult, StageClient
from neuroshard.signals import Signal
from neuroshard.status.data import DataStatus
from neuroshard.types import DataPosition, NodeId


class Feed(Protocol):
    """What the trainer needs of the data room's DataFeed."""

    @property
    def position(self) -> DataPosition:
        """The next unread window."""
        ...

    async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
        """The next batch; nothing is consumed when cancelled."""
        ...

    async def held_out(self, count: int = PINNED_SEQUENCES) -> HeldOut:
        """The pinned held-out sequences."""
        ...

    def note_evaluation(self, train_loss: float, held_out_loss: float | None, step: int) -> None:
        """Note the losses of a step."""
        ...

    def status(self) -> DataStatus:
        """For the dashboard."""
        ...


@dataclass(frozen=True)
class Speed:
    """Smoothed pace of the steps, over the time spent on them (pauses do not count)."""

    tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    observed: int = 0

    def after_step(self, seconds: float, tokens: int) -> Speed:
        """The pace after one more step; each of the last ten weighs about a tenth."""
        if seconds <= 0 or not isfinite(seconds):
            return self
        weight = max(0.1, 1 / (self.observed + 1))
        step_seconds = self.step_seconds + weight * (seconds - self.step_seconds)
        average_tokens = self.tokens_per_second * self.step_seconds
        tokens_a_step = average_tokens + weight * (tokens - average_tokens)
        return Speed(tokens_a_step / step_seconds, step_seconds, self.observed + 1)


@dataclass(frozen=True)
class OwnShare:
    """The part of a step that this node drove itself."""

    position: DataPosition | None = None  # all windows before it are behind a step; None: it has not moved
    loss_sums: tuple[Tensor, ...] = ()
    tokens: int = 0  # of those losses

    def mean_loss(self) -> float | None:
        """Nats a token; None when it drove nothing."""
        return sum(part.item() for part in self.loss_sums) / self.tokens if self.tokens else None


@dataclass
class _Sent:
    position: DataPosition
    result: MicrobatchResult | None = None
    is_done: bool = False
    is_behind: bool = False


class InFlightLedger:
    """The microbatches under way, in the order of their data."""

    def __init__(self) -> None:
        self.ended = Signal()  # of a microbatch, which is under way no more
        self.next_step = 1  # number of the step that the next batch will be part of
        self._sent: dict[MicrobatchKey, _Sent] = {}

    @property
    def under_way(self) -> int:
        """Microbatches that some stage has not accumulated yet, and that were not given up."""
        return sum(not (sent.is_done or sent.is_behind) for sent in self._sent.values())

    @property
    def done(self) -> tuple[MicrobatchKey, ...]:
        """Microbatches that every stage has accumulated and no step is known to have used."""
        return tuple(key for key, sent in self._sent.items() if sent.is_done and not sent.is_behind)

    def tokens(self, keys: Iterable[MicrobatchKey]) -> int:
        """Of microbatches whose loss was told."""
        return sum(sent.result.token_count for key in keys if (sent := self._sent[key]).result is not None)

    def sent(self, key: MicrobatchKey, position: DataPosition) -> None:
        """A microbatch leaves; `position` is the first window behind it."""
        self._sent[key] = _Sent(position)

    def measured(self, key: MicrobatchKey, result: MicrobatchResult) -> None:
        """The last stage has told its loss."""
        if key in self._sent:
            self._sent[key].result = result

    def accumulated(self, key: MicrobatchKey) -> None:
        """Every stage has done its work for it."""
        if key in self._sent:
            self._sent[key].is_done = True
            self.ended.notify()

    def stepped(self, keys: Iterable[MicrobatchKey]) -> OwnShare:
        """A step was made of these microbatches, some of which may be other drivers'."""
        own = [self._sent[key] for key in keys if key in self._sent]
        for sent in own:
            sent.is_behind = True
        results = [sent.result for sent in own if sent.result is not None]
        loss_sums = tuple(result.loss_sum for result in results)
        return OwnShare(self._advance(), loss_sums, sum(result.token_count for result in results))

    def begin_step(self, number: int) -> None:
        """Data that are taken from now on belong to this step."""
        self.next_step = number

    def dropped(self, key: MicrobatchKey) -> None:
        """A microbatch was given up for good: its data are not used again."""
        if key in self._sent:
            self._sent[key].is_behind = True
            self.ended.notify()

    def clear(self) -> None:
        """Nothing is under way any more."""
        self._sent.clear()

    def _advance(self) -> DataPosition | None:
        """Forget what is behind without a gap; the position behind it."""
        position = None
        for key, sent in list(self._sent.items()):
            if not sent.is_behind:
                break
            position = sent.position
            del self._sent[key]
        return position


NOTICEABLE_WAIT_SECONDS = 1.0


class Pace:
    """Times the steps; pauses, evaluations and waits for data do not count."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.monotonic = monotonic
        self.speed = Speed()
        self.step_seconds = 0.0  # of the last step
        self._mark = monotonic()

    def step_ended(self) -> None:
        """A step ends now and the next one begins."""
        now = self.monotonic()
        self.step_seconds, self._mark = now - self._mark, now

    def count(self, tokens: int) -> None:
        """The step that ended was made with so many tokens."""
        self.speed = self.speed.after_step(self.step_seconds, tokens)

    def restart(self) -> None:
        """Whatever was done since the last step does not count."""
        self._mark = self.monotonic()

    def skip(self, seconds: float) -> None:
        """So much of the time does not count."""
        self._mark += seconds


class DataWait:
    """Waits for data, and lets others see it."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._since: float | None = None

    @property
    def is_noticeable(self) -> bool:
        """Whether data are waited for at present, and for so long that it should be told."""
        return self._since is not None and self._pace.monotonic() - self._since > NOTICEABLE_WAIT_SECONDS

    @contextmanager
    def timed(self) -> Generator[None]:
        """Count the time of the block as a wait for data."""
        began = self._since = self._pace.monotonic()
        try:
            yield
        finally:
            waited = self._pace.monotonic() - began
            self._since = None
            if waited > NOTICEABLE_WAIT_SECONDS:
                self._pace.skip(waited)


_LOG = logging.getLogger(__name__)

MICROBATCHES_OF_SESSION = 8
SESSION_SECONDS = 30.0  # from its first microbatch to the last one that may begin in it
CLOSE_SECONDS = 2.0  # others are told so long that their sessions end, when the driver ends


class FirstStageLimits(Protocol):
    """The state of the first stage of a route that a driver needs before it takes data."""

    @property
    def is_open(self) -> bool:
        """Whether a microbatch may begin."""
        ...

    @property
    def missing(self) -> int:
        """Sequences that the step in work still needs."""
        ...

    @property
    def changed(self) -> Signal:
        """Signals every change of `is_open` and `missing`."""
        ...

    @property
    def closed(self) -> Signal:
        """Signals that no more microbatches may begin."""
        ...


class RemoteFirstStage:
    """Limits of a driver without a stage of its own: open or closed. The stages themselves refuse what is too much.

    The driver's `in_flight` bounds how many microbatches are under way.
    """

    def __init__(self, sequences: int) -> None:
        """`sequences` are taken at a time. It is closed at first."""
        self.missing = sequences
        self.is_open = False
        self.changed = Signal()
        self.closed = Signal()

    def open(self) -> None:
        """Let data be taken."""
        self.is_open = True
        self.changed.notify()

    def close(self) -> None:
        """Let no more data be taken. A driver that waits for data gives up."""
        self.is_open = False
        self.changed.notify()
        self.closed.notify()


@dataclass(frozen=True)
class DriverOptions:
    """How a driver works."""

    batch_size: int  # sequences a microbatch
    in_flight: int = 1  # microbatches on their way at the same time
    first_session: int = 1  # above all sessions of this node's earlier starts that other nodes may remember


@dataclass
class _Session:
    left: int = 0  # microbatches that have not ended
    is_closing: bool = False
    asked: dict[tuple[int, int], tuple[int, StageClient]] = field(
        default_factory=dict[tuple[int, int], tuple[int, StageClient]]
    )


class Driver:
    """Feeds the stages of a run. Data have the order of their keys, whatever the order in which these end."""

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
        self._turn = anyio.Lock(fast_acquire=True)  # batches are taken one after the other
        self._session = options.first_session - 1
        self._begun_at = -SESSION_SECONDS
        self._begun = MICROBATCHES_OF_SESSION  # in the present session
        self._under_way: dict[int, _Session] = {}
        self.flow = flow

    async def run(self) -> None:
        """Drive until cancelled. Raises DataError from the feed, StageError for data that no stage can take."""
        try:
            async with anyio.create_task_group() as lines:
                for _ in range(self._options.in_flight):
                    lines.start_soon(self._drive_on, lines)
        finally:
            with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                for number, session in list(self._under_way.items()):
                    await self._close(number, session)

    async def _drive_on(self, lines: TaskGroup) -> None:
        while True:
            async with self._turn:
                batch = await self._next_batch()
                key = self._next_key()
                self._ledger.sent(key, batch.position)
            await self._drive(key, batch)  # enters the first stage before another line can take a batch
            self._under_way[key.session].left -= 1
            for number in self._ended_sessions():
                self._under_way[number].is_closing = True
                lines.start_soon(self._close, number, self._under_way[number])

    async def _next_batch(self) -> Batch:
        """The next batch, taken when the first stage needs it and not before."""
        room = self._room
        while True:
            await self._opened()
            sequences = min(room.missing, self._options.batch_size)
            with self._waiting.timed(), room.closed.cancels():
                return await self._feed.next_batch(sequences, step=self._ledger.next_step)

    async def _opened(self) -> None:
        """Wait until a microbatch may begin."""
        while not self._room.is_open:
            await self._room.changed.wait()

    def _next_key(self) -> MicrobatchKey:
        now = anyio.current_time()
        if self._begun >= MICROBATCHES_OF_SESSION or now - self._begun_at > SESSION_SECONDS:
            self._session += 1
            self._begun, self._begun_at = 0, now
            self._under_way[self._session] = _Session()
        self._begun += 1
        self._under_way[self._session].left += 1
        return MicrobatchKey(self._node_id, self._session, self._begun)

    def _ended_sessions(self) -> list[int]:
        """Sessions whose microbatches have ended, and in which none will begin."""
        is_over = self._begun >= MICROBATCHES_OF_SESSION
        return [
            number
            for number, session in self._under_way.items()
            if session.left == 0 and (number != self._session or is_over) and not session.is_closing
        ]

    async def _drive(self, key: MicrobatchKey, batch: Batch) -> None:
        """Until every stage has accumulated it.

        Only its beginning waits for room: the rest may be what a full first stage waits for.
        """
        await self._opened()
        run = MicrobatchCall(self._routing, key, batch.input_ids, batch.labels)
        self.flow.began(run)
        try:
            self._ledger.measured(key, await run.forward())  # noted before the backward passes, after which stages step
            await run.backward()
        except (ClosedSessionError, SpoiltMicrobatchError, RefusedTensorError, UnwantedTensorError) as error:
            if isinstance(error, RefusedTensorError) and not run.has_left_first_stage:
                raise  # the data are wrong, and the next ones will be: not what a peer made of them
            _LOG.warning("A microbatch was given up: %s", error)
            self._give_up(key)
        else:
            self.flow.accumulated(run)
            self._ledger.accumulated(key)
        finally:
            self.flow.ended(run)
            self._under_way[key.session].asked.update(run.asked)

    def _give_up(self, key: MicrobatchKey) -> None:
        """Leave a microbatch out; its session ends soon, so that no stage waits for the rest of it."""
        self._ledger.dropped(key)
        self.flow.gave_up()
        if key.session == self._session:
            self._begun = MICROBATCHES_OF_SESSION

    async def _close(self, number: int, session: _Session) -> None:
        """Tell the stages that a session has ended. One that does not hear it closes the session by itself later."""
        for _, hop in session.asked.values():
            try:
                await hop.close(self._node_id, number)
            except StageError as error:
                _LOG.debug("A session was not closed: %s", error)
        self._under_way.pop(number, None)
