"""The memory that this process may use, and the part of it that the network's buffers may take. Loads no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

import psutil

MEGABYTE = 1_000_000
TIER_MB = 500
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes a number near 2^63 when there is no limit


@dataclass(frozen=True)
class MemoryProbe:
    """What the computer and the container say. Never the momentary free memory: that changes from start to start."""

    total_bytes: int
    cgroup_limit_bytes: int | None  # the tightest of the groups around this process


class Bounds(StrEnum):
    """What a limit comes from."""

    OWNER = "owner"  # the setting `memory`
    CGROUP = "cgroup"
    COMPUTER = "computer"


@dataclass(frozen=True)
class MemoryBound:
    """The limit that holds, in MB of 10^6 bytes, and what set it."""

    mb: int
    by: Bounds


def reserve_mb(total_mb: int) -> int:
    """Memory left to the owner: an eighth, at least 1 GB, but never more than a quarter of a small computer."""
    return min(total_mb // 4, max(1_000, total_mb // 8))


def memory_bound(probe: MemoryProbe, limit_mb: int | None) -> MemoryBound:
    """The least of --memory, the cgroup limit and total - reserve; limit_mb None when the user gave none."""
    total = probe.total_bytes // MEGABYTE
    bounds = [MemoryBound(total - reserve_mb(total), Bounds.COMPUTER)]
    if probe.cgroup_limit_bytes is not None:
        bounds.append(MemoryBound(probe.cgroup_limit_bytes // MEGABYTE, Bounds.CGROUP))
    if limit_mb is not None:
        bounds.append(MemoryBound(limit_mb, Bounds.OWNER))
    return min(bounds, key=lambda bound: bound.mb)


def available_mb(probe: MemoryProbe, limit_mb: int | None) -> int:
    """How much may be used, in MB of 10^6 bytes, whatever bounds it."""
    return memory_bound(probe, limit_mb).mb


def tier_mb(available: float) -> int:
    """floor(available / 500) x 500, so that small differences between starts give the same architecture."""
    return int(available // TIER_MB) * TIER_MB


def probe_memory(root: Path = Path("/")) -> MemoryProbe:
    """Read the computer's memory and, on Linux, the limits of the control groups (v2, v1) below `root`."""
    return MemoryProbe(int(psutil.virtual_memory().total), read_cgroup_limit(root))


def read_cgroup_limit(root: Path) -> int | None:
    """The tightest memory limit in bytes of this process's control groups and their parents; None without one."""
    listing = _read(root / "proc/self/cgroup")
    if listing is None:
        return None
    limits: list[int] = []
    for line in listing.splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            limits += _limits(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits(mount: Path, path: str, file_name: str) -> list[int]:
    """Limits of the group and all its parents; inside a container the outer part of the path does not exist."""
    own = PurePosixPath(path.lstrip("/"))
    texts = [_read(mount / group / file_name) for group in (own, *own.parents) if ".." not in group.parts]
    values = [int(text) for text in texts if text is not None and text.strip().isdecimal()]
    return [value for value in values if value < _UNLIMITED_BYTES]


def _read(file: Path) -> str | None:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:  # not Linux, or no such group: then there is no limit to read here
        return None


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
