"""How this program is started again: from a Python environment, frozen into a folder, or from an installation.

An installation, as the installers make it, keeps several versions side by side:

    ROOT/current            the name of the version that starts, in one line; replaced atomically
    ROOT/versions/NAME/     one version each: a frozen program or a Python environment
    ROOT/neuroshard         starts the current version (neuroshard.cmd on Windows)
"""

from __future__ import annotations

import sys
from pathlib import Path

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
