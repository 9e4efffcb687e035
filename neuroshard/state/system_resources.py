"""Memory and processor time released to other programs. Only Linux is supported; elsewhere these calls do nothing."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading

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


def lower_thread_priority(niceness: int) -> None:
    """Lower the priority of this thread and of those that it starts; 19 is the lowest.

    Only Linux has niceness for each thread; on other systems the priority is unchanged.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))
