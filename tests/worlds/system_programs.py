"""Finds the system's programs that tests need.

`python tests/worlds/system_programs.py chromium|nginx|xvfb` prints the path of one or exits with code 1.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
CHROMIUM_PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
)
NGINX_PLACES = ("/usr/sbin/nginx", "/usr/local/sbin/nginx", "/opt/homebrew/bin/nginx")


def chromium_path() -> str | None:
    """Return the path of a browser: NEUROSHARD_TEST_BROWSER, one on the PATH, or one in the usual places."""
    chosen = os.environ.get("NEUROSHARD_TEST_BROWSER")
    if chosen:
        return chosen if Path(chosen).exists() else None
    found = (shutil.which(name) for name in CHROMIUM)
    return next((path for path in found if path), _first(CHROMIUM_PLACES))


def nginx_path() -> str | None:
    """Return the path of nginx: on the PATH, or where only administrators look."""
    return shutil.which("nginx") or _first(NGINX_PLACES)


def xvfb_path() -> str | None:
    """Return the path of Xvfb, an X server without a screen."""
    return shutil.which("Xvfb")


def _first(places: tuple[str, ...]) -> str | None:
    return next((place for place in places if Path(place).is_file()), None)


PROGRAMS: Mapping[str, Callable[[], str | None]] = {
    "chromium": chromium_path,
    "nginx": nginx_path,
    "xvfb": xvfb_path,
}

if __name__ == "__main__":
    path = PROGRAMS[sys.argv[1]]()
    sys.stdout.write(f"{path}\n" if path else "")
    sys.exit(0 if path else 1)
