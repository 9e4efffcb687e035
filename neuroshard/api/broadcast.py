"""One task looks at the board for all event streams and hands each the same bytes."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator

from neuroshard.api.context import ApiContext, ApiLimits
from neuroshard.api.events import HEARTBEAT, RESET, START, encode_event, events_between, log_event, peers_between
from neuroshard.api.rendering import RenderedViews
from neuroshard.api.views.node import status_view
from neuroshard.errors import NotReadyError
from neuroshard.status.snapshot import NodeStatus

MOST_WAITING_EVENTS = 256  # of one slow client; beyond it is told to start anew
MOST_LOG_LINES = 200  # at once

logger = logging.getLogger(__name__)


class Subscriber:
    """What waits for one client: the newest status only, and a bounded number of other events."""

    def __init__(self, heartbeat_seconds: float) -> None:
        self._events: deque[bytes] = deque()
        self._status: bytes | None = None
        self._heartbeat_seconds = heartbeat_seconds
        self._changed = asyncio.Event()
        self._closed = False

    def offer(self, event: bytes) -> None:
        """Queue an event; a client that is too slow loses all that waits and is told so."""
        if len(self._events) >= MOST_WAITING_EVENTS:
            self._events.clear()
            self._events.append(RESET)
        self._events.append(event)
        self._changed.set()

    def offer_status(self, event: bytes) -> None:
        """Replace the status that waits."""
        self._status = event
        self._changed.set()

    def close(self) -> None:
        """End the stream."""
        self._closed = True
        self._changed.set()

    async def chunks(self) -> AsyncGenerator[bytes]:
        """What to write to the client, until the stream is closed."""
        yield START
        while not self._closed:
            try:
                async with asyncio.timeout(self._heartbeat_seconds):
                    await self._changed.wait()
            except TimeoutError:
                yield HEARTBEAT
                continue
            self._changed.clear()
            waiting = b"".join(self._events) + (self._status or b"")
            self._events.clear()
            self._status = None
            if waiting:
                yield waiting


class Broadcaster:
    """All event streams of one server; its task runs only while somebody listens."""

    def __init__(self, context: ApiContext, views: RenderedViews) -> None:
        self._context = context
        self._views = views
        self._limits: ApiLimits = context.limits
        self._subscribers: set[Subscriber] = set()
        self._task: asyncio.Task[None] | None = None
        self._seen: tuple[int, NodeStatus] = (0, context.board.current())
        self._told_peers: tuple[float, NodeStatus] = (0.0, context.board.current())  # loop time, snapshot
        self._last_line = 0
        self._closed = False

    @property
    def stream_count(self) -> int:
        """Open streams."""
        return len(self._subscribers)

    def subscribe(self, after: int | None) -> Subscriber:
        """A new stream: the status first, log lines after `after` (None: only new ones), then what happens.

        Raises NotReadyError when too many are open or the server stops.
        """
        if self._closed:
            raise NotReadyError("The node is stopping.")
        if len(self._subscribers) >= self._limits.event_streams:
            raise NotReadyError(
                f"{self._limits.event_streams} event streams are open already.", "Close a dashboard and try again."
            )
        if self._task is None:
            self._seen = self._context.board.versioned()
            self._told_peers = (0.0, self._seen[1])
            self._last_line = self._context.log_ring.last_sequence
            self._task = asyncio.get_running_loop().create_task(self._run(), name="event broadcaster")
            self._task.add_done_callback(self._ended)
        subscriber = Subscriber(self._limits.heartbeat_seconds)
        if after is not None:
            for line in self._context.log_ring.newest(MOST_LOG_LINES):
                if after < line.sequence <= self._last_line:  # later ones come with the broadcast
                    subscriber.offer(log_event(line))
        subscriber.offer_status(self._status_event())
        self._subscribers.add(subscriber)
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Forget a stream; the last one stops the task."""
        subscriber.close()
        self._subscribers.discard(subscriber)
        if not self._subscribers and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """End every stream and accept no more."""
        self._closed = True
        for subscriber in list(self._subscribers):
            self.unsubscribe(subscriber)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(1 / self._limits.events_per_second)
            self._send_lines()
            self._send_changes()
            self._send_peers()

    def _send_lines(self) -> None:
        for line in self._context.log_ring.after(self._last_line, MOST_LOG_LINES):
            self._last_line = line.sequence
            event = log_event(line)
            for subscriber in self._subscribers:
                subscriber.offer(event)

    def _send_changes(self) -> None:
        version, status = self._context.board.versioned()
        if version == self._seen[0]:
            return
        events = list(events_between(self._seen[1], status))
        self._seen = (version, status)
        current = self._status_event()
        for subscriber in self._subscribers:
            for event in events:
                subscriber.offer(event)
            subscriber.offer_status(current)

    def _send_peers(self) -> None:
        """What is new about the peers, rarer than the status: with many peers some counter always changes."""
        now, status = asyncio.get_running_loop().time(), self._context.board.current()
        told_at, told = self._told_peers
        if now - told_at < self._limits.peers_seconds:
            return
        self._told_peers = (now, status)
        for event in peers_between(told, status):
            for subscriber in self._subscribers:
                subscriber.offer(event)

    def _status_event(self) -> bytes:
        return encode_event("status", self._views.get(status_view))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A broadcaster that failed ends its streams: their clients connect again and start a new one."""
        if task.cancelled() or task is not self._task:
            return
        logger.error("the event broadcaster failed", exc_info=task.exception())
        for subscriber in list(self._subscribers):
            self.unsubscribe(subscriber)
        self._task = None
