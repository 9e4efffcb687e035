"""TCP measurements and options of the operating system: many on Linux, none elsewhere."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from struct import Struct

import trio

from neuroshard.errors import NetworkRefusedError
from neuroshard.network.pool.options import ConnectionLostError, DialRefusedError, Endpoint
from neuroshard.network.tcp_options import choose_sending, enable_keepalive

_BACKLOG = 128
_INFO = Struct("=8x 24I 4Q 6I 4Q")  # the beginning of struct tcp_info in linux/tcp.h
_RTT, _REPEATED, _ACKNOWLEDGED, _LEAST_RTT, _SEGMENTS, _BUSY = 15, 23, 26, 31, 33, 35  # counted without the first 8


@dataclass(frozen=True)
class TcpInfo:
    """Counters of one connection since it was opened."""

    bytes_acknowledged: int
    segments_sent: int  # with data
    segments_repeated: int
    busy_seconds: float  # with data on its way
    rtt_seconds: float  # smoothed
    least_rtt_seconds: float


def tcp_info(connection: socket.socket) -> TcpInfo | None:
    """The connection's measurements; None where the system does not report them, or the connection is closed."""
    if sys.platform != "linux":
        return None
    try:
        data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return None
    if len(data) < _INFO.size:  # an old kernel
        return None
    fields: tuple[int, ...] = _INFO.unpack(data)
    return TcpInfo(
        bytes_acknowledged=fields[_ACKNOWLEDGED],
        segments_sent=fields[_SEGMENTS],
        segments_repeated=fields[_REPEATED],
        busy_seconds=fields[_BUSY] / 1e6,
        rtt_seconds=fields[_RTT] / 1e6,
        least_rtt_seconds=fields[_LEAST_RTT] / 1e6,
    )


def congestion_control(connection: socket.socket) -> str | None:
    """The algorithm in use; None where the system does not report it."""
    if sys.platform != "linux":
        return None
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()


def set_up(connection: socket.socket, algorithm: str | None) -> None:
    """Do not block, do not wait for more to send, notice a line that is cut, and send by this congestion control."""
    connection.setblocking(False)
    enable_keepalive(connection.setsockopt)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    choose_sending(connection.setsockopt, algorithm)


def gather(connection: socket.socket, *, is_on: bool) -> None:
    """While on, send only full segments, so that many records leave, and arrive, in few pieces.

    Where the system cannot do that, every record is sent for itself.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # closed meanwhile
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, is_on)


def is_set_up(connection: socket.socket, algorithm: str | None) -> bool:
    """Like `set_up`, False when the connection broke already."""
    try:
        set_up(connection, algorithm)
    except OSError:
        return False
    return True


def listen(endpoint: Endpoint) -> socket.socket:
    """A listening socket that does not block. Raises NetworkRefusedError."""
    host, port = endpoint
    try:
        listener = socket.socket(_family(host), socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise NetworkRefusedError(f"No port can be opened at the address {host!r}: {error}.") from error
    try:
        if sys.platform != "win32":  # there it would let another program take the port over
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except (OSError, OverflowError) as error:
        listener.close()
        raise NetworkRefusedError(
            f"The port {port} for tensors cannot be opened at {host}: {error}.", "Choose another one, or 0 for any."
        ) from error
    return listener


async def accept_connection(listener: socket.socket) -> tuple[socket.socket, str]:
    """The next connection and the IP address it comes from. Raises OSError when the system has no room for it."""
    while True:
        try:
            connection, address = listener.accept()
        except BlockingIOError:
            await trio.lowlevel.wait_readable(listener.fileno())
        except (ConnectionAbortedError, InterruptedError):
            await trio.lowlevel.checkpoint()
        else:
            return connection, str(address[0])


async def dial(endpoint: Endpoint, algorithm: str | None) -> socket.socket:
    """A new connection. Raises ConnectionLostError, DialRefusedError when nobody listens there."""
    try:
        connection = socket.socket(_family(endpoint[0]), socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise ConnectionLostError(str(error)) from None
    try:
        set_up(connection, algorithm)
        connection.connect(endpoint)
    except BlockingIOError:
        pass
    except (OSError, OverflowError) as error:
        connection.close()
        raise _not_dialled(error) from None
    try:
        await trio.lowlevel.wait_writable(connection.fileno())
    except BaseException:
        connection.close()
        raise
    problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if problem:
        connection.close()
        raise _not_dialled(OSError(problem, os.strerror(problem)))
    return connection


def _not_dialled(error: Exception) -> ConnectionLostError:
    kind = DialRefusedError if isinstance(error, ConnectionRefusedError) else ConnectionLostError
    return kind(str(error))


def is_local(address: str) -> bool:
    """Whether an IP address is one of this computer's loopback."""
    parsed = ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return (mapped or parsed).is_loopback


def _family(host: str) -> socket.AddressFamily:
    """Address family of an IP address. Raises ValueError for anything else: names are not looked up here."""
    return socket.AF_INET6 if isinstance(ip_address(host), IPv6Address) else socket.AF_INET
