"""How many threads training uses when its owner does not say. Imports nothing heavy."""

from __future__ import annotations

import os

import psutil


def default_threads() -> int:
    """Physical cores this process may use: hyper-threads slow matrix products down."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    physical = psutil.cpu_count(logical=False) or usable
    return max(1, min(usable, physical))
