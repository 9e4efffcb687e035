"""The folder of a build: build.json, and the replacement of an older build by a finished one.

A build replaces only files that an earlier build wrote."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from neuroshard.config.state_file import TEMPORARY_PREFIX, write_atomically
from neuroshard.data.manifest import CHECKPOINTS_NAME
from neuroshard.dataset.folder_destination import LOCK_NAME
from neuroshard.decoders import json_decoder
from neuroshard.errors import StorageError

REPORT_NAME = "build.json"
UNFINISHED_SUFFIX = ".unfinished"  # of the folder in which a build works
_MAX_REPORT_BYTES = 65_536


@dataclass(frozen=True)
class BuildReport:
    """A finished Genesis folder in numbers."""

    fingerprint: str  # of the text, the options and the signing key
    source: str
    documents: int  # as found
    near_duplicates: int  # of them dropped
    text_bytes: int  # UTF-8, after dropping
    vocabulary: int  # ids in use
    tokens: int  # in all shards together
    shards: int
    tokens_per_shard: int
    unigram_entropy: float  # nats per token, over all shards

    def to_json(self) -> bytes:
        """The bytes of build.json."""
        return json.dumps(asdict(self), indent=1).encode()


def read_report(folder: Path) -> BuildReport | None:
    """Return the report of a folder built here, or None when it is missing or invalid."""
    try:
        with (folder / REPORT_NAME).open("rb") as file:
            return cast("BuildReport", json_decoder(BuildReport).decode(file.read(_MAX_REPORT_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None  # no report, no reuse: the folder is built again


OUTDATED_SUFFIX = ".outdated"  # of an older build while it is replaced
RUN_NAME = "run.json"
_RUN_MODE = 0o644  # it is served with the manifest
_BUILT_NAME = re.compile(
    rf"({re.escape(REPORT_NAME)}|{re.escape(LOCK_NAME)}|manifest\.json|tokenizer\.json|shard_[0-9]+\.(bin|pt)|pages(/[0-9]+\.bin)?"
    rf"|tokenizers(/[0-9a-f]{{64}}\.json)?|((pages|tokenizers)/)?{re.escape(TEMPORARY_PREFIX)}.*)"
)
_WORK_NAMES = frozenset({CHECKPOINTS_NAME})  # a build removes these before it is finished


def unfinished_folder(folder: Path) -> Path:
    """Return the folder in which the build of `folder` works until it is finished."""
    return folder.with_name(folder.name + UNFINISHED_SUFFIX)


def refuse_foreign_files(folder: Path, *, has_report: bool) -> None:
    """Raise StorageError unless the folder is absent, empty or a build's own, and so are the folders next to it.

    A build's own folder has a readable report (`has_report`) and contains only files that a build writes.
    """
    found = _foreign_entry(folder)
    if found is None and not has_report and folder.exists() and any(folder.iterdir()):
        found = folder
    found = found or _foreign_entry(_outdated_folder(folder)) or _foreign_entry(unfinished_folder(folder), _WORK_NAMES)
    if found is not None:
        raise StorageError(f"{found} was not built here, and would be replaced.", "Name a new or empty folder.")


def has_default_run(folder: Path) -> bool:
    """Return whether the folder contains a default run next to the data."""
    return _is_default_run(folder / RUN_NAME)


def replace_folder(finished: Path, folder: Path) -> None:
    """Put the finished folder in place; an older build is moved aside first and removed last. Raises OSError.

    The older build's default run is in the finished folder before the swap.
    """
    outdated = _outdated_folder(folder)
    older = folder if folder.exists() else outdated  # a swap that was killed left the older build moved aside
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


def _foreign_entry(folder: Path, further: frozenset[str] = frozenset()) -> Path | None:
    """Return an entry that no build writes and `further` does not name, or the path itself when it is not a folder."""
    if not folder.exists():
        return None
    if not folder.is_dir():
        return folder
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if not (_BUILT_NAME.fullmatch(name) or name in further or (name == RUN_NAME and _is_default_run(path))):
            return path
    return None


def _is_default_run(file: Path) -> bool:
    return file.is_file() and not file.is_symlink()
