"""TCP options of every connection: keepalive, a short queue of unsent bytes, the congestion control; measurements."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from struct import Struct
from typing import TypeAlias

QUIET_SECONDS = 20  # without traffic, before the other side's operating system is probed
AGAIN_SECONDS = 5
TRIES = 4
UNANSWERED_SECONDS = 45  # until sent bytes must be acknowledged or accepted; Linux only

UNSENT_BYTES = 128 * 1024  # that the system accepts before it has sent them once

_MILLISECONDS = 1000
SetOption: TypeAlias = Callable[[int, int, int | bytes], None]
"""A socket's setsockopt."""
GetOption: TypeAlias = Callable[[int, int, int], bytes]
"""A socket's getsockopt."""


def enable_keepalive(set_option: SetOption) -> None:
    """Let the operating system detect a connection that broke without a FIN or RST packet.

    Options unknown to the system are skipped.
    """
    wanted = {
        "TCP_KEEPIDLE": QUIET_SECONDS,  # Linux, Windows
        "TCP_KEEPALIVE": QUIET_SECONDS,  # macOS
        "TCP_KEEPINTVL": AGAIN_SECONDS,
        "TCP_KEEPCNT": TRIES,
        "TCP_USER_TIMEOUT": UNANSWERED_SECONDS * _MILLISECONDS,
    }
    with suppress(OSError):  # the connection is already broken; its user sees that
        set_option(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in wanted.items():
            option = getattr(socket, name, None)
            if isinstance(option, int):
                set_option(socket.IPPROTO_TCP, option, value)


def choose_sending(set_option: SetOption, congestion_control: str | None) -> None:
    """Keep the queue in front of the line short, and use this congestion control where the system has it.

    With a long queue a small message would wait behind megabytes of another transfer. Only Linux has both.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError):  # the connection is already broken, or the kernel does not have or allow the algorithm
        set_option(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if congestion_control is not None:
            set_option(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())


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


def tcp_info(get_option: GetOption) -> TcpInfo | None:
    """The connection's measurements; None where the system does not report them, or the connection is closed."""
    if sys.platform != "linux":
        return None
    try:
        data = get_option(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
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
