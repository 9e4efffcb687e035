"""The desktop around this process: whether somebody sits there, and showing them a page."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Mapping
from threading import Thread

OPENING_SECONDS = 5.0


def open_browser_at(url: str) -> None:
    """Show the dashboard. Not where only a browser in the terminal could: it would take the terminal over."""
    if has_desktop(sys.platform, os.environ):
        opening = Thread(target=webbrowser.open, args=(url,), name="neuroshard-browser", daemon=True)
        opening.start()
        opening.join(OPENING_SECONDS)  # some browsers are waited for until their window is closed


def has_desktop(platform: str, environment: Mapping[str, str]) -> bool:
    """Whether programs started here can show windows."""
    if platform in ("win32", "darwin"):
        return not any(map(environment.get, ("SSH_CONNECTION", "SSH_TTY")))
    return any(map(environment.get, ("DISPLAY", "WAYLAND_DISPLAY")))


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
