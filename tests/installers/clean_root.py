"""A root folder whose changes are its own: an overlay in namespaces of its own, which vanish with the test."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PREPARE = """
set -e
mount -t tmpfs none "$PLACE"
mkdir "$PLACE/upper" "$PLACE/work" "$PLACE/merged"
mount -t overlay overlay -o "lowerdir=$LOWER,upperdir=$PLACE/upper,workdir=$PLACE/work" "$PLACE/merged"
for folder in $SEEN; do mkdir -p "$PLACE/merged$folder"; mount --bind "$folder" "$PLACE/merged$folder"; done
mount -t proc proc "$PLACE/merged/proc"
mount --rbind /dev "$PLACE/merged/dev"
echo ready
exec cat
"""


@dataclass(frozen=True)
class CleanRoot:
    """Commands run inside as root, with a home folder of their own."""

    keeper: int  # process that holds the namespaces
    place: Path

    def run(self, *command: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run to the end inside; a failure shows what was said."""
        ran = subprocess.run(
            [*self._inside(command)],
            env=_environment(variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
            stdin=subprocess.DEVNULL,
        )
        assert ran.returncode == 0 or not check, f"{command}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}"
        return ran

    def start(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start and leave running inside."""
        return subprocess.Popen(
            self._inside(command),
            env=_environment(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def changed(self) -> set[str]:
        """Files that were written inside and are still there, but for what dpkg keeps about itself."""
        listed = self.run("true")  # the overlay is mounted
        assert listed.returncode == 0
        upper = self.place / "upper"
        found = subprocess.run(
            self._outside(("find", str(upper), "-type", "f", "-printf", "%P\\n")),
            capture_output=True,
            text=True,
            check=True,
        )
        paths = found.stdout.split("\n")
        kept = ("var/lib/dpkg/", "var/log/", "var/cache/")
        return {path for path in paths if path and not path.startswith(kept)}

    def _inside(self, command: Sequence[str]) -> list[str]:
        return self._outside(("chroot", str(self.place / "merged"), *command))

    def _outside(self, command: Sequence[str]) -> list[str]:
        return [
            "nsenter",
            f"--mount=/proc/{self.keeper}/ns/mnt",
            f"--pid=/proc/{self.keeper}/ns/pid_for_children",
            *command,
        ]


def why_not() -> str:
    """Why this computer cannot have one; empty when it can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "a clean root needs root's rights"
    missing = [name for name in ("unshare", "nsenter", "dpkg-deb") if shutil.which(name) is None]
    return f"{missing[0]} is missing" if missing else ""


@contextmanager
def clean_root(place: Path, lower: Path, seen: Sequence[Path]) -> Iterator[CleanRoot]:
    """A root like `lower`, in which the folders `seen` are those of outside."""
    place.mkdir()
    variables = {"PLACE": str(place), "LOWER": str(lower), "SEEN": " ".join(map(str, seen))}
    command = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--propagation",
        "private",
        "sh",
        "-c",
        _PREPARE,
    ]
    keeper = subprocess.Popen(
        command, env={**os.environ, **variables}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert keeper.stdout is not None
        ready = keeper.stdout.readline()
        if ready != b"ready\n":
            keeper.kill()
            raise RuntimeError(keeper.communicate()[1].decode())
        yield CleanRoot(keeper.pid, place)
    finally:
        keeper.kill()  # and with it everything inside
        keeper.communicate()


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    fixed = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/home/someone"}
    return {**fixed, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8", **variables}
