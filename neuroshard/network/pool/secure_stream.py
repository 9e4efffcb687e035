"""TLS over a non-blocking socket, driven by trio: bytes are encrypted from and decrypted into the caller's memory.

Many records are handled for one wake-up, which costs about half of what trio.SSLStream costs.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable

import trio

from neuroshard.network.pool.errors import ConnectionLostError

_BROKEN = (OSError, ValueError)  # ssl.SSLError is the former; a closed socket raises either


class SecureStream:
    """One TLS connection; one task may send while one other receives. After any error it is only good for `close`."""

    def __init__(self, socket: ssl.SSLSocket) -> None:
        """`socket` must not block and must not have shaken hands yet."""
        self.socket = socket
        self.waits = 0  # how often it had to wait for the other side
        self._is_closed = False

    async def handshake(self) -> None:
        """The TLS handshake. Raises ConnectionLostError."""
        while True:
            try:
                self.socket.do_handshake()
            except ssl.SSLWantReadError:
                await self._wait(trio.lowlevel.wait_readable)
            except ssl.SSLWantWriteError:
                await self._wait(trio.lowlevel.wait_writable)
            except _BROKEN as error:
                raise _lost(error) from None
            else:
                return

    async def receive_some(self, memory: memoryview) -> int:
        """Wait for bytes and put at most a record into `memory`. Raises ConnectionLostError, also at the end."""
        return await self._receive(memory, 1)

    async def receive_exactly(self, memory: memoryview) -> None:
        """Fill `memory`. Raises ConnectionLostError."""
        await self._receive(memory, len(memory))

    async def receive_bytes(self, count: int) -> bytes:
        """So many bytes. Raises ConnectionLostError."""
        data = bytearray(count)
        await self.receive_exactly(memoryview(data))
        return bytes(data)

    async def send_all(self, data: bytes | memoryview) -> None:
        """Hand all of `data` to the system. Raises ConnectionLostError."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self.socket.send(rest) :]
            except ssl.SSLWantWriteError:
                await self._wait(trio.lowlevel.wait_writable)
            except _BROKEN as error:
                raise _lost(error) from None

    def close(self) -> None:
        """Close the socket; whoever waits for it gets ConnectionLostError."""
        if not self._is_closed:
            self._is_closed = True
            trio.lowlevel.notify_closing(self.socket.fileno())
            self.socket.close()

    async def _receive(self, memory: memoryview, least: int) -> int:
        receive = self.socket.recv_into
        filled, size = 0, len(memory)
        while filled < least:
            try:
                count = receive(memory[filled:], size - filled)
            except ssl.SSLWantReadError:
                await self._wait(trio.lowlevel.wait_readable)
                continue
            except _BROKEN as error:
                raise _lost(error) from None
            if count == 0:
                raise ConnectionLostError("the other side closed the connection")
            filled += count
        return filled

    async def _wait(self, until_ready: Callable[[int], Awaitable[None]]) -> None:
        self.waits += 1
        try:
            await until_ready(self.socket.fileno())
        except (*_BROKEN, trio.ClosedResourceError) as error:
            raise _lost(error) from None


def _lost(error: Exception) -> ConnectionLostError:
    return ConnectionLostError(str(error) or type(error).__name__)
