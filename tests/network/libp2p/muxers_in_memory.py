"""Two ends of a multiplexed connection in memory, without sockets and keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import trio
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError

from neuroshard.network.libp2p.muxer import BoundedMuxer, MuxerOptions
from neuroshard.network.libp2p.streams import RoundTrips


class SlowLine(RoundTrips):
    """Round trips of always this length, whatever is measured in memory."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        super().add(seconds)

    def add(self, seconds: float) -> None:
        """Nothing."""


class Pipe:
    """One end of a secured connection in memory; up to 64 messages wait for the other end."""

    def __init__(self, is_initiator: bool, send: Any, receive: Any) -> None:
        self.is_initiator = is_initiator
        self._send, self._receive = send, receive
        self.is_cut = False

    async def read(self, n: int | None = None) -> bytes:
        try:
            data: bytes = await self._receive.receive()
        except (trio.EndOfChannel, trio.ClosedResourceError):
            raise ConnectionClosedError("closed") from None
        return data

    async def write(self, data: bytes) -> None:
        if self.is_cut:
            return
        try:
            await self._send.send(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise ConnectionClosedError("closed") from None

    async def close(self) -> None:
        self._send.close()
        self._receive.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.DIRECT


def pipes() -> tuple[Pipe, Pipe]:
    there = trio.open_memory_channel[bytes](64)
    back = trio.open_memory_channel[bytes](64)
    return Pipe(True, there[0], back[1]), Pipe(False, back[0], there[1])


@asynccontextmanager
async def connected(options: MuxerOptions | None = None) -> AsyncIterator[tuple[BoundedMuxer, BoundedMuxer]]:
    first, second = pipes()
    muxers = BoundedMuxer(first, "b", options), BoundedMuxer(second, "a", options)
    async with anyio.create_task_group() as tasks:
        for muxer in muxers:
            tasks.start_soon(muxer.start)
        for muxer in muxers:
            await muxer.event_started.wait()
        yield muxers
        for muxer in muxers:
            await muxer.close()
