"""The per-install API secret: a file only its owner can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from neuroshard.config.data_dir import NodePaths
from neuroshard.errors import StorageError

SECRET_BYTES = 32
SHORTEST_CHARACTERS = 32
LONGEST_CHARACTERS = 200


def load_or_create_secret(data_dir: Path) -> str:
    """The secret in `<data-dir>/api-secret` (mode 0600), made when missing.

    Raises StorageError when the file cannot be read or written, or does not hold a secret.
    """
    path = NodePaths.below(data_dir).api_secret
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _create(path, secrets.token_urlsafe(SECRET_BYTES))
        return _read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"The API secret {path} cannot be used: {error}.", "Check the folder's rights.") from error


def _create(path: Path, secret: str) -> None:
    """Write the file whole or not at all; when two processes start at once, the first one's secret stays."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secret + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike a rename it never replaces another start's secret
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> str:
    """The stored secret, its file closed to everybody else. Raises StorageError for an unusable one."""
    if os.name == "posix" and path.stat().st_mode & 0o077:
        path.chmod(0o600)
    with path.open(encoding="ascii") as file:
        secret = file.read(LONGEST_CHARACTERS + 2).strip()
    if not SHORTEST_CHARACTERS <= len(secret) <= LONGEST_CHARACTERS:
        raise StorageError(f"The API secret {path} is damaged.", "Delete the file; the next start makes a new one.")
    return secret
