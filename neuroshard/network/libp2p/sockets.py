"""TCP sockets for libp2p: listening sockets, a shared port, and exact reads from a bounded buffer."""

from __future__ import annotations

import errno
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import Self

import anyio
import trio
from libp2p.abc import IListener
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError, IOException
from multiaddr import Multiaddr

from neuroshard.errors import NetworkRefusedError, UsageError
from neuroshard.network.libp2p.addresses import reachable_hosts
from neuroshard.network.tcp_options import TcpInfo, choose_sending, enable_keepalive, tcp_info

# a Noise message has at most 65,535 bytes; a larger read comes from a stranger's length field
MAX_READ_BYTES = 128 * 1024


class SocketBytes(ReadWriteCloser):
    """One TCP connection."""

    def __init__(self, stream: trio.SocketStream, congestion_control: str | None = None) -> None:
        """`congestion_control` is an algorithm of the system; None for its default."""
        self._stream = stream
        self._received = bytearray()
        self.portion_bytes = MAX_READ_BYTES  # of a read that takes what is there
        self._remote = _remote_address(stream)
        self.heard_at = trio.current_time()
        enable_keepalive(stream.setsockopt)
        choose_sending(stream.setsockopt, congestion_control)

    async def read(self, n: int | None = None) -> bytes:
        """Exactly n bytes, or fewer at the end of the connection. None: the next available bytes.

        Raises IOException above MAX_READ_BYTES, ConnectionClosedError if the connection broke.
        """
        wanted = 1 if n is None else n
        if wanted > MAX_READ_BYTES:
            raise IOException(f"a read of {wanted} bytes is above the limit")
        if n is None and not self._received:
            return await self._receive()  # without a copy: here a body passes through
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
        """Send all bytes. Raises ConnectionClosedError if the connection broke or was closed."""
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the connection broke: {error}", transport="tcp") from error

    async def close(self) -> None:
        """Close the socket."""
        await self._stream.aclose()

    def tcp_info(self) -> TcpInfo | None:
        """The system's measurements of the connection, where it has any."""
        return tcp_info(self._stream.socket.getsockopt)

    def get_remote_address(self) -> tuple[str, int] | None:
        """IP address and port of the other side."""
        return self._remote

    @property
    def ip(self) -> str:
        """IP address of the other side, "" if it has left already."""
        return self._remote[0] if self._remote else ""

    def cut(self) -> None:
        """Close the socket at once: reads end, writes fail."""
        self._stream.socket.close()

    async def _receive(self) -> bytes:
        try:
            data = bytes(await self._stream.receive_some(self.portion_bytes))
        except trio.BrokenResourceError as error:
            raise ConnectionClosedError(f"the connection broke: {error}", transport="tcp") from error
        except trio.ClosedResourceError:
            return b""
        self.heard_at = trio.current_time()
        return data


def _remote_address(stream: trio.SocketStream) -> tuple[str, int] | None:
    try:
        name = stream.socket.getpeername()
    except OSError:  # the other side has already left
        return None
    host, port = str(name[0]), int(name[1])
    return host.removeprefix("::ffff:"), port


BACKLOG = 128
_REASONS = {
    errno.EADDRINUSE: "another program uses it",
    errno.EACCES: "this user may not open it",
    errno.EADDRNOTAVAIL: "this computer does not have that address",
}
_ACTIONS = {errno.EADDRNOTAVAIL: "Pass one of its addresses with --p2p-host, or omit the option."}


class BoundListener(IListener):
    """Bound sockets of one host and port. Connections are accepted from `serve` on."""

    def __init__(self, host: str, listeners: Sequence[trio.SocketListener]) -> None:
        self._host = host
        self._listeners = tuple(listeners)
        self._scope = anyio.CancelScope()
        self.port = int(listeners[0].socket.getsockname()[1])

    @classmethod
    async def open(cls, host: str, port: int, *, is_shared: bool = False) -> Self:
        """Bind the sockets; port 0 takes a free one. `is_shared` lets this process dial from the same port.

        Raises NetworkRefusedError if the port is not available, UsageError for an invalid host.
        """
        try:
            listeners: Sequence[trio.SocketListener] = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
            if is_shared:  # a shared port would also be granted to a second node, so it was tried without sharing first
                port = int(listeners[0].socket.getsockname()[1])
                for listener in listeners:
                    await listener.aclose()
                listeners = [await _open_shared(host, port)]
        except socket.gaierror as error:
            raise UsageError(f"This node cannot listen on the host {host!r}: {error.strerror}.") from None
        except (OSError, OverflowError) as error:
            reason = _REASONS.get(getattr(error, "errno", 0), str(error))
            raise NetworkRefusedError(
                f"The port {port} at {host} cannot be opened: {reason}.",
                _ACTIONS.get(getattr(error, "errno", 0), "Choose another port, or 0 for a free one."),
            ) from error
        return cls(host, listeners)

    async def serve(self, handle: Callable[[trio.SocketStream], Awaitable[None]]) -> None:
        """Accept until closed; each connection is handled in its own task."""
        with self._scope:
            await trio.serve_listeners(handle, self._listeners)

    async def listen(self, maddr: Multiaddr) -> None:
        """Unused: the sockets are bound already."""
        raise NotImplementedError

    def hosts(self) -> tuple[str, ...]:
        """IP addresses at which peers may reach these sockets now."""
        return reachable_hosts(self._host)

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        """Addresses at which peers may reach these sockets."""
        return tuple(_multiaddr(host, self.port) for host in self.hosts())

    async def close(self) -> None:
        """End `serve` with all its connections, and close the sockets."""
        self._scope.cancel()
        for listener in self._listeners:
            await listener.aclose()


def _multiaddr(host: str, port: int) -> Multiaddr:
    return Multiaddr(f"/ip{ip_address(host).version}/{host}/tcp/{port}")


async def _open_shared(host: str, port: int) -> trio.SocketListener:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        share_port(sock)
        await sock.bind((host, port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return trio.SocketListener(sock)


def share_port(sock: trio.socket.SocketType) -> None:
    """Allow a second socket of this user on the same port, on systems that support it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
