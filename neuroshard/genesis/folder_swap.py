"""Putting a finished folder in the place of an older build, and touching nothing that no build left behind.

The default run of the data, which `neuroshard run publish` put beside the manifest, moves over to the new build.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from neuroshard.config.atomic_write import TEMPORARY_PREFIX, write_atomically
from neuroshard.errors import StorageError
from neuroshard.genesis.destination.folder import LOCK_NAME
from neuroshard.genesis.report import REPORT_NAME, UNFINISHED_SUFFIX

OUTDATED_SUFFIX = ".outdated"  # of an older build that stepped aside
RUN_NAME = "run.json"
_RUN_MODE = 0o644  # it is served with the manifest
_BUILT_NAME = re.compile(
    rf"({re.escape(REPORT_NAME)}|{re.escape(LOCK_NAME)}|manifest\.json|tokenizer\.json|shard_[0-9]+\.pt|pages(/[0-9]+\.bin)?"
    rf"|tokenizers(/[0-9a-f]{{64}}\.json)?|((pages|tokenizers)/)?{re.escape(TEMPORARY_PREFIX)}.*)"
)


def unfinished_folder(folder: Path) -> Path:
    """Where the build of `folder` works until it is done."""
    return folder.with_name(folder.name + UNFINISHED_SUFFIX)


def refuse_foreign_files(folder: Path, *, has_report: bool) -> None:
    """Raises StorageError unless the folder is absent, empty or a build's own, and what builds put beside it is too.

    A build's own folder has a readable report (`has_report`) and holds nothing else than a build writes.
    """
    found = _foreign_entry(folder)
    if found is None and not has_report and folder.exists() and any(folder.iterdir()):
        found = folder
    for beside in (unfinished_folder(folder), _outdated_folder(folder)):
        found = found or _foreign_entry(beside)
    if found is not None:
        raise StorageError(f"{found} was not built here, and would be replaced.", "Name a new or empty folder.")


def has_default_run(folder: Path) -> bool:
    """Whether a default run stands beside the data."""
    return _is_default_run(folder / RUN_NAME)


def replace_folder(finished: Path, folder: Path) -> None:
    """Put the finished folder in place; an older build steps aside first and is removed last. Raises OSError.

    The older build's default run is in the finished folder before that takes its place.
    """
    outdated = _outdated_folder(folder)
    older = folder if folder.exists() else outdated  # a swap that was killed left the older build aside
    if has_default_run(older):
        write_atomically(finished / RUN_NAME, (older / RUN_NAME).read_bytes(), _RUN_MODE)
    if outdated.exists() and folder.exists():
        shutil.rmtree(outdated)
    if folder.exists():
        folder.rename(outdated)
    finished.rename(folder)
    if outdated.exists():
        shutil.rmtree(outdated)


def _outdated_folder(folder: Path) -> Path:
    return folder.with_name(folder.name + OUTDATED_SUFFIX)


def _foreign_entry(folder: Path) -> Path | None:
    """Something in the folder that no build writes, or the path itself when it is no folder."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        return folder
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if not (_BUILT_NAME.fullmatch(name) or (name == RUN_NAME and _is_default_run(path))):
            return path
    return None


def _is_default_run(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()
