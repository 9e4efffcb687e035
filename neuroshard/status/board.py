"""The one place where the running node publishes its snapshot and where readers pick it up, from any thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Lock

from neuroshard.status.snapshot import NodeStatus


class StatusBoard:
    """Holds the current immutable NodeStatus with a version number that grows at every publication."""

    def __init__(self, initial: NodeStatus, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lock = Lock()
        self._current = (1, initial)
        self._monotonic = monotonic
        self._started = monotonic() - initial.uptime_seconds

    def publish(self, status: NodeStatus) -> None:
        """Replace the current snapshot."""
        with self._lock:
            self._current = (self._current[0] + 1, status)

    def uptime(self) -> float:
        """Seconds since the node started, whatever becomes of the computer's date."""
        return self._monotonic() - self._started

    def age(self) -> float:
        """Seconds since the newest snapshot."""
        return max(0.0, self.uptime() - self.current().uptime_seconds)

    def current(self) -> NodeStatus:
        """The newest snapshot."""
        return self._current[1]

    def versioned(self) -> tuple[int, NodeStatus]:
        """The newest snapshot with its version: equal versions mean the identical object."""
        return self._current
