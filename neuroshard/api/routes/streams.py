"""The event stream."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query
from starlette.responses import Response

from neuroshard.api.broadcast import Broadcaster
from neuroshard.api.routes.reading import LAST_SEQUENCE
from neuroshard.api.streaming import EVENT_STREAM, WatchedStream


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
