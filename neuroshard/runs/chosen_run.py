"""The run that the owner chose in the wizard or in the dashboard, the runs chosen before, and the release's own run."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from neuroshard.config.multiaddr import checked_multiaddr
from neuroshard.config.state_file import StateFile
from neuroshard.decoders import read_json
from neuroshard.errors import DataError
from neuroshard.identity.invitations import MAX_CODE_CHARACTERS, MAX_NAME_CHARACTERS, Invitation, to_code
from neuroshard.types import MAX_ADDRESS_CHARACTERS, NamedRun, RunId

MAX_RUNS = 64
MAX_PEERS = 16
MAX_BYTES = 512 * 1024
RELEASE_RUN = "release_run.json"
CHOSEN_FILE = "runs/chosen.json"
_Place = Annotated[str, Meta(max_length=MAX_ADDRESS_CHARACTERS)]


class ChosenRun(Struct, frozen=True):
    """A run with the places where a node begins."""

    run: NamedRun
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)] = ""
    peers: Annotated[tuple[_Place, ...], Meta(max_length=MAX_PEERS)] = ()  # multiaddrs
    data: _Place | None = None  # https:// address of the run's data; None: the run's nodes send them
    code: Annotated[str, Meta(max_length=MAX_CODE_CHARACTERS)] | None = None  # until this wallet has its pass

    def __post_init__(self) -> None:
        """Raise ValueError for a peer that is not a complete address."""
        for peer in self.peers:
            checked_multiaddr(peer)

    @classmethod
    def of(cls, invitation: Invitation) -> ChosenRun:
        """The run of an invitation. The code is kept until a node of the run has accepted the pass."""
        data = invitation.data[0] if invitation.data else None
        return cls(invitation.run_id, invitation.name, invitation.peers, data, to_code(invitation))

    @property
    def run_id(self) -> RunId:
        """The run's id."""
        return RunId(self.run)


class ChosenRuns(Struct, frozen=True):
    """All runs that were chosen in one data folder, the newest first."""

    current: NamedRun | None = None  # None: a run of this computer's own, or the one that a start finds
    runs: Annotated[tuple[ChosenRun, ...], Meta(max_length=MAX_RUNS)] = ()


def has_choice(data_dir: Path) -> bool:
    """Whether a start without --run may find a run that was chosen, or the release's. It reads no file as a whole."""
    return (data_dir / CHOSEN_FILE).exists() or _release_bytes() != b""


class RunChoice:
    """The file `<data-dir>/runs/chosen.json`, mode 0600: it contains an invitation until that is used."""

    def __init__(self, data_dir: Path) -> None:
        self._file = StateFile(
            data_dir / CHOSEN_FILE,
            ChosenRuns,
            "set_aside",
            "the run must be chosen again",
            max_bytes=MAX_BYTES,
            data_dir=data_dir,
        )

    def read(self) -> ChosenRuns:
        """The chosen runs. Raises StorageError."""
        return self._file.read() or ChosenRuns()

    def current(self) -> ChosenRun | None:
        """The run that the next start serves; None without a choice. Raises StorageError."""
        chosen = self.read()
        return next((one for one in chosen.runs if one.run == chosen.current), None)

    def choose(self, run: ChosenRun) -> None:
        """Make this the run of the next start. The others stay listed. Raises StorageError."""
        with self._file.alone():
            others = tuple(one for one in self.read().runs if one.run != run.run)
            self._file.write(ChosenRuns(run.run, (run, *others)[:MAX_RUNS]))

    def leave(self) -> None:
        """Serve a run of this computer's own from the next start on. Raises StorageError."""
        with self._file.alone():
            chosen = self.read()
            if chosen.current is not None:
                self._file.write(replace(chosen, current=None))

    def forget_code(self, run_id: RunId) -> None:
        """Delete the invitation to a run: this computer has its pass. Raises StorageError."""
        with self._file.alone():
            chosen = self.read()
            if any(one.run == run_id and one.code is not None for one in chosen.runs):
                later = tuple(replace(one, code=None) if one.run == run_id else one for one in chosen.runs)
                self._file.write(replace(chosen, runs=later))


def release_run() -> ChosenRun | None:
    """The default run of this release, or None while its file is empty. Raises DataError for a damaged file."""
    data = _release_bytes()
    if not data:
        return None
    try:
        return read_json(data, ChosenRun, MAX_BYTES)
    except ValueError as error:
        raise DataError(f"{RELEASE_RUN} of this release cannot be used: {error}", "Install it again.") from None


def _release_bytes() -> bytes:
    return files("neuroshard.runs").joinpath(RELEASE_RUN).read_bytes().strip()
