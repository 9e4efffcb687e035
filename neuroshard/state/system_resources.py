"""Memory and processor time released to other programs. Only Linux is supported; elsewhere these calls do nothing."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

_IS_LINUX = sys.platform == "linux"


def forget_contents(memory: Tensor) -> None:
    """Release the pages of a one-dimensional byte tensor in ordinary memory; it then reads as zeros, or unchanged.

    The first and the last page, which other data may share, stay.
    """
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.data_ptr() + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if _IS_LINUX and end > start:
        advise = ctypes.CDLL(None).madvise
        advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(mmap.MADV_DONTNEED))


def trim_heap() -> None:
    """Return freed heap memory to the system, if the C library supports it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if _IS_LINUX else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


LARGE_CODE = 16_000_000  # bytes; only the libraries of PyTorch are that large


def release_code() -> None:
    """Unmap the read code of PyTorch, 60 MB and more, so that the system may use its memory; calls read it again.

    Only code is released, which nobody writes: its pages are those of the file. It takes 20 ms to read it again.
    """
    if not _IS_LINUX:
        return
    advise = ctypes.CDLL(None).madvise
    with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as lines:
        for start, end in executable_mappings(lines):
            if end - start >= LARGE_CODE:
                advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(mmap.MADV_DONTNEED))


def executable_mappings(lines: Iterable[str]) -> list[tuple[int, int]]:
    """Start and end of the mappings of a file that can be executed and not written, as proc(5) lists mappings."""
    fields = [line.split(maxsplit=5) for line in lines]
    code = [field[0].split("-") for field in fields if len(field) == 6 and field[1] == "r-xp" and field[5][0] == "/"]
    return [(int(start, 16), int(end, 16)) for start, end in code]


LOWEST_PRIORITY = 19  # niceness


def yield_to_other_programs() -> None:
    """Give this thread, and those that it starts, the lowest priority.

    With niceness 5, training took a quarter of the time of a program on each core. If the owner started the process
    with a niceness, that decides, and nothing is changed. SCHED_IDLE left programs no more than that, and it gives a
    thread that holds Python's lock a fifth of this share.
    """
    if sys.platform == "linux" and os.getpriority(os.PRIO_PROCESS, 0) == 0:
        lower_thread_priority(LOWEST_PRIORITY)


def lower_thread_priority(niceness: int) -> None:
    """Lower the priority of this thread and of those that it starts; 19 is the lowest.

    Only Linux has niceness for each thread; on other systems the priority is unchanged.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))
