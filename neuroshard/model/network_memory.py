"""What the network may hold of others' messages under a limit of memory: a part of every plan. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from neuroshard.model.memory_limit import MEGABYTE

FRAMES_SHARE = 16  # of the memory, one part in so many
LEAST_FRAMES = 16 * MEGABYTE
MOST_FRAMES = 1_000 * MEGABYTE
UNREAD_SHARE = 64
LEAST_UNREAD = 4 * MEGABYTE
MOST_UNREAD = 128 * MEGABYTE


@dataclass(frozen=True)
class NetworkMemory:
    """Bytes that the network keeps to, whatever others send."""

    frames: int  # messages, from their first byte until they are handled
    unread: int  # of streams, until somebody reads them

    @property
    def total(self) -> int:
        """Both together."""
        return self.frames + self.unread


def network_memory(limit_mb: int) -> NetworkMemory:
    """The budgets of a node that may use so much memory in all."""
    limit = limit_mb * MEGABYTE
    return NetworkMemory(
        frames=max(LEAST_FRAMES, min(MOST_FRAMES, limit // FRAMES_SHARE)),
        unread=max(LEAST_UNREAD, min(MOST_UNREAD, limit // UNREAD_SHARE)),
    )


def planned_bytes(need: int, limit_mb: int) -> int:
    """Peak memory of a process under a limit: what its work needs, and what the network may hold."""
    return need + network_memory(limit_mb).total


def least_limit_mb(need: int) -> int:
    """The smallest limit in MB that holds such a need and the network."""
    limit_mb = -(-need // MEGABYTE)
    while (missing := planned_bytes(need, limit_mb) - limit_mb * MEGABYTE) > 0:
        limit_mb += -(-missing // MEGABYTE)
    return limit_mb
