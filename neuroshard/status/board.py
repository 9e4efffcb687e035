"""The one place where the running node publishes its snapshot and where readers pick it up, from any thread."""

from __future__ import annotations

from threading import Lock

from neuroshard.status.snapshot import NodeStatus


class StatusBoard:
    """Holds the current immutable NodeStatus with a version number that grows at every publication."""

    def __init__(self, initial: NodeStatus) -> None:
        self._lock = Lock()
        self._current = (1, initial)

    def publish(self, status: NodeStatus) -> None:
        """Replace the current snapshot."""
        with self._lock:
            self._current = (self._current[0] + 1, status)

    def current(self) -> NodeStatus:
        """The newest snapshot."""
        return self._current[1]

    def versioned(self) -> tuple[int, NodeStatus]:
        """The newest snapshot with its version: equal versions mean the identical object."""
        return self._current
