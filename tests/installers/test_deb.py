"""The Debian package's life in a clean root: installed, run, removed under a running node, purged.

In every run its program is this checkout's; with `pytest -m installers` it is the frozen one, in a fresh Debian.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from neuroshard import __version__
from neuroshard.host.autostart import systemd_unit

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


ROOT = Path(__file__).parents[2]
BUILD = ROOT / "installers/build_deb.py"
DESKTOP = {"DISPLAY": ":9"}  # that does not answer, but is asked
DATA = "home/someone/.local/share/neuroshard"
pytestmark = [pytest.mark.process, pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose program is a script that runs this checkout."""
    program = tmp_path_factory.mktemp("program") / "neuroshard"
    program.mkdir()
    start = f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    (program / "neuroshard").write_text(start + "from neuroshard.cli.main import main\nmain()\n", encoding="utf-8")
    (program / "neuroshard").chmod(0o755)
    command = [sys.executable, str(BUILD), "--program", str(program), "--out", str(program.parent)]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


@pytest.fixture
def root(package: Path, tmp_path: Path, small_text: Path) -> Iterator[CleanRoot]:
    """A root in which nothing of NeuroShard is installed."""
    seen = [ROOT, package.parent, small_text, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
    with clean_root(tmp_path / "place", Path("/"), seen) as root:
        yield root


def test_what_the_package_says_of_itself(package: Path) -> None:
    fields = subprocess.run(["dpkg-deb", "--field", str(package)], capture_output=True, text=True, check=True).stdout
    assert f"Package: neuroshard\nVersion: {__version__}\n" in fields
    listed = subprocess.run(["dpkg-deb", "--contents", str(package)], capture_output=True, text=True, check=True).stdout
    for place in (
        "./usr/bin/neuroshard -> ../lib/neuroshard/neuroshard",
        "./usr/share/applications/neuroshard.desktop",
        "./usr/share/applications/neuroshard-link.desktop",
        "./usr/share/mime/packages/neuroshard.xml",
        "./usr/share/icons/hicolor/scalable/apps/neuroshard.svg",
        "./usr/lib/systemd/user/neuroshard.service",
        "./usr/share/doc/neuroshard/copyright",
        "./usr/share/man/man1/neuroshard.1.gz",
    ):
        assert place in listed
    assert {line.split()[1] for line in listed.splitlines()} == {"root/root"}
    assert "default.target.wants" not in listed  # the unit is there, and nothing enables it


def test_the_package_has_the_unit_that_autostart_writes(package: Path, tmp_path: Path) -> None:
    subprocess.run(["dpkg-deb", "--extract", str(package), str(tmp_path)], check=True)
    unit = tmp_path / "usr/lib/systemd/user/neuroshard.service"
    assert unit.read_text(encoding="utf-8") == systemd_unit(("/usr/bin/neuroshard", "--headless"))


def test_the_life_of_the_package(root: CleanRoot, package: Path, small_text: Path) -> None:
    live(root, package, ("--text", str(small_text), "--memory", "1000", "--cpu-threads", "1"))


@pytest.mark.installers
def test_the_life_of_the_real_package_in_a_fresh_debian(tmp_path: Path) -> None:
    """NEUROSHARD_DEB and NEUROSHARD_DEBIAN name the package and a folder that debootstrap filled."""
    package, debian = (Path(os.environ[name]) for name in ("NEUROSHARD_DEB", "NEUROSHARD_DEBIAN"))
    with clean_root(tmp_path / "place", debian, [package.parent]) as root:
        assert root.run("sh", "-c", "command -v python3", check=False).returncode != 0
        live(root, package, ())
        root.run("dpkg", "-i", str(package))
        export = ("neuroshard", "checkpoint", "export", "--data-dir", f"/{DATA}/demo", "--format")
        for form in ("hf", "gguf"):  # the frozen program brings what writes them
            root.run(*export, form, "--out", f"/tmp/{form}")
        doctor = root.run("neuroshard", "doctor", check=False)
        assert doctor.returncode in {0, 1}
        assert "data_dir" in doctor.stdout


def live(root: CleanRoot, package: Path, limits: tuple[str, ...]) -> None:
    """Install, run, remove while it runs, install again, purge."""
    before = root.changed()
    root.run("dpkg", "-i", str(package))
    assert root.run("neuroshard", "--version").stdout == f"neuroshard {__version__}\n"
    done = root.run("neuroshard", "demo", "--steps", "20", "--headless", "--port", "0", *limits, **DESKTOP)
    assert "verdict" in done.stdout, done.stderr

    node = root.start("neuroshard", "demo", "--headless", "--port", "0", *limits, **DESKTOP)
    until(lambda: "training" in root.run("neuroshard", "status", "--demo", check=False).stdout)
    removed = root.run("dpkg", "-r", "neuroshard")
    assert "Stopping the running nodes" in removed.stdout
    assert "stay in each user's ~/.local/share/neuroshard" in removed.stdout
    assert node.wait(30) == 0  # it ended by itself, with its checkpoint
    log = root.run("sh", "-c", f"find /{DATA} -path '*/logs/*' -exec cat {{}} +").stdout
    assert "SIGTERM received" in log

    root.run("dpkg", "-i", str(package))
    root.run("dpkg", "-P", "neuroshard")
    left = {path for path in root.changed() - before if not path.startswith((f"{DATA}/", "home/someone/."))}
    assert {path for path in left if not is_cache(path)} == set()
    assert any(
        path.startswith(f"{DATA}/demo/") and path.endswith(".safetensors") for path in root.changed()
    )  # what users made stays


def is_cache(path: str) -> bool:
    """What other programs of the system write when a menu entry comes or goes."""
    return path.endswith(".cache") or path.startswith(("tmp/", "run/", "usr/share/mime/"))


def until(holds: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
