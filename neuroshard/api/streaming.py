"""Long responses that end as soon as their client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

EVENT_STREAM = "text/event-stream"
Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed its connection before the answer was ready."""


class WatchedStream(StreamingResponse):
    """Writes chunks until they end. It calls `stop` if the client disconnects, and `finished` exactly once."""

    def __init__(self, chunks: AsyncGenerator[bytes], stop: Callable[[], None], finished: Callable[[], None]) -> None:
        super().__init__(chunks, media_type=EVENT_STREAM, headers={"X-Accel-Buffering": "no"})
        self._chunks = chunks
        self._stop = stop
        self._finished = finished

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        watcher = asyncio.get_running_loop().create_task(self._watch(receive))
        try:
            await self._send_all_chunks(send)
            # `finished` has run: a client that sees the end of the stream may ask again at once, without a refusal.
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()

    async def _send_all_chunks(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            self._finished()

    async def _watch(self, receive: Receive) -> None:
        await disconnected(receive)
        self._stop()


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for the result of `work`. If the client disconnects first, cancel the work and raise ClientGoneError."""
    loop = asyncio.get_running_loop()
    result = loop.create_task(work)
    gone = loop.create_task(disconnected(request.receive))
    try:
        await asyncio.wait({result, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientGoneError
        return result.result()
    finally:
        result.cancel()
        gone.cancel()
