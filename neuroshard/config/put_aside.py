"""Keeping a small file that cannot be read any more: it is renamed before a new one is written in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def put_aside(path: Path, reason: str, then: str) -> str:
    """Rename `path` to NAME.damaged, NAME.damaged-2, ...; a warning that says so, and what happens `then`.

    Earlier damaged files stay. Where renaming fails the warning says that, too: the next write replaces the file.
    """
    number, aside = 1, path.with_name(f"{path.name}.damaged")
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    try:
        path.rename(aside)
    except OSError as error:
        return f"{path} cannot be read ({reason}), nor be renamed ({error.strerror}); {then}."
    return f"{path} cannot be read ({reason}): it is now {aside.name}; {then}."
