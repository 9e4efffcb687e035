"""TCP connections whose line was cut without a word: the system is asked to notice, as far as it can."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

QUIET_SECONDS = 20  # without any byte, before the other side's system is asked whether it is there
AGAIN_SECONDS = 5
TRIES = 4
UNANSWERED_SECONDS = 45  # for what was sent to be confirmed, or taken; Linux only

_MILLISECONDS = 1000


def notice_silence(set_option: Callable[[int, int, int], None]) -> None:
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
