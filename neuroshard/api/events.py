"""The event stream: status changes and log lines as Server-Sent Events, and the task that sends them."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from neuroshard.api.context import ApiContext, ApiLimits
from neuroshard.api.rendering import RenderedViews, as_json, whole_status
from neuroshard.api.routes import LAST_SEQUENCE
from neuroshard.api.streaming import EVENT_STREAM, WatchedStream
from neuroshard.errors import NotReadyError
from neuroshard.telemetry.logs import LogLine

HEARTBEAT = b": nothing new\n\n"
START = b"retry: 2000\n\n"
MOST_WAITING_LINES = 256  # per client; a slow one sees the gap in their numbers and can read /api/logs
MOST_LOG_LINES = 200  # per broadcast

_LOG = logging.getLogger(__name__)


def encode_event(name: str, json: bytes, identity: int | None = None) -> bytes:
    """Encode one event. `json` must not contain a line break; clients send `identity` back as Last-Event-ID."""
    prefix = b"" if identity is None else b"id: %d\n" % identity
    return prefix + b"event: " + name.encode() + b"\ndata: " + json + b"\n\n"


def log_event(line: LogLine) -> bytes:
    """Encode a log line. Its sequence number is the event's id, so that a client resumes after its last line."""
    return encode_event("log", as_json(line), line.sequence)


class Subscriber:
    """Events that wait for one client: only the newest status, and a bounded number of log lines."""

    def __init__(self, heartbeat_seconds: float) -> None:
        self._lines: deque[bytes] = deque(maxlen=MOST_WAITING_LINES)
        self._status: bytes | None = None
        self._heartbeat_seconds = heartbeat_seconds
        self._changed = asyncio.Event()
        self._closed = False

    def offer_line(self, event: bytes) -> None:
        """Queue a log line. A client that reads too slowly loses its oldest lines."""
        self._lines.append(event)
        self._changed.set()

    def offer_status(self, event: bytes) -> None:
        """Replace the waiting status, if there is one."""
        self._status = event
        self._changed.set()

    def close(self) -> None:
        """End the stream: `chunks` wakes up and finishes."""
        self._closed = True
        self._changed.set()

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the bytes to send, until the stream is closed. Without events it yields regular heartbeats."""
        yield START
        while not self._closed:
            try:
                async with asyncio.timeout(self._heartbeat_seconds):
                    await self._changed.wait()
            except TimeoutError:
                yield HEARTBEAT
                continue
            self._changed.clear()
            waiting = b"".join(self._lines) + (self._status or b"")
            self._lines.clear()
            self._status = None
            if waiting:
                yield waiting


class Broadcaster:
    """All event streams of one server. Its task runs only while at least one stream is open."""

    def __init__(self, context: ApiContext, views: RenderedViews) -> None:
        self._context = context
        self._views = views
        self._limits: ApiLimits = context.limits
        self._subscribers: set[Subscriber] = set()
        self._task: asyncio.Task[None] | None = None
        self._sent_tag = ""  # entity tag of the newest status that was sent
        self._last_line = 0
        self._closed = False

    @property
    def stream_count(self) -> int:
        """Number of open streams."""
        return len(self._subscribers)

    def subscribe(self, after: int | None) -> Subscriber:
        """Open a stream: log lines after `after` (None: only new ones) and the status first, then all new events.

        Raises NotReadyError if too many streams are open or the server stops.
        """
        if self._closed:
            raise NotReadyError("The node is stopping.")
        if len(self._subscribers) >= self._limits.event_streams:
            raise NotReadyError(
                f"{self._limits.event_streams} event streams are open already.", "Close a dashboard and try again."
            )
        # There is no await below, so the task cannot broadcast a line between the replay up to `_last_line` and the
        # registration of the subscriber: no line is lost or sent twice.
        if self._task is None:
            self._last_line = self._context.log_ring.last_sequence
            self._sent_tag = self._views.get(whole_status).tag
            self._task = asyncio.get_running_loop().create_task(self._run(), name="event broadcaster")
            self._task.add_done_callback(self._ended)
        subscriber = Subscriber(self._limits.heartbeat_seconds)
        if after is not None:
            for line in self._context.log_ring.newest(MOST_LOG_LINES):
                if after < line.sequence <= self._last_line:  # the task broadcasts the later lines
                    subscriber.offer_line(log_event(line))
        subscriber.offer_status(self._status_event())
        self._subscribers.add(subscriber)
        return subscriber

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Close and remove a stream. After the last one the task stops."""
        subscriber.close()
        self._subscribers.discard(subscriber)
        if not self._subscribers and self._task is not None:
            self._task.cancel()
            self._task = None

    def close(self) -> None:
        """End every stream and refuse new ones."""
        self._closed = True
        for subscriber in list(self._subscribers):
            self.unsubscribe(subscriber)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(1 / self._limits.events_per_second)
            self._send_lines()
            self._send_status()

    def _send_lines(self) -> None:
        for line in self._context.log_ring.after(self._last_line, MOST_LOG_LINES):
            self._last_line = line.sequence
            event = log_event(line)
            for subscriber in self._subscribers:
                subscriber.offer_line(event)

    def _send_status(self) -> None:
        tag = self._views.get(whole_status).tag
        if tag == self._sent_tag:
            return
        self._sent_tag = tag
        event = self._status_event()
        for subscriber in self._subscribers:
            subscriber.offer_status(event)

    def _status_event(self) -> bytes:
        return encode_event("status", self._views.get(whole_status).body)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End all streams if the task failed: their clients connect again, which starts a new task."""
        if task.cancelled() or task is not self._task:
            return
        _LOG.error("The event broadcaster failed.", exc_info=task.exception())
        for subscriber in list(self._subscribers):
            self.unsubscribe(subscriber)
        self._task = None


def stream_routes(broadcaster: Broadcaster) -> APIRouter:
    """Make the route GET /api/events."""
    router = APIRouter(tags=["status"])

    @router.get("/api/events", response_class=Response, responses={200: {"content": {EVENT_STREAM: {}}}})
    async def events(
        after: Annotated[int | None, Query(ge=0, le=LAST_SEQUENCE)] = None,
        last_event_id: Annotated[str | None, Header(max_length=40)] = None,
    ) -> Response:
        """Stream Server-Sent Events: `status` after every change, and `log` for every log line.

        Log lines are numbered. A reconnecting client sends the last number as Last-Event-ID (or `after`) and receives
        the lines it missed. Other routes have entity tags: read them again with If-None-Match.
        """
        subscriber = broadcaster.subscribe(last_line(last_event_id, after))
        return WatchedStream(subscriber.chunks(), subscriber.close, lambda: broadcaster.unsubscribe(subscriber))

    return router


def last_line(last_event_id: str | None, after: int | None) -> int | None:
    """Number of the last log line that a client has. The header, which browsers send, overrides `after`."""
    if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit():
        return int(last_event_id)
    return after
