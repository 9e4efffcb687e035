"""Moving a generation that cannot be continued out of the way: named, complete, never over something else."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

from neuroshard.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path

    from neuroshard.status.snapshot import CheckpointGeneration
    from neuroshard.training.checkpoint.store import CheckpointStore


def set_aside(folder: Path, generation: str, name: str, *, clear_first: bool = False) -> Path:
    """Move `generation`'s files ("step-120") to folder/name, or name-2, ... when that has such files already.

    With `clear_first` what lay in folder/name is deleted first. Raises StorageError when a file cannot be moved.
    """
    files = [
        path
        for path in folder.iterdir()
        if re.fullmatch(rf"{generation}(-\d+)?\.(json|safetensors|residual)", path.name)
    ]
    target, number = folder / name, 1
    try:
        target.mkdir(mode=0o700, exist_ok=True)
        if clear_first:
            for old in target.iterdir():
                with contextlib.suppress(OSError):  # it only costs space
                    old.unlink()
        while any((target / path.name).exists() for path in files):
            number += 1
            target = folder / f"{name}-{number}"
            target.mkdir(mode=0o700, exist_ok=True)
        for path in files:
            path.rename(target / path.name)
    except OSError as error:
        raise StorageError(
            f"{generation} in {folder} cannot be set aside: {error.strerror or error}.",
            "Move its files away by hand, or make the folder writable.",
        ) from error
    return target


def go_back(store: CheckpointStore, at: float) -> tuple[CheckpointGeneration | None, tuple[Path, ...]]:
    """Set aside what is newer than `at` (seconds since the epoch), so that the next start goes on from the rest.

    Returns the state it will go on from and where the newer ones went. When nothing is that old, nothing is moved.
    """
    older = next((item for item in store.generations() if item.time <= at), None)
    return (None, ()) if older is None else (older, set_newer_aside(store, at, f"newer-than-step-{older.step}"))


def set_newer_aside(store: CheckpointStore, at: float, why: str) -> tuple[Path, ...]:
    """Set aside all that is newer than `at`; where it went."""
    newer = [item for item in store.generations() if item.time > at]
    return tuple(set_aside(store.folder, f"step-{item.step}", f"set-aside-{why}") for item in newer)
