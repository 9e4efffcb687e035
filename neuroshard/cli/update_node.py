"""The node of this computer, as an update stops it, starts it again by another version, and watches it come up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from neuroshard.cli.client import RequestRefusedError, connect
from neuroshard.cli.remote import end_node
from neuroshard.config.program import VERSIONS
from neuroshard.errors import NetworkRefusedError, UsageError
from neuroshard.training.checkpoint.lock import read_lock_owner
from neuroshard.update.applying import RunningNode
from neuroshard.update.errors import UpdateFailedError
from neuroshard.update.installation import Installation

COME_UP_SECONDS = 180.0
SETTLED_SECONDS = 20.0  # one that still waits for data or others then, and answers, has come up as well
LOOK_SECONDS = 0.1
UNIT = "neuroshard.service"
OUTPUT = "after-update.log"
GETTING_READY = frozenset({"starting", "waiting_for_data", "waiting_for_stages"})


@dataclass(frozen=True)
class FoundNode:
    """How a node was started."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    unit: str | None  # of the service manager that started it


class LocalNode:
    """The node with this data folder, whose program must be one of the installation's versions."""

    def __init__(self, data_dir: Path, installation: Installation) -> None:
        self._data_dir = data_dir
        self._versions = installation.root / VERSIONS

    def running(self) -> FoundNode | None:
        """The node that holds the data folder. Raises UpdateFailedError when it could not be started again."""
        owner = read_lock_owner(self._data_dir)
        if owner is None:
            return None
        try:
            process = psutil.Process(owner.pid)
            line, environment, folder = process.cmdline(), process.environ(), process.cwd()
        except psutil.Error as error:
            raise UpdateFailedError(f"The running node cannot be looked at: {error}.", BY_HAND) from error
        return FoundNode(self._arguments(line), _clean(environment), Path(folder), _unit_of(process.pid))

    def stop(self, node: RunningNode) -> None:
        """End it after a final checkpoint. Raises NeuroShardError when it goes on."""
        del node
        end_node(connect(self._data_dir, None))

    def start(self, program: Path, version: str, node: RunningNode) -> None:
        """Start it again by this program and wait until it is up. Raises UpdateFailedError; nothing then runs."""
        if not isinstance(node, FoundNode):
            raise TypeError("a node of this control is needed")
        output = self._data_dir / "logs" / OUTPUT
        process = _spawn(program, node.arguments, node.environment, node.folder, output)
        _wait_until_up(process, self._data_dir, version, output)

    def prove(self, program: Path, version: str) -> None:
        """A demo node that does not train, in a folder of its own, comes up. Raises UpdateFailedError."""
        with tempfile.TemporaryDirectory(prefix="neuroshard-update-", ignore_cleanup_errors=True) as folder:
            arguments = ("demo", "--no-training", "--headless", "--port", "0", "--data-dir", folder)
            output = Path(folder) / "output"
            environment = {key: value for key, value in _clean(os.environ).items() if not key.startswith("NEUROSHARD_")}
            process = _spawn(program, arguments, environment, Path(folder), output)
            _wait_until_up(process, Path(folder) / "demo", version, output)
            _end(process)

    def settle(self, node: RunningNode) -> None:
        """Give the node back to the service manager that had started it, if any."""
        if isinstance(node, FoundNode) and node.unit is not None:
            end_node(connect(self._data_dir, None))
            systemctl = shutil.which("systemctl") or "systemctl"
            subprocess.run([systemctl, "--user", "start", node.unit], check=False)  # noqa: S603 - fixed arguments

    def _arguments(self, line: Sequence[str]) -> tuple[str, ...]:
        """What follows the program's name. Raises UpdateFailedError for a node that is not of this installation."""
        places = [index for index, word in enumerate(line) if self._is_ours(word)]
        if not places:
            raise UpdateFailedError("The running node is not of this installation.", BY_HAND)
        # an environment's interpreter lies there too: the last of them that is the program counts
        programs = [index for index in places if Path(line[index]).stem == "neuroshard"]
        if not programs:
            raise UpdateFailedError("The running node was started in an unusual way.", BY_HAND)
        arguments = tuple(line[programs[0] + 1 :])
        if "***" in arguments or "--token=***" in arguments:
            raise UpdateFailedError("The running node was given its token as a flag, which is kept nowhere.", BY_HAND)
        if "--end-with-stdin" in arguments:
            raise UpdateFailedError("The running node belongs to another program.", "Update when that one has ended.")
        return arguments

    def _is_ours(self, word: str) -> bool:
        with suppress(OSError, ValueError):
            return Path(word).absolute().is_relative_to(self._versions.absolute())
        return False


BY_HAND = "Stop it with `neuroshard stop`, update, and start it again."


def _spawn(
    program: Path, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path
) -> subprocess.Popen[bytes]:
    """Start a process that outlives this one and whose output goes to a file. Raises UpdateFailedError."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("wb") as file:
            return subprocess.Popen(  # noqa: S603 - a version whose digest was signed
                [str(program), *arguments],
                env={**environment, "NEUROSHARD_BROWSER": "false"},  # its dashboard is open already
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),  # closing this window must not end it
            )
    except OSError as error:
        raise UpdateFailedError(f"{program} cannot be started: {error}.") from error


def _wait_until_up(process: subprocess.Popen[bytes], data_dir: Path, version: str, output: Path) -> None:
    """Return once the node answers as this version and works. Raises UpdateFailedError; it is then ended."""
    try:
        is_up = _comes_up(process, data_dir, version)
    except BaseException:
        _end(process)
        raise
    if process.poll() is not None:
        raise UpdateFailedError(f"it ended with code {process.returncode}: {_last_words(output)}")
    if not is_up:
        _end(process)
        raise UpdateFailedError(f"it does not get to work: {_last_words(output)}")


def _comes_up(process: subprocess.Popen[bytes], data_dir: Path, version: str) -> bool:
    """Whether it answers in time and works, or has waited for others for a while."""
    begun = time.monotonic()
    answered: float | None = None
    while time.monotonic() - begun < COME_UP_SECONDS and process.poll() is None:
        state = _state(data_dir, version)
        if state == "failed":
            return False
        if state is not None and state not in GETTING_READY:
            return True
        if state is not None:
            answered = answered or time.monotonic()
            if time.monotonic() - answered > SETTLED_SECONDS:
                return True
        time.sleep(LOOK_SECONDS)
    return False


def _state(data_dir: Path, version: str) -> str | None:
    """What the node with this folder does, once it answers as the version."""
    try:
        status = connect(data_dir, None).get("/api/status")
    except (NetworkRefusedError, RequestRefusedError, UsageError):
        return None  # not yet
    return str(status.get("state")) if status.get("version") == version else None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask for a clean end, then insist."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(output: Path) -> str:
    with suppress(OSError):
        return output.read_text(encoding="utf-8", errors="replace").strip()[-500:]
    return ""


def _clean(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a frozen program told its own processes."""
    kept = {key: value for key, value in environment.items() if not key.startswith("_PYI_")}
    if sys.platform.startswith("linux") and "LD_LIBRARY_PATH_ORIG" in kept:
        kept["LD_LIBRARY_PATH"] = kept.pop("LD_LIBRARY_PATH_ORIG")
    return kept


def _unit_of(pid: int) -> str | None:
    """The user service that a process belongs to."""
    with suppress(OSError):
        groups = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
        if any(line.rsplit("/", 1)[-1] == UNIT and "/user@" in line for line in groups.splitlines()):
            return UNIT
    return None
