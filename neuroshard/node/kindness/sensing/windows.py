"""What Windows tells about its user: the last input, and whether a program fills the screen."""

from __future__ import annotations

import ctypes
from typing import Any

from neuroshard.node.kindness.policy import Unknown

TICKS = 2**32  # milliseconds after which Windows' counter begins again
BUSY, FULL_SCREEN_3D, PRESENTATION = 2, 3, 4  # of QUERY_USER_NOTIFICATION_STATE
_KNOWN_STATES = range(1, 8)


class LastInputInfo(ctypes.Structure):
    """LASTINPUTINFO."""

    _fields_ = (("cbSize", ctypes.c_uint32), ("dwTime", ctypes.c_uint32))


def windows_idle_seconds() -> float | Unknown:
    """Since the last input in this session."""
    library: Any = ctypes
    info = LastInputInfo(ctypes.sizeof(LastInputInfo), 0)
    if not library.windll.user32.GetLastInputInfo(ctypes.byref(info)):
        return Unknown("Windows does not tell the last input of this session")
    return idle_from_ticks(library.windll.kernel32.GetTickCount(), info.dwTime)


def idle_from_ticks(now: int, last_input: int) -> float:
    """Seconds between two readings of a counter that begins again after 49.7 days; ctypes may give it a sign."""
    return (now - last_input) % TICKS / 1000


def windows_is_full_screen() -> bool | Unknown:
    """By the state that Windows keeps so that nobody is disturbed in a game or a talk."""
    library: Any = ctypes
    state = ctypes.c_int(0)
    result: int = library.windll.shell32.SHQueryUserNotificationState(ctypes.byref(state))
    return full_screen_from_state(result, state.value)


def full_screen_from_state(result: int, state: int) -> bool | Unknown:
    """`result` is an HRESULT."""
    if result != 0 or state not in _KNOWN_STATES:
        return Unknown("Windows does not tell whether a program fills the screen")
    return state in (BUSY, FULL_SCREEN_3D, PRESENTATION)
