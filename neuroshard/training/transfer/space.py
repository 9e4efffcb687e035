"""Whether another state fits on the disk, within what the owner allows for checkpoints and copies together."""

from __future__ import annotations

import shutil
from pathlib import Path

from neuroshard.config.data_dir import make_folder
from neuroshard.errors import DiskFullError, StorageError
from neuroshard.training.checkpoint.limits import StorageLimits, used_beside
from neuroshard.training.transfer.copy_places import FOLDER


def folders_of_states(data_dir: Path) -> tuple[Path, ...]:
    """What the owner's limit counts: checkpoints and copies of all runs and wallets of a data folder."""
    return data_dir / "checkpoints", data_dir / FOLDER


def check_space(folder: Path, new_bytes: int, data_dir: Path, limit_bytes: int) -> None:
    """Raises DiskFullError when `new_bytes` more in `folder` are too many beside the states in the data folder."""
    try:
        make_folder(folder, data_dir)
        free = shutil.disk_usage(folder).free - StorageLimits().reserve_bytes
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}.") from error
    missing = max(used_beside(folder, folders_of_states(data_dir)) + new_bytes - limit_bytes, new_bytes - free)
    if missing > 0:
        raise DiskFullError(
            f"No room for a copy of {new_bytes / 1e6:.0f} MB in {folder}: {missing / 1e6:.0f} MB are missing.",
            "Free some space, or raise max_checkpoint_storage.",
        )
