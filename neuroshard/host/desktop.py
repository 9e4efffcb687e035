"""The desktop of this process: whether a user sits there and can see windows, and opening a page in a browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Thread

import psutil

OPENING_SECONDS = 5.0
OUR_LAUNCHERS = frozenset({"neuroshard.exe", "python.exe", "pythonw.exe"})  # processes of our command on Windows


def open_browser_at(url: str) -> bool:
    """Open a page if there is a desktop, and return whether a browser took it.

    Without a desktop, a browser in the terminal would take the terminal over.
    """
    if not has_desktop(sys.platform, os.environ):
        return False
    outcome: list[bool] = []
    opening = Thread(target=lambda: outcome.append(webbrowser.open(url)), name="neuroshard-browser", daemon=True)
    opening.start()
    opening.join(OPENING_SECONDS)  # with some browsers the call waits until their window is closed
    return outcome != [False]


def has_desktop(platform: str, environment: Mapping[str, str]) -> bool:
    """Whether programs started here can show windows."""
    if platform in ("win32", "darwin"):
        return not is_over_ssh(environment)
    return any(map(environment.get, ("DISPLAY", "WAYLAND_DISPLAY")))


def is_over_ssh(environment: Mapping[str, str]) -> bool:
    """Whether this process was started over SSH, so that its user reads the output on another computer."""
    return any(map(environment.get, ("SSH_CONNECTION", "SSH_TTY")))


def is_service(process_id: int, environment: Mapping[str, str]) -> bool:
    """Whether systemd or launchd started this very process as a service, so that no user waits for a page."""
    # Programs that a desktop starts inherit systemd's other variables. Their launchd job name begins as below.
    agent = environment.get("XPC_SERVICE_NAME", "0")
    return environment.get("SYSTEMD_EXEC_PID") == str(process_id) or not agent.startswith(("0", "application."))


def has_browser() -> bool:
    """Whether Python's `webbrowser` finds a browser to open."""
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def can_show_pages() -> bool:
    """Whether a user at a desktop would see a page that this process opens."""
    return has_desktop(sys.platform, os.environ) and not is_service(os.getpid(), os.environ) and has_browser()


def has_terminal() -> bool:
    """Whether a user can read this process's output after its end: not if a menu or an icon started it."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if sys.platform == "win32":
        return any(stream is not None for stream in streams) and not is_own_window(_ancestors())
    if any(stream is not None and not stream.closed and stream.isatty() for stream in streams):
        return True
    try:
        os.close(os.open(os.ctermid(), os.O_RDONLY | os.O_NOCTTY))
    except OSError:  # no terminal controls this process
        return False
    return True


@dataclass(frozen=True)
class Ancestor:
    """A process above this one: the parent, its parent, and so on."""

    name: str
    arguments: tuple[str, ...] = ()


def is_own_window(ancestors: Sequence[Ancestor]) -> bool:
    """Whether the Windows console of this process closes with it. `ancestors` begins with the parent.

    It does if the shell started our launcher, or a batch file by `cmd /c`. Any other program keeps the console open.
    """
    for ancestor in ancestors:
        name = ancestor.name.lower()
        if name == "explorer.exe":
            return True
        is_batch = name == "cmd.exe" and "/c" in map(str.lower, ancestor.arguments)
        if not is_batch and name not in OUR_LAUNCHERS:
            return False
    return False


def _ancestors() -> list[Ancestor]:
    """The processes above this one, up to one that keeps the console open or may not be read."""
    found: list[Ancestor] = []
    try:
        for process in psutil.Process().parents():
            found.append(Ancestor(process.name(), tuple(process.cmdline())))
            if not is_own_window([*found, Ancestor("explorer.exe")]):
                break  # processes further up do not matter, and reading them may be forbidden
    except psutil.Error:
        return found
    return found
