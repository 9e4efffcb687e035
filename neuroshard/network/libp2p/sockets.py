"""TCP sockets as libp2p wants them: exact reads from one buffer of bounded size, closed whatever happens."""

from __future__ import annotations

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError, IOException

from neuroshard.network.silence import notice_silence

MAX_READ_BYTES = 128 * 1024  # a Noise message has 65,535 at most; a larger wish comes from a stranger's length field


class SocketBytes(ReadWriteCloser):
    """One TCP connection."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._received = bytearray()
        self._remote = _remote_address(stream)
        notice_silence(stream.setsockopt)

    async def read(self, n: int | None = None) -> bytes:
        """Exactly n bytes, or fewer at the end of the connection. None: whatever comes next.

        Raises IOException above MAX_READ_BYTES, ConnectionClosedError when the connection broke.
        """
        wanted = 1 if n is None else n
        if wanted > MAX_READ_BYTES:
            raise IOException(f"a read of {wanted} bytes is above the limit")
        while len(self._received) < wanted:
            data = await self._receive()
            if not data:
                break
            self._received += data
        count = len(self._received) if n is None else min(n, len(self._received))
        result = bytes(self._received[:count])
        del self._received[:count]
        return result

    async def write(self, data: bytes) -> None:
        """Send everything. Raises ConnectionClosedError when the connection broke or was closed."""
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the connection broke: {error}", transport="tcp") from error

    async def close(self) -> None:
        """Close the socket."""
        await self._stream.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        """IP address and port of the other side."""
        return self._remote

    async def _receive(self) -> bytes:
        try:
            return bytes(await self._stream.receive_some(MAX_READ_BYTES))
        except trio.BrokenResourceError as error:
            raise ConnectionClosedError(f"the connection broke: {error}", transport="tcp") from error
        except trio.ClosedResourceError:
            return b""


def _remote_address(stream: trio.SocketStream) -> tuple[str, int] | None:
    try:
        name = stream.socket.getpeername()
    except OSError:  # the other side has gone already
        return None
    host, port = str(name[0]), int(name[1])
    return host.removeprefix("::ffff:"), port
