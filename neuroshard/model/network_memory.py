"""What the network may hold of others' messages under a limit of memory: a part of every plan. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from neuroshard.model.memory_limit import MEGABYTE

HELD_SHARE = 16  # of the memory, one part in so many, for all that a node keeps of what others say
LEAST_HELD = 16 * MEGABYTE
MOST_HELD = 1_000 * MEGABYTE
HEADS_SHARE = 16  # of that
DIRECTORY_SHARE = 8
CLAIMS_SHARE = 8
GOSSIP_SHARE = 16
MOST_CLAIMS = 64 * MEGABYTE
MOST_GOSSIP = 16 * MEGABYTE
UNREAD_SHARE = 64
LEAST_UNREAD = 4 * MEGABYTE
MOST_UNREAD = 128 * MEGABYTE


@dataclass(frozen=True)
class NetworkMemory:
    """Bytes that the network keeps to, whatever others send."""

    frames: int  # tensors of messages, from their first byte until they are handled
    heads: int  # what stands before them, where it is large
    directory: int  # records kept for others, and where nodes can be dialled
    claims: int  # what was read of signed claims, and everybody's announcement
    gossip: int  # messages that others may still ask for
    unread: int  # of streams, until somebody reads them

    @property
    def total(self) -> int:
        """All of it together."""
        return self.frames + self.heads + self.directory + self.claims + self.gossip + self.unread


def network_memory(limit_mb: int) -> NetworkMemory:
    """The budgets of a node that may use so much memory in all."""
    limit = limit_mb * MEGABYTE
    held = max(LEAST_HELD, min(MOST_HELD, limit // HELD_SHARE))
    directory = held // DIRECTORY_SHARE
    claims, gossip = min(MOST_CLAIMS, held // CLAIMS_SHARE), min(MOST_GOSSIP, held // GOSSIP_SHARE)
    heads = held // HEADS_SHARE
    return NetworkMemory(
        frames=held - heads - directory - claims - gossip,
        heads=heads,
        directory=directory,
        claims=claims,
        gossip=gossip,
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
