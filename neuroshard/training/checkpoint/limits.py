"""What checkpoints may take on the disk, and what they and the other files of states take already."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from neuroshard.errors import DiskFullError, StorageError
from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.training.checkpoint.retention import make_room


@dataclass(frozen=True)
class StorageLimits:
    """Space for the checkpoints of one stage; the reserve is left free on the disk for everybody else.

    All that lies below the `counted` folders, of other runs and set aside too, may take `all_bytes` together.
    """

    own_bytes: int = 50_000_000_000
    reserve_bytes: int = 200_000_000
    all_bytes: int | None = None
    counted: tuple[Path, ...] = ()


def room_for(
    new_bytes: int, folder: Path, generations: Sequence[CheckpointGeneration], limits: StorageLimits
) -> tuple[CheckpointGeneration, ...]:
    """Which generations of a folder to delete before one of `new_bytes` is written to it.

    Raises DiskFullError when even that does not suffice, StorageError and OSError.
    """
    own = sum(item.bytes for item in generations)
    elsewhere = max(0, used_beside(folder, limits.counted) - own)
    room = make_room(
        generations,
        new_bytes,
        elsewhere_bytes=elsewhere,
        own_limit_bytes=limits.own_bytes,
        all_limit_bytes=limits.all_bytes,
        free_bytes=shutil.disk_usage(folder).free,
        reserve_bytes=limits.reserve_bytes,
    )
    if room.missing_bytes > 0:
        others = f" Other runs, copies and what was set aside take {elsewhere / 1e6:.0f} MB." if elsewhere else ""
        raise DiskFullError(
            f"No room for a checkpoint of {new_bytes / 1e6:.0f} MB in {folder}: "
            f"{room.missing_bytes / 1e6:.0f} MB are missing.{others}",
            "Free some space, or raise max_checkpoint_storage.",
        )
    return room.delete


def used_beside(folder: Path, counted: Iterable[Path]) -> int:
    """What the counted folders hold beside the state that is being fetched into `folder`. Raises StorageError."""
    coming = sum(_size(entry) for entry in _entries(folder) if entry.name.endswith(".part"))
    return max(0, sum(used_bytes(path) for path in counted) - coming)


def used_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; 0 when it is not there. Raises StorageError.

    Only names and sizes are looked at: a data folder holds some dozens of such files.
    """
    return sum(_size(entry) for entry in _entries(folder))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"{folder} cannot be listed: {error.strerror or error}.") from error


def _size(entry: os.DirEntry[str]) -> int:
    if entry.is_dir(follow_symlinks=False):
        return used_bytes(Path(entry.path))
    with contextlib.suppress(FileNotFoundError):  # it was deleted just now
        return entry.stat(follow_symlinks=False).st_size
    return 0
