"""The files of a source in a fixed order, found as they are needed: no list of all of them is ever held."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from neuroshard.data.genesis.layout import CHECKPOINTS_NAME
from neuroshard.genesis.report import REPORT_NAME, UNFINISHED_SUFFIX
from neuroshard.genesis.sources.records import SourceFailureError

Parts = tuple[str, ...]  # of a path below the source's folder
_DATA_SET_NAMES = frozenset({REPORT_NAME, CHECKPOINTS_NAME})
_SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "venv"})


def files_from(root: Path, suffixes: tuple[str, ...], first: Parts = ()) -> Iterator[Parts]:
    """Regular files below `root` whose names end so, from `first` on, ordered by the parts of their paths.

    A root that is a file is the only one, whatever its name, as (its name,). Hidden names, symbolic links and folders
    with a data set in them are passed over. Raises SourceFailureError when a folder cannot be read.
    """
    if root.is_file():
        if (root.name,) >= first:
            yield (root.name,)
        return
    yield from _walk(root, (), suffixes, first)


def path_of(root: Path, parts: Parts) -> Path:
    """Where a file of `files_from` lies."""
    return root if root.is_file() else root.joinpath(*parts)


def _walk(folder: Path, above: Parts, suffixes: tuple[str, ...], first: Parts) -> Iterator[Parts]:
    try:
        with os.scandir(folder) as entries:
            visible = sorted(
                (entry.name, entry.is_dir(follow_symlinks=False), entry.is_file(follow_symlinks=False))
                for entry in entries
                if not entry.name.startswith(".")
            )
    except OSError as error:
        raise SourceFailureError(f"{folder} cannot be read: {error.strerror or error}.") from error
    if above and (above[-1].endswith(UNFINISHED_SUFFIX) or any(name in _DATA_SET_NAMES for name, _, _ in visible)):
        return  # a data set that was built in here
    for name, is_folder, is_file in visible:
        if first and name < first[0]:
            continue
        if is_file and name.lower().endswith(suffixes):
            yield (*above, name)
        elif is_folder and name not in _SKIPPED_FOLDERS:
            below = first[1:] if first and name == first[0] else ()
            yield from _walk(folder / name, (*above, name), suffixes, below)
