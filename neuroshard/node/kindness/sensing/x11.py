"""The X display of this session: how long nobody touched anything, and whether a program fills the screen."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from neuroshard.node.kindness.policy import Unknown

RETRY_SECONDS = 10.0
T = TypeVar("T")


class X11Display:
    """A connection that is opened at the first look, and again after the display went away. For one thread at a time.

    python-xlib, not the C library: that one ends the whole process when its display goes away.
    """

    def __init__(self, name: str) -> None:
        """`name` as in the variable DISPLAY."""
        self._name = name
        self._display: Any = None
        self._failed_at = -RETRY_SECONDS

    def idle_seconds(self) -> float | Unknown:
        """Since the last input on this display."""
        return self._asked(_idle_seconds)

    def is_full_screen(self) -> bool | Unknown:
        """Whether the active window says that it fills the screen."""
        return self._asked(_is_full_screen)

    def close(self) -> None:
        """Hang up; the next look dials again."""
        display, self._display = self._display, None
        if display is not None:
            display.display.socket.close()  # display.close() would say good-bye first, to a server that may be gone

    def _asked(self, question: Callable[[Any], T | Unknown]) -> T | Unknown:
        try:
            errors = import_module("Xlib.error")
        except ImportError:  # a program that was put together without it: nothing to end a node for
            return Unknown("python-xlib is not installed")
        failures = (errors.DisplayError, errors.ConnectionClosedError, errors.XauthError, OSError)
        try:
            if self._display is None and time.monotonic() - self._failed_at < RETRY_SECONDS:
                return Unknown(f"the display {self._name} does not answer")
            if self._display is None:
                self._display = import_module("Xlib.display").Display(self._name)
            return question(self._display)
        except errors.XError:  # a window that went away meanwhile: nothing fills the screen this moment
            return Unknown("the active window has just gone")
        except failures as error:
            self.close()
            self._failed_at = time.monotonic()
            return Unknown(f"the display {self._name} does not answer ({type(error).__name__})")


def _idle_seconds(display: Any) -> float | Unknown:
    if display.query_extension("MIT-SCREEN-SAVER") is None:
        return Unknown("the display has no MIT-SCREEN-SAVER extension")
    return display.screen().root.screensaver_query_info().idle / 1000.0


def _is_full_screen(display: Any) -> bool | Unknown:
    """As the desktop's window manager and programs agree on it (Extended Window Manager Hints)."""
    root = display.screen().root
    if root.get_full_property(display.intern_atom("_NET_SUPPORTED"), 0) is None:
        return Unknown("no window manager tells which window is active")
    active = root.get_full_property(display.intern_atom("_NET_ACTIVE_WINDOW"), 0)
    if active is None or not active.value or not active.value[0]:
        return False
    window = display.create_resource_object("window", active.value[0])
    state = window.get_full_property(display.intern_atom("_NET_WM_STATE"), 0)
    return state is not None and display.intern_atom("_NET_WM_STATE_FULLSCREEN") in state.value
