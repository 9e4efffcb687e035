"""Finds the system's nginx; run as a program it prints the path or exits 1."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

PLACES = ("/usr/sbin/nginx", "/usr/local/sbin/nginx", "/opt/homebrew/bin/nginx")


def nginx_path() -> str | None:
    """Path of nginx: on the PATH, or where it is for administrators only."""
    return shutil.which("nginx") or next((place for place in PLACES if Path(place).is_file()), None)


if __name__ == "__main__":
    path = nginx_path()
    sys.stdout.write(f"{path}\n" if path else "")
    sys.exit(0 if path else 1)
