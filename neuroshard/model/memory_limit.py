"""The memory that this process may use, and the part of it that the network's buffers may take. Loads no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

import psutil

MEGABYTE = 1_000_000
TIER_MB = 500
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 reports a number near 2^63 if there is no limit


@dataclass(frozen=True)
class MemoryProbe:
    """The memory reported by the computer and the container.

    Free memory does not count: it changes from start to start.
    """

    total_bytes: int
    cgroup_limit_bytes: int | None  # the tightest of the groups around this process


class Bounds(StrEnum):
    """The source of a limit."""

    OWNER = "owner"  # the setting `memory`
    CGROUP = "cgroup"
    COMPUTER = "computer"


@dataclass(frozen=True)
class MemoryBound:
    """The effective limit in MB of 10^6 bytes, and its source."""

    mb: int
    by: Bounds


def reserve_mb(total_mb: int) -> int:
    """Memory left to the owner: an eighth, at least 1 GB, but at most a quarter of a small computer."""
    return min(total_mb // 4, max(1_000, total_mb // 8))


def memory_bound(probe: MemoryProbe, limit_mb: int | None) -> MemoryBound:
    """The least of --memory, the cgroup limit and total - reserve; limit_mb None means that the user gave none."""
    total = probe.total_bytes // MEGABYTE
    bounds = [MemoryBound(total - reserve_mb(total), Bounds.COMPUTER)]
    if probe.cgroup_limit_bytes is not None:
        bounds.append(MemoryBound(probe.cgroup_limit_bytes // MEGABYTE, Bounds.CGROUP))
    if limit_mb is not None:
        bounds.append(MemoryBound(limit_mb, Bounds.OWNER))
    return min(bounds, key=lambda bound: bound.mb)


def available_mb(probe: MemoryProbe, limit_mb: int | None) -> int:
    """Usable memory in MB of 10^6 bytes, whatever limits it."""
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
    except OSError:  # not Linux, or no such group: then there is no limit
        return None


HELD_SHARE = 16  # 1/HELD_SHARE of the memory is for everything that a node stores of other nodes' messages
LEAST_HELD = 16 * MEGABYTE
MOST_HELD = 1_000 * MEGABYTE
HEADS_SHARE = 16  # 1/HEADS_SHARE of that
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
    """Byte budgets of the network, whatever other nodes send."""

    frames: int  # tensors of messages, from their first byte until they are handled
    heads: int  # headers of messages, if they are large
    directory: int  # records stored for other nodes, and nodes' addresses
    claims: int  # parsed claims, and every node's announcement
    gossip: int  # messages that other nodes may still request
    unread: int  # unread bytes of streams

    @property
    def total(self) -> int:
        """The sum of all budgets."""
        return self.frames + self.heads + self.directory + self.claims + self.gossip + self.unread


def network_memory(limit_mb: int) -> NetworkMemory:
    """The budgets of a node with this much memory in total."""
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
    """Peak memory of a process under a limit: its work, and the network's budgets."""
    return need + network_memory(limit_mb).total


def least_limit_mb(need: int) -> int:
    """The smallest limit in MB that is enough for the work and the network."""
    limit_mb = -(-need // MEGABYTE)
    while (missing := planned_bytes(need, limit_mb) - limit_mb * MEGABYTE) > 0:
        limit_mb += -(-missing // MEGABYTE)
    return limit_mb
