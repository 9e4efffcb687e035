"""The running node during an update: stop it, start it again with another version, and wait until it works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from neuroshard.cli.client import NodeRefusedError, connect
from neuroshard.config.folders import VERSIONS
from neuroshard.config.instance_lock import read_lock_owner
from neuroshard.errors import NetworkRefusedError, UsageError
from neuroshard.update.applying import StoppableNode
from neuroshard.update.installation import Installation
from neuroshard.update.release import UpdateFailedError

COME_UP_SECONDS = 180.0
STOP_SECONDS = 300.0  # long enough for a final checkpoint, which a service manager would interrupt earlier
SETTLED_SECONDS = 20.0  # a node that answers for this time counts as started, even if it waits for data or peers
LOOK_SECONDS = 0.1
UNIT = "neuroshard.service"
OUTPUT = "after-update.log"
GETTING_READY = frozenset({"starting", "waiting_for_data", "waiting_for_stages"})


@dataclass(frozen=True)
class NodeCommand:
    """Command line, environment, working folder and service of a running node, for starting it again."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    unit: str | None  # service unit that started it; None: no service manager


class LocalNode:
    """Controls the node with this data folder. Its program must be one of the installation's versions."""

    def __init__(self, data_dir: Path, installation: Installation) -> None:
        self._data_dir = data_dir
        self._versions = installation.root / VERSIONS

    def running(self) -> NodeCommand | None:
        """Find the node that holds the data folder. Raises UpdateFailedError if it could not be started again."""
        owner = read_lock_owner(self._data_dir)
        if owner is None:
            return None
        if owner.is_setup:
            raise UpdateFailedError(
                "The wizard is open in the browser, so no node runs yet.", "Finish it there, or close it: Ctrl+C."
            )
        try:
            process = psutil.Process(owner.pid)
            line, environment, folder = process.cmdline(), process.environ(), process.cwd()
        except psutil.Error as error:
            raise UpdateFailedError(f"The status of the running node cannot be read: {error}.", BY_HAND) from error
        return NodeCommand(self._arguments(line), _clean(environment), Path(folder), _unit_of(process.pid))

    def stop(self, node: StoppableNode) -> None:
        """Stop the process that holds the data folder, if any, after a final checkpoint. Raises UpdateFailedError."""
        del node
        deadline = time.monotonic() + STOP_SECONDS
        is_asked = False
        while read_lock_owner(self._data_dir) is not None:
            if time.monotonic() > deadline:
                raise UpdateFailedError(f"The node has not ended within {STOP_SECONDS:.0f} s.", "Look at its log.")
            is_asked = is_asked or _ask_to_stop(self._data_dir)
            time.sleep(LOOK_SECONDS)

    def start(self, program: Path, version: str, node: StoppableNode) -> None:
        """Start the node with this program and wait until it works. Raises UpdateFailedError; it is then ended."""
        if not isinstance(node, NodeCommand):
            raise TypeError("a node of this control is needed")
        output = self._data_dir / "logs" / OUTPUT
        process = _spawn(program, node.arguments, node.environment, node.folder, output)
        _wait_until_up(process, self._data_dir, version, output)

    def prove(self, program: Path, version: str) -> None:
        """Check that a demo node without training starts in a temporary folder. Raises UpdateFailedError."""
        with tempfile.TemporaryDirectory(prefix="neuroshard-update-", ignore_cleanup_errors=True) as folder:
            arguments = ("demo", "--no-training", "--headless", "--port", "0", "--data-dir", folder)
            output = Path(folder) / "output"
            environment = {key: value for key, value in _clean(os.environ).items() if not key.startswith("NEUROSHARD_")}
            process = _spawn(program, arguments, environment, Path(folder), output)
            _wait_until_up(process, Path(folder) / "demo", version, output)
            _end(process)

    def settle(self, program: Path, version: str, node: StoppableNode) -> str:
        """Return the node to the service manager that had started it, if any.

        If the service cannot start it, it is started without the service, and the returned sentence reports this.
        Raises UpdateFailedError.
        """
        if not isinstance(node, NodeCommand) or node.unit is None:
            return ""
        try:
            self.stop(node)
            self._start_unit(node.unit, version)
        except (UpdateFailedError, KeyboardInterrupt) as error:
            with suppress(UpdateFailedError):
                _systemctl("stop", node.unit)
            self.stop(node)
            self.start(program, version, node)
            why = str(error).rstrip(".") or "interrupted"
            return f"It runs outside its service ({why}): stop it and run `systemctl --user start {node.unit}`."
        return ""

    def _start_unit(self, unit: str, version: str) -> None:
        """Start the service and wait until its node works. Raises UpdateFailedError."""
        _systemctl("start", unit)

        def is_over() -> bool:
            with suppress(UpdateFailedError):
                _systemctl("is-active", unit)
                return False
            return True

        if not _comes_up(is_over, self._data_dir, version):
            raise UpdateFailedError(f"{unit} does not start; `journalctl --user -u {unit}` shows the reason")

    def _arguments(self, line: Sequence[str]) -> tuple[str, ...]:
        """Arguments after the program's name. Raises UpdateFailedError for a node that an update cannot start again."""
        places = [index for index, word in enumerate(line) if self._is_ours(word)]
        if not places:
            raise UpdateFailedError("The running node belongs to another installation.", BY_HAND)
        # The interpreter of a Python environment is in the same folder: only the word named neuroshard is the program.
        programs = [index for index in places if Path(line[index]).stem == "neuroshard"]
        if not programs:
            raise UpdateFailedError("The running node was started in an unusual way.", BY_HAND)
        arguments = tuple(line[programs[0] + 1 :])
        if "***" in arguments or "--token=***" in arguments:
            raise UpdateFailedError("The running node received its token as an option, which is not stored.", BY_HAND)
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
    """Start a process that outlives this one, with its output in a file. Raises UpdateFailedError."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("wb") as file:
            return subprocess.Popen(  # noqa: S603 - a version whose digest was signed
                [str(program), *arguments],
                env={**environment, "NEUROSHARD_BROWSER": "false"},  # the dashboard is already open
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
    """Wait until the node answers as this version and works. Otherwise end it and raise UpdateFailedError."""
    try:
        is_up = _comes_up(lambda: process.poll() is not None, data_dir, version)
    except BaseException:
        _end(process)
        raise
    if process.poll() is not None:
        raise UpdateFailedError(f"it ended with code {process.returncode}: {_last_words(output)}")
    if not is_up:
        _end(process)
        raise UpdateFailedError(f"it does not start: {_last_words(output)}")


def _comes_up(is_over: Callable[[], bool], data_dir: Path, version: str) -> bool:
    """Whether the node works within COME_UP_SECONDS, or has answered for SETTLED_SECONDS while it gets ready."""
    begun = time.monotonic()
    answered: float | None = None
    while time.monotonic() - begun < COME_UP_SECONDS and not is_over():
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
    """State of the node with this folder; None until it answers as this version."""
    try:
        status = connect(data_dir, None).get("/api/status")
    except (NetworkRefusedError, NodeRefusedError, UsageError):
        return None  # not yet
    return str(status.get("state")) if status.get("version") == version else None


def _ask_to_stop(data_dir: Path) -> bool:
    """Ask the node to stop, and return whether it accepted. A node that is starting or ending may not answer."""
    try:
        connect(data_dir, None).post("/api/shutdown")
    except (NetworkRefusedError, NodeRefusedError, UsageError):
        return False
    return True


def _systemctl(command: str, unit: str) -> None:
    """Run a command of the user's service manager. Raises UpdateFailedError with its error output."""
    try:
        done = subprocess.run(  # noqa: S603 - fixed arguments
            [shutil.which("systemctl") or "systemctl", "--user", command, unit],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise UpdateFailedError(f"systemctl cannot be run: {error}") from error
    if done.returncode != 0:
        raise UpdateFailedError(f"systemctl --user {command}: {done.stderr.strip()[-300:] or 'it refuses'}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process; kill it if it has not ended after 60 s."""
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
    """The environment without the variables that a frozen program sets for its own processes."""
    kept = {key: value for key, value in environment.items() if not key.startswith("_PYI_")}
    if sys.platform.startswith("linux") and "LD_LIBRARY_PATH_ORIG" in kept:
        kept["LD_LIBRARY_PATH"] = kept.pop("LD_LIBRARY_PATH_ORIG")
    return kept


def _unit_of(pid: int) -> str | None:
    """The user service to which a process belongs; None if it is not NeuroShard's service."""
    with suppress(OSError):
        groups = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
        if any(line.rsplit("/", 1)[-1] == UNIT and "/user@" in line for line in groups.splitlines()):
            return UNIT
    return None
