"""TCP options of every connection: keepalive, a short queue of unsent bytes, and the congestion control."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

QUIET_SECONDS = 20  # without traffic, before the other side's operating system is probed
AGAIN_SECONDS = 5
TRIES = 4
UNANSWERED_SECONDS = 45  # until sent bytes must be acknowledged or accepted; Linux only

UNSENT_BYTES = 128 * 1024  # that the system accepts before it has sent them once

_MILLISECONDS = 1000
SetOption: TypeAlias = Callable[[int, int, int | bytes], None]
"""A socket's setsockopt."""


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
