"""Small releases served on loopback, archives for Linux, and a computer with an installation that updates itself.

Real: the signatures, the server, the installation, the archive, its scripts and the update command. Simulated: the
program, a stand-in that answers as a node does, and the home folder.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from neuroshard.config.instance_lock import read_lock_owner
from neuroshard.update.installation import Installation
from tests.worlds.commands import outcome_of
from tests.worlds.publishers import ReleasePlace

PROGRAM = Path(__file__).with_name("standin_node.py")


def archive_of(files: Mapping[str, bytes], *, padding: int = 0) -> bytes:
    """A .tar.gz of executable files; `padding` bytes that do not compress make it longer."""
    buffer = io.BytesIO()
    extra = {"padding": b"".join(sha256(str(index).encode()).digest() for index in range(padding // 32))}
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in {**files, **(extra if padding else {})}.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def program(version: str, *, works: bool = True, calls_itself: str | None = None) -> bytes:
    """The stand-in program of a version."""
    head = f"#!{sys.executable}\nVERSION = {calls_itself or version!r}\nWORKS = {works}\n"
    return (head + PROGRAM.read_text(encoding="utf-8").replace("# ruff: noqa: F821\n", "")).encode()


def real_program(version: str) -> bytes:
    """This checkout's program, which calls itself another version."""
    lines = (
        f"#!{sys.executable}",
        "import sys",
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})",
        "import neuroshard",
        f"neuroshard.__version__ = {version!r}",
        "from neuroshard.cli.main import main",
        "main()",
    )
    return "\n".join(lines).encode()


def installed(root: Path, version: str = "0.1.0", content: bytes | None = None) -> Installation:
    """An installation with one version, as an installer leaves it."""
    installation = Installation(root)
    folder = installation.folder(version)
    folder.mkdir(parents=True)
    (folder / "neuroshard").write_bytes(content if content is not None else program(version))
    (folder / "neuroshard").chmod(0o755)
    installation.mark_complete(version)
    (root / "current").write_text(f"{version}\n", encoding="ascii")
    return installation


UPDATE_PROGRAM = Path(__file__).with_name("update_program.py")


@dataclass
class Computer:
    """One with an installation, a data folder, and a publisher within reach. Its program has the root `anchor`."""

    home: Path
    place: ReleasePlace
    installation: Installation
    anchor: bytes | None = None  # unset: the publisher's

    @property
    def data(self) -> Path:
        return self.home / "data"

    def update(self, *arguments: str, dies_after: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the command as the version that is installed, to its end."""
        line, environment = self._update_line(arguments, dies_after), self._update_environment(variables)
        ended = outcome_of(line, environment, script=UPDATE_PROGRAM)
        return subprocess.CompletedProcess(line, ended.code, ended.out, ended.err)

    def begin_update(self, *arguments: str, dies_after: str = "", **variables: str) -> subprocess.Popen[str]:
        """Begin the command as the version that is installed."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else a shell's background jobs pass "ignored" on
        return subprocess.Popen(
            [sys.executable, str(UPDATE_PROGRAM), *self._update_line(arguments, dies_after)],
            env=self._update_environment(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def _update_line(self, arguments: Sequence[str], dies_after: str) -> list[str]:
        version, root = self.installation.current(), str(self.installation.root)
        return [dies_after or "-", version, root, *arguments, "--data-dir", str(self.data)]

    def _update_environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("NEUROSHARD_")}
        root = (self.anchor or self.place.publisher.anchor).decode()
        return {**kept, **self.place.variables(), "HOME": str(self.home), "TEST_ROOT": root, **variables}

    def starts(self) -> list[str]:
        """What ran on the data folder so far."""
        return (self.data / "starts").read_text().splitlines()

    def working_version(self) -> str:
        """What a start gives now. The version must say so itself."""
        pointed = self.installation.program(self.installation.current())
        told = subprocess.run([str(pointed), "--version"], capture_output=True, text=True, check=True).stdout
        assert told.split()[1] == self.installation.current()
        return told.split()[1]

    @contextmanager
    def node(self, **variables: str) -> Iterator[None]:
        """A node of the current version; whatever runs on the folder afterwards is ended too."""
        start = [str(self.installation.program(self.installation.current())), "run", "--data-dir", str(self.data)]
        process = subprocess.Popen(start, env={**os.environ, "MARK": "kept", **variables})
        try:
            until(lambda: (owner := read_lock_owner(self.data)) is not None and owner.port is not None)
            yield
        finally:
            self.end_node()
            process.kill()
            process.wait()

    def end_node(self) -> None:
        owner = read_lock_owner(self.data) if self.data.exists() else None
        if owner is not None and owner.pid is not None:
            os.kill(owner.pid, 9)
            until(lambda: read_lock_owner(self.data) is None)


def until(holds: Callable[[], object], seconds: float = 30) -> None:
    """Wait until it holds; fail when it never does."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def publish(computer: Computer, version: str, content: bytes | None = None, **changes: object) -> None:
    """Put a version of the stand-in, or of another program, where the computer looks."""
    archive = archive_of({"neuroshard": content or program(version)}, padding=200_000)
    computer.place.publish(version, archive, **changes)  # type: ignore[arg-type]


BUILD = Path(__file__).parents[2] / "installers/build_tarball.py"


def unpacked_archive(place: Path, content: bytes) -> Path:
    """What a user unpacks, below the new folder `place`; `content` is the whole program."""
    folder = place / "neuroshard"
    folder.mkdir(parents=True)
    (folder / "neuroshard").write_bytes(content)
    (folder / "neuroshard").chmod(0o755)
    command = [sys.executable, str(BUILD), "--program", str(folder), "--out", str(place)]
    archives = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    with tarfile.open(archives[0]) as archive:
        # the archive is our own; the filter, which later versions ask for, came with Python 3.11.4
        archive.extractall(place / "unpacked", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    with tarfile.open(archives[1]) as update:
        assert update.getnames() == ["neuroshard"]
    return next((place / "unpacked").iterdir())


@contextmanager
def running(launcher: Path, data: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A node that answers."""
    with subprocess.Popen([str(launcher), "run", "--data-dir", str(data)]) as node:
        try:
            until(lambda: data.exists() and (owner := read_lock_owner(data)) is not None and owner.port is not None)
            yield node
        finally:
            node.kill()


def script(path: Path, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the installers as the owner of a home folder, with nobody to answer its questions."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("NEUROSHARD_", "XDG_", "SUDO_"))}
    return subprocess.run(
        ["sh", str(path), *arguments],
        env={**kept, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
