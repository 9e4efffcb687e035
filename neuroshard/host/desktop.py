"""The desktop around this process: whether somebody sits there, what they see of it, and showing them a page."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Thread

import psutil

OPENING_SECONDS = 5.0
OUR_LAUNCHERS = frozenset({"neuroshard.exe", "python.exe", "pythonw.exe"})  # what our own command is made of on Windows


def open_browser_at(url: str) -> None:
    """Show the dashboard. Not where only a browser in the terminal could: it would take the terminal over."""
    if has_desktop(sys.platform, os.environ):
        opening = Thread(target=webbrowser.open, args=(url,), name="neuroshard-browser", daemon=True)
        opening.start()
        opening.join(OPENING_SECONDS)  # some browsers are waited for until their window is closed


def has_desktop(platform: str, environment: Mapping[str, str]) -> bool:
    """Whether programs started here can show windows."""
    if platform in ("win32", "darwin"):
        return not is_over_ssh(environment)
    return any(map(environment.get, ("DISPLAY", "WAYLAND_DISPLAY")))


def is_over_ssh(environment: Mapping[str, str]) -> bool:
    """Whether somebody elsewhere has started this process by SSH, and reads what it prints there, terminal or not."""
    return any(map(environment.get, ("SSH_CONNECTION", "SSH_TTY")))


def is_service(process_id: int, environment: Mapping[str, str]) -> bool:
    """Whether systemd or launchd has started this very process as a service: nobody waits for a page then."""
    # programs that a desktop starts inherit other variables of systemd, and a job name of launchd that begins so
    agent = environment.get("XPC_SERVICE_NAME", "0")
    return environment.get("SYSTEMD_EXEC_PID") == str(process_id) or not agent.startswith(("0", "application."))


def has_browser() -> bool:
    """Whether there is a browser to open."""
    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True


def can_show_pages() -> bool:
    """Whether somebody at a desktop would see a page that this process opens."""
    return has_desktop(sys.platform, os.environ) and not is_service(os.getpid(), os.environ) and has_browser()


def has_terminal() -> bool:
    """Whether what this process prints can be read when it has ended: not when a menu or an icon has started it."""
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
    """A program that has started this process, or one of its ancestors."""

    name: str
    arguments: tuple[str, ...] = ()


def is_own_window(ancestors: Sequence[Ancestor]) -> bool:
    """Whether the window of Windows that this process prints to closes with it. `ancestors`: the nearest one first.

    It is so when the shell has started our launcher, or a batch file by `cmd /c`; behind any other program somebody
    reads on.
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
    """The programs above this process, as far as it may know them."""
    found: list[Ancestor] = []
    try:
        for process in psutil.Process().parents():
            found.append(Ancestor(process.name(), tuple(process.cmdline())))
            if not is_own_window([*found, Ancestor("explorer.exe")]):
                break  # what is further away does not matter, and may not be ours to look at
    except psutil.Error:
        return found
    return found
