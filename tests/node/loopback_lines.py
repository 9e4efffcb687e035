"""The lines of nodes on one computer: all that they send each other passes here, slowly for some of them."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager, suppress

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, SocketAttribute, SocketStream, TaskStatus
from anyio.from_thread import start_blocking_portal
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.memory import MemoryObjectReceiveStream
from odd_computer import CONNECTED, REFUSED

SLOW_SECONDS = 0.15  # on the way over a slow line
PIECES_UNDER_WAY = 8  # of up to 64 KiB: so a slow line also has a rate, of some 30 Mbit/s
QUESTION_BYTES = 200


class LoopbackLines:
    """Carries the connections of programs that `odd_computer.py` started, each with a number."""

    def __init__(self) -> None:
        self.port = 0  # where the programs call
        self.slow = set[int]()  # numbers of those whose lines are slow, from now on
        self.slow_pieces = 0  # that went over slow lines
        self._listeners = dict[int, int]()  # by port

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        """Carry connections until cancelled."""
        async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
            self.port = listener.extra(SocketAttribute.local_port)
            task_status.started()
            await listener.serve(self._answer)

    async def _answer(self, caller: SocketStream) -> None:
        async with caller:
            with suppress(anyio.BrokenResourceError, anyio.IncompleteRead):  # it was killed
                question = await BufferedByteReceiveStream(caller).receive_until(b"\n", QUESTION_BYTES)
                number, host, port = json.loads(question)
                if host is None:
                    self._listeners[port] = number
                else:
                    await self._connect(caller, number, host, port)

    async def _connect(self, caller: SocketStream, number: int, host: str, port: int) -> None:
        try:
            called = await anyio.connect_tcp(host, port)
        except OSError:
            await caller.send(REFUSED)
            return
        ends = {number, self._listeners.get(port, number)}
        async with called, anyio.create_task_group() as tasks:
            await caller.send(CONNECTED)

            async def carry(source: ByteReceiveStream, sink: ByteSendStream) -> None:
                under_way, arriving = anyio.create_memory_object_stream[tuple[float, bytes]](PIECES_UNDER_WAY)
                tasks.start_soon(deliver, arriving, sink)
                with under_way, suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                    while True:
                        piece = await source.receive()
                        is_slow = bool(ends & self.slow)
                        self.slow_pieces += is_slow
                        await under_way.send((anyio.current_time() + is_slow * SLOW_SECONDS, piece))

            async def deliver(arriving: MemoryObjectReceiveStream[tuple[float, bytes]], sink: ByteSendStream) -> None:
                with arriving, suppress(anyio.BrokenResourceError):
                    async for due, piece in arriving:
                        await anyio.sleep_until(due)
                        await sink.send(piece)
                tasks.cancel_scope.cancel()  # one end is gone: so is the connection

            tasks.start_soon(carry, caller, called)
            tasks.start_soon(carry, called, caller)


@contextmanager
def loopback_lines() -> Generator[LoopbackLines]:
    """Lines, carried by a thread of this process; every connection ends with the block."""
    lines = LoopbackLines()
    with start_blocking_portal() as portal:
        serving, _ = portal.start_task(lines.serve)
        try:
            yield lines
        finally:
            serving.cancel()
