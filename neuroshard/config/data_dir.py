"""The node's own folder on this computer: where it is by default, and making it usable."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import platformdirs

from neuroshard.errors import StorageError


def default_data_dir(home: Path | None = None) -> Path:
    """An existing ~/.neuroshard, otherwise the platform's folder for user data. Nothing is created."""
    classic = (home or Path.home()) / ".neuroshard"
    if classic.is_dir():
        return classic
    return platformdirs.user_data_path("neuroshard", appauthor=False)


def prepare_data_dir(folder: Path) -> None:
    """Create the folder (mode 0700) when it is missing and prove that it can be written. Raises StorageError."""
    probe = folder / f".tmp-probe-{secrets.token_hex(4)}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe.write_bytes(b"")
        if os.name == "posix" and folder.stat().st_mode & 0o022:
            folder.chmod(0o700)  # keys lie here: nobody else may replace files
    except OSError as error:
        raise StorageError(
            f"The data folder {folder} cannot be used: {error.strerror or error}.",
            "Make it writable for this user, or name another one with --data-dir FOLDER.",
        ) from error
    finally:
        with contextlib.suppress(OSError):  # the probe may not exist
            probe.unlink(missing_ok=True)
