"""The second copy of a stage that another node trains: a complete state on this disk, replaced by newer ones."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from neuroshard.config.state_file import sync_folder, write_atomically
from neuroshard.errors import StorageError
from neuroshard.state.checkpoint_manifest import CheckpointManifest, CheckpointMeta
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.kept_states import KeptState, kept_states
from neuroshard.state.receiver import ReceivedState
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.types import NodeId

PARTIAL_FILE = "incoming.part"


@dataclass
class BackupCopy:
    """A SnapshotSource for a backup copy. The methods that touch the disk block: all but `replica_status`."""

    folder: Path
    now: Callable[[], float] = time.time
    manifest: CheckpointManifest | None = field(default=None, init=False)  # None: there is no copy
    root: str = field(default="", init=False)
    taken_at: float | None = field(default=None, init=False)  # time of the copied state, by this computer's clock

    @property
    def meta(self) -> CheckpointMeta | None:
        return None if self.manifest is None else self.manifest.meta

    @property
    def tensor_file(self) -> Path | None:
        return None if self.manifest is None else self.folder / self.manifest.tensors.file

    @property
    def work(self) -> tuple[int, int] | None:
        """Outer and inner steps of the copy."""
        meta = self.meta
        return None if meta is None else (meta.outer_step, meta.step)

    @property
    def age_seconds(self) -> float | None:
        """Seconds since the copied state was taken."""
        return None if self.taken_at is None else max(0.0, self.now() - self.taken_at)

    def load(self) -> None:
        """Find the copy that an earlier start left; an incomplete one counts as missing."""
        store = CheckpointStore(self.folder)
        with contextlib.suppress(StorageError):
            for generation in store.generations():
                manifest = store.read_manifest(Path(generation.path))
                with contextlib.suppress(OSError):
                    if (self.folder / manifest.tensors.file).stat().st_size == manifest.tensors.bytes:
                        # The time is by the holder's clock: after a restart the copy's age is not known.
                        self.manifest, self.taken_at = manifest, manifest.meta.time
                        return

    def keep(self, received: ReceivedState, taken_at: float) -> None:
        """Make a received state of this time the copy and delete the previous one. Raises StorageError."""
        manifest = received.manifest.checkpoint
        path = self.folder / f"step-{manifest.meta.step}.json"
        try:
            received.path.replace(self.folder / manifest.tensors.file)
            sync_folder(self.folder)
            write_atomically(path, received.manifest.document)
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be written: {error.strerror or error}.") from error
        self.manifest, self.root, self.taken_at = manifest, received.root, taken_at
        self._remove_all_but(path.name, manifest.tensors.file)

    def forget(self) -> None:
        self.manifest, self.root, self.taken_at = None, "", None
        self._remove_all_but()

    def replica_status(self) -> ReplicaStatus | None:
        meta, age = self.meta, self.age_seconds
        if meta is None or age is None:
            return None
        return ReplicaStatus(False, meta.step, meta.outer_step, self.root, age_seconds=age)

    def newest(self) -> CheckpointGeneration | None:
        generations = CheckpointStore(self.folder).generations()
        return generations[0] if generations else None

    def states(self) -> Sequence[KeptState]:
        return list(kept_states(CheckpointStore(self.folder)))

    def want(self) -> float:
        """Return infinity: a copy cannot be made newer on request."""
        return inf

    def may_be_taken(self, waited_seconds: float) -> bool:
        """Return True: no step changes a copy, so a download may start at any time."""
        return True

    def copied(self, peer: NodeId, taken_at: float) -> None:
        """Do nothing: nodes do not copy copies."""

    def _remove_all_but(self, *names: str) -> None:
        with contextlib.suppress(OSError):  # a file that cannot be deleted only takes space
            for path in self.folder.iterdir():
                if path.name not in names and path.is_file():
                    path.unlink(missing_ok=True)
