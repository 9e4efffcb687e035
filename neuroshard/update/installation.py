"""Versions side by side in an installation (see neuroshard.config.folders), and the pointer that says which starts."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from neuroshard.config.folders import POINTER, VERSIONS
from neuroshard.config.state_file import write_atomically
from neuroshard.errors import StorageError
from neuroshard.update.release import version_number

PREVIOUS = "previous"
COMPLETE = ".complete"  # written last into a version's folder
DOWNLOADS = "downloads"
LOCK = "update.lock"
_NAME = re.compile(r"\d{1,4}\.\d{1,4}\.\d{1,4}")
_WINDOWS = sys.platform == "win32"


@dataclass(frozen=True)
class Installation:
    """The folder of an installation.

    Every change of the pointer is one rename, so a kill leaves the old one or the new.
    """

    root: Path

    def current(self) -> str:
        """The version that starts. Raises StorageError."""
        name = self._pointer(POINTER)
        if name is None:
            raise StorageError(
                f"{self.root / POINTER} contains no version.", "Run the installer again; your data stay."
            )
        return name

    def previous(self) -> str | None:
        """The version before, if its folder still exists."""
        name = self._pointer(PREVIOUS)
        return name if name is not None and name != self.current() and self.is_complete(name) else None

    def folder(self, version: str) -> Path:
        """The folder of a version."""
        version_number(version)
        return self.root / VERSIONS / version

    def download(self, version: str) -> Path:
        """The place of a version's archive until it is unpacked."""
        version_number(version)
        return self.root / DOWNLOADS / f"neuroshard-{version}.tar.gz"

    def is_complete(self, version: str) -> bool:
        """Whether the version was unpacked completely."""
        return (self.folder(version) / COMPLETE).is_file()

    def mark_complete(self, version: str) -> None:
        """Mark the version's folder as complete. Raises OSError."""
        write_atomically(self.folder(version) / COMPLETE, b"")

    def program(self, version: str) -> Path:
        """The program that starts exactly this version: a frozen program or an environment's script."""
        folder = self.folder(version)
        frozen = folder / ("neuroshard.exe" if _WINDOWS else "neuroshard")
        script = folder / ("Scripts/neuroshard.exe" if _WINDOWS else "bin/neuroshard")
        return frozen if frozen.exists() else script

    def switch(self, version: str) -> None:
        """Start `version` from now on and remember the one before. Raises StorageError; the pointer is then untouched.

        The one before is written first: between the two writes it names the current version, which is true.
        """
        before = self.current()
        try:
            if before != version:
                write_atomically(self.root / PREVIOUS, f"{before}\n".encode(), mode=0o644)
            write_atomically(self.root / POINTER, f"{version}\n".encode(), mode=0o644)
        except OSError as error:
            raise StorageError(f"{self.root} cannot be written: {error.strerror}.", "Repair that folder.") from error

    def tidy(self) -> None:
        """Remove downloads and all versions except the current and the previous one. Raises StorageError."""
        kept = {self.current(), self.previous()}
        try:
            shutil.rmtree(self.root / DOWNLOADS, ignore_errors=True)
            for folder in (self.root / VERSIONS).iterdir():
                if folder.name not in kept and _NAME.fullmatch(folder.name):
                    self.discard(folder.name)
        except OSError as error:
            raise StorageError(
                f"Older versions in {self.root / VERSIONS} could not be removed: {error.strerror}.",
                "Remove them by hand.",
            ) from error

    def discard(self, version: str) -> None:
        """Remove a version's folder, its mark first, so that an incomplete folder never counts. Raises OSError."""
        folder = self.folder(version)
        (folder / COMPLETE).unlink(missing_ok=True)
        if folder.exists():
            shutil.rmtree(folder)

    def _pointer(self, name: str) -> str | None:
        try:
            with (self.root / name).open(encoding="utf-8") as file:
                text = file.read(64).strip()
        except (OSError, UnicodeDecodeError):
            return None
        return text if _NAME.fullmatch(text) else None
