"""TCP keepalive: the operating system detects a connection that broke without a FIN or RST packet."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

QUIET_SECONDS = 20  # without traffic, before the other side's operating system is probed
AGAIN_SECONDS = 5
TRIES = 4
UNANSWERED_SECONDS = 45  # until sent bytes must be acknowledged or accepted; Linux only

_MILLISECONDS = 1000


def enable_keepalive(set_option: Callable[[int, int, int], None]) -> None:
    """Enable TCP keepalive through `set_option`, a socket's setsockopt. Options unknown to the system are skipped."""
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
