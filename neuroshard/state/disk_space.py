"""Disk space for checkpoints and copies: limits, used space, and generations to delete. PyTorch is not imported."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from neuroshard.config.state_file import make_folder
from neuroshard.errors import DiskFullError, StorageError
from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.types import LayerRange, RunId

KEPT_GENERATIONS = 3


@dataclass(frozen=True)
class DiskSpacePlan:
    """Generations to delete before a write; `missing_bytes` > 0 when that does not free enough space."""

    delete: tuple[CheckpointGeneration, ...]
    missing_bytes: int


def superfluous(
    generations: Sequence[CheckpointGeneration], last_outer: CheckpointGeneration | None
) -> tuple[CheckpointGeneration, ...]:
    """Return all but the newest three and the one kept for the last outer step. `generations` is newest first."""
    return tuple(item for item in generations[KEPT_GENERATIONS:] if item != last_outer)


def make_room(
    generations: Sequence[CheckpointGeneration],
    new_bytes: int,
    *,
    elsewhere_bytes: int = 0,
    own_limit_bytes: int,
    all_limit_bytes: int | None = None,
    free_bytes: int,
    reserve_bytes: int,
) -> DiskSpacePlan:
    """Select the oldest generations to delete so that one of `new_bytes` fits both limits and the disk.

    `elsewhere_bytes` are states of other runs, and those set aside or damaged: they count towards the limit of all
    states and are not deleted here. The newest generation is never deleted: until the new one is complete, no other
    state exists. Nothing is deleted when that would not suffice.
    """
    used = sum(item.bytes for item in generations)
    shortage = max(used + new_bytes - own_limit_bytes, new_bytes + reserve_bytes - free_bytes)
    if all_limit_bytes is not None:
        shortage = max(shortage, elsewhere_bytes + used + new_bytes - all_limit_bytes)
    chosen: list[CheckpointGeneration] = []
    for item in reversed(generations[1:]):
        if shortage <= 0:
            break
        chosen.append(item)
        shortage -= item.bytes
    return DiskSpacePlan((), shortage) if shortage > 0 else DiskSpacePlan(tuple(chosen), 0)


@dataclass(frozen=True)
class StorageLimits:
    """Space for the checkpoints of one stage; the reserve stays free on the disk for other programs.

    All files below the `counted` folders, including other runs and states set aside, may take `all_bytes` together.
    """

    own_bytes: int = 50_000_000_000
    reserve_bytes: int = 200_000_000
    all_bytes: int | None = None
    counted: tuple[Path, ...] = ()


def generations_to_delete_for(
    new_bytes: int, folder: Path, generations: Sequence[CheckpointGeneration], limits: StorageLimits
) -> tuple[CheckpointGeneration, ...]:
    """Return the generations of a folder to delete before one of `new_bytes` is written to it.

    Raises DiskFullError when even that does not suffice, StorageError and OSError.
    """
    own = sum(item.bytes for item in generations)
    elsewhere = max(0, bytes_used_elsewhere(folder, limits.counted) - own)
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


def bytes_used_elsewhere(folder: Path, counted: Iterable[Path]) -> int:
    """Return the bytes in the counted folders, except the state being downloaded to `folder`. Raises StorageError."""
    coming = sum(_size(entry) for entry in _entries(folder) if entry.name.endswith(".part"))
    return max(0, sum(used_bytes(path) for path in counted) - coming)


def used_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; 0 when it does not exist. Raises StorageError.

    It reads names and sizes only: a data folder has a few dozen such files.
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


FOLDER = "copies"


def copy_folder(data_dir: Path, run_id: RunId, layers: LayerRange) -> Path:
    """Return the folder for the copy of one stage."""
    return data_dir / FOLDER / run_id / f"layers-{layers.start}-{layers.stop}"


def copy_folders(data_dir: Path) -> list[Path]:
    """List the folders of copies of all runs and stages."""
    return sorted((data_dir / FOLDER).glob("*/layers-*"))


def state_folders(data_dir: Path) -> tuple[Path, ...]:
    """Return the folders that the owner's limit counts: checkpoints and copies of all runs and wallets."""
    return data_dir / "checkpoints", data_dir / FOLDER


def check_space(folder: Path, new_bytes: int, data_dir: Path, limit_bytes: int) -> None:
    """Raise DiskFullError when `new_bytes` more in `folder` exceed the limit together with the data folder's states."""
    try:
        make_folder(folder, data_dir)
        free = shutil.disk_usage(folder).free - StorageLimits().reserve_bytes
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}.") from error
    missing = max(bytes_used_elsewhere(folder, state_folders(data_dir)) + new_bytes - limit_bytes, new_bytes - free)
    if missing > 0:
        raise DiskFullError(
            f"No room for a copy of {new_bytes / 1e6:.0f} MB in {folder}: {missing / 1e6:.0f} MB are missing.",
            "Free some space, or raise max_checkpoint_storage.",
        )
