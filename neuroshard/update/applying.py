"""The steps of an update. The pointer moves only when the new version has come up, so a kill between any two steps
leaves a version that works; after whatever else fails before, Ctrl+C too, the old one runs again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, Protocol

import anyio

from neuroshard.config.folders import is_frozen
from neuroshard.config.state_file import try_lock
from neuroshard.errors import ConflictError, NeuroShardError, StorageError
from neuroshard.update.fetching import FetchProgress, fetch_artefact, flush_to_disk, unpack_archive
from neuroshard.update.installation import LOCK, Installation
from neuroshard.update.release import AvailableUpdate, UpdateFailedError

TRY_SECONDS = 120.0
PREPARE_SECONDS = 3600.0  # the packages of an environment are downloaded
BOOTSTRAP = "bootstrap.py"  # in archives of environments: creates the environment

OnStep = Callable[[str], None]


class StoppableNode(Protocol):
    """A node as the control found it: everything needed to start it again in the same way."""


class NodeControl(Protocol):
    """Finds, stops and starts the node of this computer."""

    def running(self) -> StoppableNode | None:
        """The process that holds the data folder. Raises UpdateFailedError if it could not be started again."""
        ...

    def stop(self, node: StoppableNode) -> None:
        """End the process that holds the data folder after a final checkpoint. Raises NeuroShardError if it stays."""
        ...

    def start(self, program: Path, version: str, node: StoppableNode) -> None:
        """Start the node with this program and wait until it is up. Raises UpdateFailedError; then no node runs."""
        ...

    def prove(self, program: Path, version: str) -> None:
        """Show with a separate test node that this program starts. Raises UpdateFailedError."""
        ...

    def settle(self, program: Path, version: str, node: StoppableNode) -> str:
        """The version is chosen: give the node back to what had started it, a service manager perhaps.

        If that fails, the node is started as before, and the returned sentence says so; otherwise it is empty.
        Raises NeuroShardError; nothing may then run.
        """
        ...


@dataclass(frozen=True)
class VersionChange:
    """The versions before and after a change of an installation."""

    before: str
    after: str
    was_running: bool
    note: str = ""  # a sentence for the owner about the running node


def apply_update(
    update: AvailableUpdate,
    installation: Installation,
    control: NodeControl,
    *,
    progress: FetchProgress | None = None,
    on_step: OnStep = lambda _step: None,
) -> VersionChange:
    """Fetch, unpack, try and start the new version. `on_step` receives a sentence for each step that is done.

    Raises UpdateRefusedError, UpdateFailedError, DataError, StorageError; the version from before is then in use, but
    for the UpdateFailedError that says that no node runs.
    """
    version = update.version
    with _alone(installation):
        control.running()  # a node that could not be started again is reported before anything is fetched
        if not installation.is_complete(version):
            archive = installation.download(version)
            anyio.run(fetch_artefact, update.artefact, archive, progress)
            on_step("downloaded")
            _install(installation, version, archive, update.artefact.unpacked_size)
        on_step("unpacked")
        _try(installation.program(version), version)
        on_step("tried")
        return _tidied(installation, _change(installation, control, version, on_step))


def roll_back(installation: Installation, control: NodeControl, on_step: OnStep = lambda _step: None) -> VersionChange:
    """Return to the version before. Raises UpdateFailedError when there is none or it does not come up."""
    with _alone(installation):
        version = installation.previous()
        if version is None:
            raise UpdateFailedError(
                "No earlier version is installed.", "Run the installer of the version that you want."
            )
        return _change(installation, control, version, on_step)


def _tidied(installation: Installation, change: VersionChange) -> VersionChange:
    """Remove old versions. A failure is reported in the note and does not undo the change."""
    try:
        installation.tidy()
    except StorageError as error:
        return replace(change, note=f"{change.note} {error}".strip())
    return change


def _change(installation: Installation, control: NodeControl, version: str, on_step: OnStep) -> VersionChange:
    before = installation.current()
    program = installation.program(version)
    node = control.running()
    if node is None:
        control.prove(program, version)
        on_step("proved")
        installation.switch(version)
        on_step("switched")
        return VersionChange(before, version, was_running=False)
    try:
        control.stop(node)
        on_step("stopped")
        control.start(program, version, node)
        on_step("started")
        installation.switch(version)
    except (NeuroShardError, KeyboardInterrupt) as error:
        _go_back(_Trial(installation, control, node, on_step), version, error)
    on_step("switched")
    try:
        note = control.settle(program, version, node)
    except (NeuroShardError, KeyboardInterrupt) as error:
        said = f"Version {version} is installed, but its node could not be started again: {_words(error)}."
        raise UpdateFailedError(said, _what_runs(control)) from error
    on_step("settled")
    return VersionChange(before, version, was_running=True, note=note)


@dataclass(frozen=True)
class _Trial:
    """A node that another version should take over."""

    installation: Installation
    control: NodeControl
    node: StoppableNode
    on_step: OnStep


def _go_back(trial: _Trial, version: str, error: NeuroShardError | KeyboardInterrupt) -> NoReturn:
    """Start the current version again after another one failed. Always raises UpdateFailedError."""
    control, node, before = trial.control, trial.node, trial.installation.current()
    program = trial.installation.program(before)
    said = f"The change to version {version} failed: {_words(error)}."
    try:
        trial.on_step("going back")
        control.stop(node)  # the old one if it is still ending, or the new one
        control.start(program, before, node)
        note = control.settle(program, before, node)
    except (NeuroShardError, KeyboardInterrupt) as second:
        said = f"{said} Version {before} could not be started again: {_words(second)}."
        raise UpdateFailedError(said, _what_runs(control)) from error
    raise UpdateFailedError(said, f"Version {before} runs again, from the same checkpoint. {note}".strip()) from error


def _words(error: NeuroShardError | KeyboardInterrupt) -> str:
    return str(error).rstrip(".") or "it was interrupted"


def _what_runs(control: NodeControl) -> str:
    """The advice after a node could be neither replaced nor started again."""
    try:
        node = control.running()
    except UpdateFailedError:  # its state is unknown, but it is there
        return "Something still holds the data folder: see `neuroshard status`."
    if node is not None:
        return "A node still holds the data folder: see `neuroshard status`. Start it again when it has ended."
    return "No node runs now. Start it with `neuroshard`: it resumes from its newest checkpoint."


def _install(installation: Installation, version: str, archive: Path, unpacked_size: int) -> None:
    folder = installation.folder(version)
    try:
        installation.discard(version)  # remains of an earlier attempt
        unpack_archive(archive, folder, unpacked_size)
        if (folder / BOOTSTRAP).is_file():
            _prepare(folder)
        flush_to_disk(folder)  # after a power cut, the mark and the pointer must not refer to files without content
        installation.mark_complete(version)
        archive.unlink()
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror}.", "Make room and try again.") from error


def _prepare(folder: Path) -> None:
    """Create an environment at its final place: its scripts contain their path."""
    if is_frozen():
        raise UpdateFailedError(
            "The update is for an installation with its own Python environment. This program is frozen.",
            "Run the new installer.",
        )
    _run([sys.executable, str(folder / BOOTSTRAP), "--into", str(folder)], PREPARE_SECONDS, "prepared")


def _try(program: Path, version: str) -> None:
    output = _run([str(program), "--version"], TRY_SECONDS, "tried")
    if output.split() != ["neuroshard", version]:
        raise UpdateFailedError(f"The new program reports {output.strip()[:80]!r}, not version {version}.")


def _run(command: list[str], seconds: float, what: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)  # noqa: S603 - verified
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UpdateFailedError(f"The new version could not be {what}: {error}.") from error
    if done.returncode != 0:
        raise UpdateFailedError(f"The new version could not be {what}: {(done.stdout + done.stderr).strip()[-1000:]}")
    return done.stdout


@contextmanager
def _alone(installation: Installation) -> Generator[None]:
    """Allow one update at a time."""
    try:
        file = (installation.root / LOCK).open("w", encoding="ascii")
    except OSError as error:
        action = "Update as the user who installed it, or with the tool that installed it."
        raise StorageError(f"{installation.root} cannot be written: {error.strerror}.", action) from error
    with file:
        if not try_lock(file.fileno()):
            raise ConflictError("Another update is running.", "Wait until it ends.")
        yield
