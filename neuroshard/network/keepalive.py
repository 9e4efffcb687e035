"""TCP keepalive: the operating system detects a connection that broke without a FIN or RST packet."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

QUIET_SECONDS = 20  # without any byte, before the other side's system is asked whether it is there
AGAIN_SECONDS = 5
TRIES = 4
UNANSWERED_SECONDS = 45  # for what was sent to be confirmed, or taken; Linux only

_MILLISECONDS = 1000


def enable_keepalive(set_option: Callable[[int, int, int], None]) -> None:
    """`set_option` is the setsockopt of a TCP socket. An option that the system lacks is left out."""
    wanted = {
        "TCP_KEEPIDLE": QUIET_SECONDS,  # Linux, Windows
        "TCP_KEEPALIVE": QUIET_SECONDS,  # macOS
        "TCP_KEEPINTVL": AGAIN_SECONDS,
        "TCP_KEEPCNT": TRIES,
        "TCP_USER_TIMEOUT": UNANSWERED_SECONDS * _MILLISECONDS,
    }
    with suppress(OSError):  # it broke already, which whoever uses it sees
        set_option(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in wanted.items():
            option = getattr(socket, name, None)
            if isinstance(option, int):
                set_option(socket.IPPROTO_TCP, option, value)
