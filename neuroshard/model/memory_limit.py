"""How much memory this process may use: a pure rule over what a probe has read, and the probe itself."""

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
