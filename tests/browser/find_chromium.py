"""Finds a chromium-like browser of the system; run as a program it prints the path or exits 1."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    r"C:\Program Files\Google\Chrome\Application\chrome.exe",
    r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
)


def chromium_path() -> str | None:
    """Path of a browser: NEUROSHARD_TEST_BROWSER, then what is on the PATH, then the usual places."""
    chosen = os.environ.get("NEUROSHARD_TEST_BROWSER")
    if chosen:
        return chosen if Path(chosen).exists() else None
    found = (shutil.which(name) for name in NAMES)
    return next((path for path in (*found, *(place for place in PLACES if Path(place).exists())) if path), None)


if __name__ == "__main__":
    path = chromium_path()
    sys.stdout.write(f"{path}\n" if path else "")
    sys.exit(0 if path else 1)
