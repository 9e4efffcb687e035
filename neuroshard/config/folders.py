"""Folders on this computer: the node's data folder with its layout, and the installation of this program.

An installation made by the installers keeps several versions side by side:

    ROOT/current            the name of the version to start, on one line; replaced atomically
    ROOT/versions/NAME/     one version: a frozen program or a Python environment
    ROOT/neuroshard         starts the current version (neuroshard.cmd on Windows)
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from neuroshard.config.state_file import is_disk_full
from neuroshard.errors import DiskFullError, StorageError, UsageError

CONFIG_FILE = "config.toml"
PROBE_BYTES = 65_536  # minimum space for a node's lock, keys and settings
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodePaths:
    """Paths of a node's files and folders."""

    data_dir: Path
    config_file: Path
    data_cache: Path
    checkpoints: Path
    logs: Path
    node_key: Path
    api_secret: Path

    @classmethod
    def below(cls, data_dir: Path) -> NodePaths:
        """The paths of a node with this data folder."""
        return cls(
            data_dir=data_dir,
            config_file=data_dir / CONFIG_FILE,
            data_cache=data_dir / "data_cache",
            checkpoints=data_dir / "checkpoints",
            logs=data_dir / "logs",
            node_key=data_dir / "keys" / "node-key",
            api_secret=data_dir / "api-secret",
        )

    @property
    def revoked_nodes(self) -> Path:
        """The nodes that the wallet has revoked on this computer."""
        return self.node_key.with_name("revoked-nodes.json")


def expanded(path: str | Path) -> Path:
    """Expand ~ and ~user in a path. Raises UsageError for a NUL character or an unknown home folder."""
    if "\0" in str(path):
        raise UsageError("A path cannot contain a NUL character.", "Enter it again.")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # no user has this name, or the user has no home folder
        raise UsageError(f"The home folder in {path} is not known.", "Give an absolute path.") from error


def home_data_dir(home: Path | None = None) -> Path:
    """Return ~/.neuroshard if it exists, otherwise the platform's folder for user data. Nothing is created."""
    classic = (home or Path.home()) / ".neuroshard"
    if classic.is_dir():
        return classic
    return platformdirs.user_data_path("neuroshard", appauthor=False)


def default_data_dir(home: Path | None = None) -> Path:
    """The folder that config.toml in `home_data_dir` names as `data_dir`, otherwise `home_data_dir` itself.

    Nothing is created. Raises StorageError when the named folder does not exist: its disk may be disconnected, and a
    node must not start there with a new, empty folder.
    """
    folder, *pointers = data_folders(home)
    if pointers and not folder.is_dir():
        first = pointers[0]
        raise StorageError(
            f"The data folder {folder}, set in {first / CONFIG_FILE}, does not exist.",
            "Connect its disk, or correct or remove the line data_dir in that file.",
        )
    return folder


def data_folders(home: Path | None = None) -> tuple[Path, ...]:
    """The default data folder, which may not exist yet, and then the folder whose config.toml names it, if any."""
    first = home_data_dir(home)
    named = _named_elsewhere(first / CONFIG_FILE)
    folder = first if named is None else (first / expanded(named)).absolute()
    return (first,) if folder == first else (folder, first)


def _named_elsewhere(config_file: Path) -> str | None:
    """The data_dir of a config.toml; also None for an unreadable file: `read_config` reports that error later."""
    try:
        named = tomllib.loads(config_file.read_text(encoding="utf-8")).get("data_dir")
    except (OSError, ValueError):
        return None
    return named if isinstance(named, str) and named else None


def prepare_data_dir(folder: Path) -> None:
    """Create the folder if it is missing, check that it can be written, and close it for other users (mode 0700).

    Raises StorageError, also for a folder that all users share, such as /tmp, or DiskFullError when the disk does not
    have space for the small files.
    """
    probe = folder / f".tmp-probe-{secrets.token_hex(4)}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe.write_bytes(bytes(PROBE_BYTES))
        if os.name == "posix" and (mode := folder.stat().st_mode) & 0o077:
            _close_for_others(folder, mode)
    except OSError as error:
        if is_disk_full(error):
            raise DiskFullError(
                f"The disk of the data folder {folder} is full: {error.strerror}.",
                "Free some space, or name another folder with --data-dir FOLDER.",
            ) from error
        raise StorageError(
            f"The data folder {folder} cannot be used: {error.strerror or error}.",
            "Make it writable for this user, or name another one with --data-dir FOLDER.",
        ) from error
    finally:
        with contextlib.suppress(OSError):  # the probe may not exist
            probe.unlink(missing_ok=True)


def _close_for_others(folder: Path, mode: int) -> None:
    """Take the rights of other users: it contains keys, and the page that opens the dashboard. Raises OSError."""
    if mode & stat.S_ISVTX:
        raise StorageError(f"All users share the folder {folder}.", "Name a folder of your own inside it.")
    try:
        folder.chmod(0o700)
    except PermissionError:
        if mode & 0o022:  # others could replace files
            raise
        _LOG.warning("Other users can read the data folder %s, because its disk does not support modes.", folder)


POINTER = "current"
VERSIONS = "versions"
LAUNCHER = "neuroshard.cmd" if sys.platform == "win32" else "neuroshard"


def this_program() -> tuple[str, ...]:
    """Command line of the running version, to which arguments can be added."""
    if is_frozen():
        return (sys.executable,)
    return (sys.executable, "-m", "neuroshard")


def installed_program() -> tuple[str, ...]:
    """Command line that also starts later versions, for autostart and shortcuts."""
    root = installation_root()
    return this_program() if root is None else (str(root / LAUNCHER),)


def is_frozen() -> bool:
    """Whether this is the frozen program built from neuroshard.spec, which has no separate Python interpreter."""
    return bool(getattr(sys, "frozen", False))


def installation_root(version_folder: Path | None = None) -> Path | None:
    """Root of the installation that contains this version (default: the running one); None if it is not installed."""
    if version_folder is None:
        version_folder = Path(sys.executable).parent if is_frozen() else Path(sys.prefix)
    root = version_folder.parent.parent
    belongs = version_folder.parent.name == VERSIONS and (root / POINTER).is_file()
    return root if belongs else None
