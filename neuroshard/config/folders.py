"""Folders on this computer: the node's data folder with its layout, and the installation of this program.

An installation, as the installers make it, keeps several versions side by side:

    ROOT/current            the name of the version that starts, in one line; replaced atomically
    ROOT/versions/NAME/     one version each: a frozen program or a Python environment
    ROOT/neuroshard         starts the current version (neuroshard.cmd on Windows)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from neuroshard.config.state_file import is_disk_full
from neuroshard.errors import DiskFullError, StorageError, UsageError

CONFIG_FILE = "config.toml"
PROBE_BYTES = 65_536  # what a node's lock, keys and settings need at the least


@dataclass(frozen=True)
class NodePaths:
    """Where a node keeps what."""

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


def expanded(path: str | Path) -> Path:
    """A path as people write it, with ~ and ~user written out. Raises UsageError when it cannot be one."""
    if "\0" in str(path):
        raise UsageError("A path has no NUL character in it.", "Write it anew.")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # nobody of that name, or a user without a home folder
        raise UsageError(f"The home folder in {path} is not known.", "Name the folder from the top.") from error


def home_data_dir(home: Path | None = None) -> Path:
    """An existing ~/.neuroshard, otherwise the platform's folder for user data. Nothing is created."""
    classic = (home or Path.home()) / ".neuroshard"
    if classic.is_dir():
        return classic
    return platformdirs.user_data_path("neuroshard", appauthor=False)


def default_data_dir(home: Path | None = None) -> Path:
    """The folder that `data_dir` in the config.toml of `home_data_dir` names, else that folder. Nothing is created.

    Raises StorageError when the named folder is not there: on a disk that is not connected nothing may start anew.
    """
    folder, *pointers = data_folders(home)
    if pointers and not folder.is_dir():
        first = pointers[0]
        raise StorageError(
            f"The data folder {folder}, which {first / CONFIG_FILE} names, is not there.",
            "Connect its disk, or mend or remove the line data_dir in that file.",
        )
    return folder


def data_folders(home: Path | None = None) -> tuple[Path, ...]:
    """Where this user's keys, settings and checkpoints lie by default, perhaps no folder yet; next the one whose
    config.toml names that place, if one does."""
    first = home_data_dir(home)
    named = _named_elsewhere(first / CONFIG_FILE)
    folder = first if named is None else (first / expanded(named)).absolute()
    return (first,) if folder == first else (folder, first)


def _named_elsewhere(config_file: Path) -> str | None:
    """The data_dir of a config.toml; None too for a file that cannot be read, which whoever needs it tells."""
    try:
        named = tomllib.loads(config_file.read_text(encoding="utf-8")).get("data_dir")
    except (OSError, ValueError):
        return None
    return named if isinstance(named, str) and named else None


def prepare_data_dir(folder: Path) -> None:
    """Create the folder (mode 0700) when it is missing and prove that it can be written.

    Raises StorageError, DiskFullError when not even its small files have room.
    """
    probe = folder / f".tmp-probe-{secrets.token_hex(4)}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe.write_bytes(bytes(PROBE_BYTES))
        if os.name == "posix" and folder.stat().st_mode & 0o022:
            folder.chmod(0o700)  # keys lie here: nobody else may replace files
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


POINTER = "current"
VERSIONS = "versions"
LAUNCHER = "neuroshard.cmd" if sys.platform == "win32" else "neuroshard"


def this_program() -> tuple[str, ...]:
    """The command line of exactly this version, to which arguments are added."""
    if is_frozen():
        return (sys.executable,)
    return (sys.executable, "-m", "neuroshard")


def installed_program() -> tuple[str, ...]:
    """The command line that also starts later versions: what autostart and shortcuts should name."""
    root = installation_root()
    return this_program() if root is None else (str(root / LAUNCHER),)


def is_frozen() -> bool:
    """Whether this is the program of neuroshard.spec, which has no Python of its own to call."""
    return bool(getattr(sys, "frozen", False))


def installation_root(version_folder: Path | None = None) -> Path | None:
    """The root of the installation that this version (by default the running one) belongs to; None: it has none."""
    if version_folder is None:
        version_folder = Path(sys.executable).parent if is_frozen() else Path(sys.prefix)
    root = version_folder.parent.parent
    belongs = version_folder.parent.name == VERSIONS and (root / POINTER).is_file()
    return root if belongs else None
