"""Switching autostart on and off, and telling what is there."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neuroshard.config.folders import installed_program
from neuroshard.config.loading import LoadedSettings
from neuroshard.errors import TokenError
from neuroshard.node.autostart.places import Place


@dataclass(frozen=True)
class AutostartStatus:
    """Whether this program starts at login; `path` and `kind` of what does it, or of what `on` would write.

    `missing` is the program that should start and is not there: it was moved or removed since.
    """

    is_on: bool
    kind: str
    path: str
    content: str | None
    missing: str | None = None

    def complaint(self) -> str:
        """What is wrong with it; empty when nothing is."""
        if self.missing is None:
            return ""
        return f"The {self.kind} {self.path} starts {self.missing}, which is not there."


def status(places: Sequence[Place]) -> AutostartStatus:
    """What is there now. Raises StorageError."""
    found = ((place, content) for place in places if (content := place.read()) is not None)
    place, content = next(found, (places[0], None))
    program = None if content is None else place.program(content)
    missing = program if program is not None and shutil.which(program) is None else None
    return AutostartStatus(content is not None, place.kind, place.path, content, missing)


def turn_on(places: Sequence[Place], command: Sequence[str]) -> AutostartStatus:
    """Write the first place and clear the others: nothing starts twice. Raises StorageError, UsageError."""
    first, *others = places
    for place in others:
        if place.read() is not None:
            place.remove()
    first.write(command)
    return status(places)


def turn_off(places: Sequence[Place]) -> AutostartStatus:
    """Clear all places. Raises StorageError."""
    for place in places:
        place.remove()
    return status(places)


def start_command(loaded: LoadedSettings) -> tuple[str, ...]:
    """What starts this node without asking anybody. Raises TokenError when its token is in no file."""
    settings = loaded.settings
    if settings.token_file is None or loaded.sources["token"] != loaded.sources["token_file"]:
        raise TokenError(
            "Autostart needs the token in a file: others can read a command line, and a variable may not be there.",
            "Run `neuroshard` once at a desktop and finish the set-up, or name a file with --token-file FILE.",
        )
    is_stored = loaded.sources["token"] == "config.toml"  # noqa: S105 - the name of a source
    token = () if is_stored else ("--token-file", str(settings.token_file.absolute()))
    return (*_windowless(installed_program()), "--headless", "--data-dir", str(settings.data_dir), *token)


def _windowless(program: tuple[str, ...]) -> tuple[str, ...]:
    """On Windows the Python that opens no console window, where there is one beside the running one."""
    first, *rest = program
    without = Path(first).with_name("pythonw.exe")
    if sys.platform == "win32" and Path(first).name.lower() == "python.exe" and without.exists():
        return (str(without), *rest)
    return program
