"""Threads that give way to others: a computer belongs to its owner, and a node's network must answer in time."""

from __future__ import annotations

import os
import sys
import threading


def give_way(niceness: int) -> None:
    """Lower the priority of this thread and of those that it starts; 19 is the lowest.

    Linux knows niceness by thread; elsewhere the thread stays as it is.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))
