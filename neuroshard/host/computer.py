"""Threads and memory of this process. Does not load PyTorch, because both are needed from the first second."""

from __future__ import annotations

import os
import platform
import sys
from functools import cache
from pathlib import Path

import psutil


def default_threads() -> int:
    """Return the number of physical cores that this process may use; hyper-threads slow matrix products down."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    physical = psutil.cpu_count(logical=False) or usable
    return max(1, min(usable, physical))


@cache
def processor_name(root: Path = Path("/")) -> str:
    """Return the processor's name as its maker writes it, or its architecture if the system does not report one."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        text = ""
    names = [
        value.strip() for line in text.splitlines() for key, _, value in [line.partition(":")] if "model name" in key
    ]
    return next(filter(None, names), "") or platform.processor() or platform.machine() or "CPU"


def resident_megabytes() -> int:
    """Return the resident memory of this process in MB of 10**6 bytes."""
    return _this_process(os.getpid()).memory_info().rss // 1_000_000


@cache
def _this_process(pid: int) -> psutil.Process:
    """Cached, because creating a Process reads more files than the query that follows."""
    return psutil.Process(pid)


def peak_megabytes() -> int:
    """Return the highest resident memory so far in MB of 10**6 bytes, or the present one if no peak is recorded."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would return the peak of the program that started this one, if higher
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), "")
        return int(line.split()[1]) * 1024 // 1_000_000 if line else resident_megabytes()
    try:
        import resource
    except ImportError:  # Windows keeps it elsewhere
        return int(getattr(psutil.Process().memory_info(), "peak_wset", 0)) // 1_000_000 or resident_megabytes()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) // 1_000_000
