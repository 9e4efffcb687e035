"""The event stream: changes between two snapshots as Server-Sent Events, and the task that sends them to clients."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from neuroshard.api.bodies.node import CheckpointGenerationBody, HeldOutBody, LogRecordBody, PeerBody
from neuroshard.api.bodies.training import HistoryPoint
from neuroshard.api.context import ApiContext, ApiLimits
from neuroshard.api.rendering import RenderedViews, ResponseBody
from neuroshard.api.routes import LAST_SEQUENCE
from neuroshard.api.streaming import EVENT_STREAM, WatchedStream
from neuroshard.api.views.node import peer_body, status_view
from neuroshard.api.views.training import diloco_progress, history_point
from neuroshard.errors import NotReadyError
from neuroshard.status.snapshot import NodeStatus
from neuroshard.telemetry.logs import LogLine

HEARTBEAT = b": nothing new\n\n"
START = b"retry: 2000\n\n"
# Sent when a client was too slow or training went back to an earlier step: what it holds has gaps.
RESET = b"event: reset\ndata: {}\n\n"


class LossEvent(ResponseBody):
    """New points of the training curve, oldest first."""

    points: list[HistoryPoint]


class PeersEvent(ResponseBody):
    """Peers that came or changed, and node ids of those that went."""

    count: int
    changed: list[PeerBody]
    gone: list[str]


def encode_event(name: str, json: bytes, identity: int | None = None) -> bytes:
    """One event; JSON of our own making holds no line break. `identity` comes back as Last-Event-ID."""
    prefix = b"" if identity is None else b"id: %d\n" % identity
    return prefix + b"event: " + name.encode() + b"\ndata: " + json + b"\n\n"


def events_between(before: NodeStatus, now: NodeStatus) -> Iterator[bytes]:
    """Everything but the status itself that is new in the later snapshot, in the order of a training step."""
    if now.training.steps < before.training.steps:
        yield RESET
        return
    last_point = before.history[-1].step if before.history else -1
    points = [history_point(point) for point in now.history if point.step > last_point]
    if points:
        yield _event("loss", LossEvent(points=points))
    evaluated = len(before.training.held_out)
    last_evaluation = before.training.held_out[-1].step if evaluated else -1
    for evaluation in now.training.held_out:
        if evaluation.step > last_evaluation:
            yield _event("evaluation", HeldOutBody.model_validate(evaluation))
    known = {(saved.path, saved.time) for saved in before.checkpoints.generations}
    for saved in reversed(now.checkpoints.generations):
        if (saved.path, saved.time) not in known:
            yield _event("checkpoint", CheckpointGenerationBody.model_validate(saved))
    if _rounds(before) != _rounds(now):
        yield _event("sync", diloco_progress(now.diloco))


def peers_between(before: NodeStatus, now: NodeStatus) -> Iterator[bytes]:
    """One event about the peers that came, changed or went; none when nothing did."""
    if now.peers is before.peers:
        return
    known = {peer.node_id: peer for peer in before.peers}
    changed = [peer for peer in now.peers if known.pop(peer.node_id, None) != peer]
    if changed or known:
        bodies = [peer_body(peer) for peer in changed]
        yield _event("peers", PeersEvent(count=len(now.peers), changed=bodies, gone=sorted(known)))


def log_event(line: LogLine) -> bytes:
    """One log line; its sequence number is the event's id, so that a client goes on after the last one it got."""
    return encode_event("log", LogRecordBody.model_validate(line).model_dump_json().encode(), line.sequence)


def _event(name: str, body: ResponseBody) -> bytes:
    return encode_event(name, body.model_dump_json().encode())


def _rounds(status: NodeStatus) -> tuple[int, int, int]:
    diloco = status.diloco
    return diloco.outer_steps, diloco.successful_syncs, diloco.failed_syncs


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
        self._sent_peers: tuple[float, NodeStatus] = (0.0, context.board.current())  # loop time, snapshot
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
            self._sent_peers = (0.0, self._seen[1])
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
        told_at, told = self._sent_peers
        if now - told_at < self._limits.peers_seconds:
            return
        self._sent_peers = (now, status)
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


def stream_routes(broadcaster: Broadcaster) -> APIRouter:
    """GET /api/events."""
    router = APIRouter(tags=["status"])

    @router.get("/api/events", response_class=Response, responses={200: {"content": {EVENT_STREAM: {}}}})
    async def events(
        after: Annotated[int | None, Query(ge=0, le=LAST_SEQUENCE)] = None,
        last_event_id: Annotated[str | None, Header(max_length=40)] = None,
    ) -> Response:
        """Server-Sent Events: status, loss, evaluation, checkpoint, sync, peers, log, reset.

        Log lines are numbered; a reconnecting client sends the last number as Last-Event-ID (or `after`) and gets
        the lines it missed. `peers` tells what changed since /api/peers was read. `reset` says
        that events were dropped: read the history and the peers anew.
        """
        subscriber = broadcaster.subscribe(last_line(last_event_id, after))
        return WatchedStream(subscriber.chunks(), subscriber.close, lambda: broadcaster.unsubscribe(subscriber))

    return router


def last_line(last_event_id: str | None, after: int | None) -> int | None:
    """The log line a client has seen; browsers give the header when they connect again."""
    if last_event_id is not None and last_event_id.isascii() and last_event_id.isdigit():
        return int(last_event_id)
    return after
