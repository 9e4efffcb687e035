"""Drives microbatches: takes batches from the feed and sends them through the stages, a bounded number at a time."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup

from neuroshard.data.windows import Batch
from neuroshard.training.flow_record import FlowRecord
from neuroshard.training.journal import Journal
from neuroshard.training.microbatch import (
    ClosedSessionError,
    MicrobatchKey,
    RefusedTensorError,
    SpoiltMicrobatchError,
    StageError,
    UnwantedTensorError,
)
from neuroshard.training.microbatch_run import MicrobatchRun
from neuroshard.training.pace import DataWait
from neuroshard.training.parts import Feed
from neuroshard.training.pipeline import Hop
from neuroshard.training.routing import Routing
from neuroshard.types import NodeId

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

MICROBATCHES_OF_SESSION = 8
SESSION_SECONDS = 30.0  # from its first microbatch to the last one that may begin in it
CLOSE_SECONDS = 2.0  # others are told so long that their sessions end, when the driver ends


class Room(Protocol):
    """What a driver must know of the first stage of its route before it takes data."""

    @property
    def missing(self) -> int:
        """Sequences that the step in work still takes."""
        ...

    async def opened(self) -> None:
        """Wait until a microbatch may begin."""
        ...

    async def unless_closed(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """The value of `work`, or None when the stage takes no more before it has one."""
        ...


class OpenRoom:
    """The room of a driver without a stage of its own: open or not; the stages say by themselves when they are full.

    How many microbatches are under way is bounded by the driver's `in_flight`.
    """

    def __init__(self, sequences: int) -> None:
        """`sequences` are taken at a time. It is closed at first."""
        self.missing = sequences
        self.is_open = False
        self._opened = anyio.Event()
        self._waits: set[anyio.CancelScope] = set()

    def open(self) -> None:
        """Let data be taken."""
        self.is_open = True
        self._opened.set()

    def close(self) -> None:
        """No more; whoever waits for data gives up."""
        self.is_open = False
        if self._opened.is_set():
            self._opened = anyio.Event()
        for scope in self._waits:
            scope.cancel()

    async def opened(self) -> None:
        """See Room."""
        while not self.is_open:
            await self._opened.wait()

    async def unless_closed(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """See Room."""
        if not self.is_open:
            return None
        with anyio.CancelScope() as scope:
            self._waits.add(scope)
            try:
                return await work()
            finally:
                self._waits.discard(scope)
        return None


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
    asked: dict[tuple[int, int], tuple[int, Hop]] = field(default_factory=dict[tuple[int, int], tuple[int, Hop]])


class Driver:
    """Feeds the stages of a run. Data have the order of their keys, whatever the order in which these end."""

    def __init__(
        self,
        node_id: NodeId,
        options: DriverOptions,
        *,
        routing: Routing,
        feed: Feed,
        room: Room,
        journal: Journal,
        waiting: DataWait,
        flow: FlowRecord,
        next_step: Callable[[], int],
    ) -> None:
        """`next_step` is the number of the step that the next batch will be part of."""
        self._node_id = node_id
        self._options = options
        self._routing = routing
        self._feed = feed
        self._room = room
        self._journal = journal
        self._waiting = waiting
        self._next_step = next_step
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
                self._journal.sent(key, batch.position)
            await self._drive(key, batch)  # enters the first stage before another line can take a batch
            self._under_way[key.session].left -= 1
            for number in self._ended_sessions():
                self._under_way[number].is_closing = True
                lines.start_soon(self._close, number, self._under_way[number])

    async def _next_batch(self) -> Batch:
        """The next batch, taken when the first stage wants it and not before."""
        while True:
            await self._room.opened()
            sequences = min(self._room.missing, self._options.batch_size)
            batch = await self._waiting.timed(partial(self._room.unless_closed, partial(self._take, sequences)))
            if batch is not None:
                return batch

    async def _take(self, sequences: int) -> Batch:
        return await self._feed.next_batch(sequences, step=self._next_step())

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
        await self._room.opened()
        measured = partial(self._journal.measured, key)
        run = MicrobatchRun(self._routing, key, batch.input_ids, batch.labels, measured=measured)
        self.flow.began(run)
        try:
            await run.run()
        except (ClosedSessionError, SpoiltMicrobatchError, RefusedTensorError, UnwantedTensorError) as error:
            if isinstance(error, RefusedTensorError) and not run.has_left_first_stage:
                raise  # the data are wrong, and the next ones will be: not what a peer made of them
            _LOG.warning("A microbatch was given up: %s", error)
            self._give_up(key)
        else:
            self.flow.accumulated(run)
            self._journal.accumulated(key)
        finally:
            self.flow.ended(run)
            self._under_way[key.session].asked.update(run.asked)

    def _give_up(self, key: MicrobatchKey) -> None:
        """Leave a microbatch out; its session ends soon, so that no stage waits for the rest of it."""
        self._journal.dropped(key)
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
