"""Where a display without a screen is, for tests that ask a real X server; prints it, exit code 1 without one."""

from __future__ import annotations

import shutil
import sys


def find_xvfb() -> str | None:
    """Path of Xvfb."""
    return shutil.which("Xvfb")


if __name__ == "__main__":
    found = find_xvfb()
    sys.stdout.write(f"{found}\n")
    sys.exit(found is None)
