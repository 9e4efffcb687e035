"""The folder of one stage's checkpoints: complete generations only, even after a kill, damage or a full disk.

PyTorch is imported where tensors are read or written, so listing the checkpoints starts quickly.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from neuroshard.config.folders import NodePaths
from neuroshard.config.state_file import (
    TEMPORARY_PREFIX,
    failure_reason,
    is_disk_full,
    make_folder,
    sync_folder,
    write_atomically,
)
from neuroshard.errors import CheckpointError, DiskFullError, StorageError
from neuroshard.state.checkpoint_manifest import (
    MAX_META_BYTES,
    CheckpointManifest,
    CheckpointMeta,
    IncompatibleCheckpointError,
    TensorFile,
    decode_manifest,
    encode_manifest,
    unreadable,
)
from neuroshard.state.disk_space import StorageLimits, generations_to_delete_for, superfluous
from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.types import Architecture, LayerRange, RunId, WalletId

if TYPE_CHECKING:
    from torch import Tensor

    from neuroshard.state.staging_buffers import StagingBuffers


def set_aside(folder: Path, generation: str, name: str, *, clear_first: bool = False) -> Path:
    """Move `generation`'s files ("step-120") to folder/name, or name-2, ... when that has such files already.

    With `clear_first`, the contents of folder/name are deleted first. Raises StorageError when a file cannot be moved.
    """
    files = [
        path
        for path in folder.iterdir()
        if re.fullmatch(rf"{generation}(-\d+)?\.(json|safetensors|residual)", path.name)
    ]
    target, number = folder / name, 1
    try:
        target.mkdir(mode=0o700, exist_ok=True)
        if clear_first:
            for old in target.iterdir():
                with contextlib.suppress(OSError):  # files that stay only take space
                    old.unlink()
        while any((target / path.name).exists() for path in files):
            number += 1
            target = folder / f"{name}-{number}"
            target.mkdir(mode=0o700, exist_ok=True)
        for path in files:
            path.rename(target / path.name)
    except OSError as error:
        raise StorageError(
            f"{generation} in {folder} cannot be set aside: {error.strerror or error}.",
            "Move its files away by hand, or make the folder writable.",
        ) from error
    return target


def go_back(store: CheckpointStore, at: float) -> tuple[CheckpointGeneration | None, tuple[Path, ...]]:
    """Set aside states newer than `at` (seconds since the epoch), so that the next start resumes from the rest.

    Returns the state to resume from and the folders with the newer ones. When no state is that old, nothing is moved.
    """
    older = next((item for item in store.generations() if item.time <= at), None)
    return (None, ()) if older is None else (older, set_newer_aside(store, at, f"newer-than-step-{older.step}"))


def set_newer_aside(store: CheckpointStore, at: float, why: str) -> tuple[Path, ...]:
    """Set aside all states newer than `at` and return their new folders."""
    newer = [item for item in store.generations() if item.time > at]
    return tuple(set_aside(store.folder, f"step-{item.step}", f"set-aside-{why}") for item in newer)


_LOG = logging.getLogger(__name__)

_JSON_NAME = re.compile(r"step-(\d{1,18})\.json")
_TENSORS_NAME = re.compile(r"step-(\d{1,18})(?:-\d+)?\.safetensors")
_RESIDUAL_SUFFIX = ".residual"  # of the optional file next to a tensor file, see residual_path


@dataclass(frozen=True)
class Expectation:
    """Properties that a checkpoint must have so that this node can continue it."""

    wallet_id: WalletId
    run_id: RunId
    architecture: Architecture
    layers: LayerRange


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A restored state: `tensors` are those of the staging buffers, valid until their next copy_from."""

    meta: CheckpointMeta
    tensors: dict[str, Tensor]
    path: Path
    residual: Tensor | None = None  # (d,), of the stage on this node; None: there is none


@dataclass(frozen=True)
class _Entry:
    generation: CheckpointGeneration
    tensors: str  # file name


@dataclass(frozen=True)
class Restoration:
    """Result of a restore: a state or None, and descriptions of the skipped generations."""

    loaded: LoadedCheckpoint | None
    warnings: tuple[str, ...] = ()


def stage_folder(data_dir: Path, wallet_id: WalletId, run_id: RunId, layers: LayerRange) -> Path:
    """Return checkpoints/<wallet_id>/<run_id>/<stage>/; a second node on this machine has its own data folder."""
    return NodePaths.below(data_dir).checkpoints / wallet_id / run_id / f"layers-{layers.start}-{layers.stop}"


def find_stage_folders(data_dir: Path) -> tuple[Path, ...]:
    """Find all folders below a data folder that may contain checkpoints, of all wallets and runs."""
    return tuple(sorted(path for path in data_dir.glob("checkpoints/*/*/*") if path.is_dir()))


def search_stage_folders(folder: Path) -> tuple[Path, ...]:
    """Find stage folders below a folder that may also contain the data folders of several nodes."""
    found = {path for above in ("", "*/", "*/*/") for path in folder.glob(f"{above}checkpoints/*/*/*")}
    if folder.name == "checkpoints":
        found |= set(folder.glob("*/*/*"))
    return tuple(sorted(path for path in found if path.is_dir()))


class CheckpointStore:
    """Writes and reads generations. One writer at a time; generations() may be called from any thread."""

    def __init__(self, folder: Path, limits: StorageLimits | None = None, data_dir: Path | None = None) -> None:
        """`data_dir` is the node's data folder above it, which a running node does not create again."""
        self.folder = folder
        self.data_dir = data_dir
        self._limits = limits or StorageLimits()
        self._known: dict[str, tuple[tuple[int, int], _Entry]] = {}  # by file name: (mtime, size) and the parsed entry

    @property
    def limits(self) -> StorageLimits:
        return self._limits

    def change_limits(self, limits: StorageLimits) -> None:
        """Apply other limits on disk space from the next write on."""
        self._limits = limits

    def generations(self) -> tuple[CheckpointGeneration, ...]:
        """Return complete generations, newest first, without unreadable ones. Changes nothing."""
        found: list[CheckpointGeneration] = []
        for path in self._manifests():
            with contextlib.suppress(StorageError):  # load_newest reports damage
                found.append(self._entry(path).generation)
        return tuple(found)

    def manifests(self) -> Iterator[tuple[CheckpointGeneration, CheckpointManifest]]:
        """Yield complete generations with their full manifests, newest first, without unreadable ones."""
        for path in self._manifests():
            with contextlib.suppress(StorageError):  # as above
                manifest = self.read_manifest(path)
                yield _generation(path, manifest), manifest

    def write(
        self,
        meta: CheckpointMeta,
        staging: StagingBuffers,
        cancelled: Callable[[], bool] | None = None,
        residual: Tensor | None = None,
    ) -> CheckpointGeneration:
        """Write one generation, with the residual (d,) next to it, and delete superfluous ones.

        Raises DiskFullError or StorageError (InterruptedError when cancelled); older generations are then unchanged,
        except those deleted to free space, and no temporary file stays.
        """
        try:
            make_folder(self.folder, self.data_dir)
            self._remove_leftovers()
            self._ensure_room(staging.layout.file_bytes + (0 if residual is None else residual.nbytes))
            generation = self._write_files(meta, staging, cancelled, residual)
        except InterruptedError:
            raise
        except OSError as error:
            if is_disk_full(error):
                need = staging.layout.file_bytes / 1e6
                raise DiskFullError(
                    f"The disk of {self.folder} is full: a checkpoint needs {need:.0f} MB.", "Free some space."
                ) from error
            raise StorageError(f"{self.folder} cannot be written: {failure_reason(error, self.data_dir)}.") from error
        self._prune()
        return generation

    def adopt(self, meta: CheckpointMeta, tensors: Path, digest: str) -> CheckpointGeneration:
        """Move a received tensor file, which must be complete and flushed, into the store as a generation.

        Existing generations that are not older belong to another line of training and are set aside. Raises
        StorageError.
        """
        try:
            make_folder(self.folder, self.data_dir)
            overtaken = [path for path in self._manifests() if _step_of(path) >= meta.step]
            for number, path in enumerate(overtaken):
                set_aside(self.folder, path.stem, "other-line", clear_first=number == 0)
            file_bytes, final = tensors.stat().st_size, self._free_tensor_name(meta.step)
            tensors.replace(final)
            return self._commit(meta, TensorFile(final.name, file_bytes, digest))
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be written: {failure_reason(error, self.data_dir)}.") from error

    def ensure_room(self, new_bytes: int) -> None:
        """Delete old generations so that one of this size fits. Raises DiskFullError, StorageError."""
        try:
            make_folder(self.folder, self.data_dir)
            self._ensure_room(new_bytes)
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be written: {failure_reason(error, self.data_dir)}.") from error

    def load_newest(self, expected: Expectation, staging: StagingBuffers) -> Restoration:
        """Restore the newest whole generation into the buffers.

        Damaged generations are moved to `damaged/` and the one before is taken; those of another model, run or
        format are moved to a named folder and kept. Raises StorageError when folder or files may not be read: that
        is not damage, and nothing is moved.
        """
        warnings: list[str] = []
        damaged = 0
        self._remove_leftovers()
        for path in self._manifests():
            try:
                loaded = self._load(path, expected, staging)
            except IncompatibleCheckpointError as error:
                place = set_aside(self.folder, path.stem, error.folder_name)
                warnings.append(f"{error.message} {path.stem} was set aside, unchanged, in {place}.")
            except CheckpointError as error:
                place = set_aside(self.folder, path.stem, "damaged", clear_first=damaged == 0)
                damaged += 1
                warnings.append(f"Checkpoint {path.stem} is damaged and was moved to {place}: {error.message}")
            else:
                if warnings:
                    warnings.append(f"Training resumes from {path.stem}.")
                return Restoration(loaded, tuple(warnings))
        return Restoration(None, tuple(warnings))

    def verify(self, generation: CheckpointGeneration) -> CheckpointMeta:
        """Read a generation as a restart would and compare its digest. Raises CheckpointError. Changes nothing."""
        return self.open(Path(generation.path)).meta

    def open(self, path: Path) -> LoadedCheckpoint:
        """Read the generation of one JSON file into fresh memory, whatever its model. Raises CheckpointError."""
        from neuroshard.state.staging_buffers import StagingBuffers
        from neuroshard.state.tensor_file import read_layout, read_tensor_file

        manifest = self.read_manifest(path)
        tensors = path.with_name(manifest.tensors.file)
        try:
            with tensors.open("rb") as file:
                layout, _ = read_layout(file, tensors.stat().st_size)
        except OSError as error:
            raise unreadable(tensors, error) from error
        # Each tensor has its own memory. `read_layout` ensures that together they are not larger than the file.
        buffers = StagingBuffers(layout, by_reference=layout.specs.keys())
        read_tensor_file(tensors, layout, manifest.tensors.sha256, buffers.destination)
        return LoadedCheckpoint(manifest.meta, buffers.tensors(), path)

    def read_manifest(self, path: Path) -> CheckpointManifest:
        """Read the JSON half and check it against its name. Raises CheckpointError."""
        try:
            with path.open("rb") as file:
                manifest = decode_manifest(file.read(MAX_META_BYTES + 1))
        except OSError as error:
            raise unreadable(path, error) from error
        named = _TENSORS_NAME.fullmatch(manifest.tensors.file)
        if named is None or int(named[1]) != manifest.meta.step or path.stem != f"step-{manifest.meta.step}":
            raise CheckpointError(f"{path.name} does not belong to step {manifest.meta.step}.")
        return manifest

    def _entry(self, path: Path) -> _Entry:
        """Parse a JSON file again only after it changed, because each may contain a curve of 1,000 points."""
        try:
            state = path.stat()
        except OSError as error:
            raise unreadable(path, error) from error
        key = (state.st_mtime_ns, state.st_size)
        known = self._known.get(path.name)
        if known is None or known[0] != key:
            manifest = self.read_manifest(path)
            known = (key, _Entry(_generation(path, manifest), manifest.tensors.file))
            self._known[path.name] = known
        return known[1]

    def _load(self, path: Path, expected: Expectation, staging: StagingBuffers) -> LoadedCheckpoint:
        from neuroshard.state.tensor_file import read_residual, read_tensor_file

        manifest = self.read_manifest(path)
        meta = manifest.meta
        found = Expectation(meta.wallet_id, meta.run_id, meta.architecture, meta.layers)
        if found != expected:
            raise IncompatibleCheckpointError(_difference(found, expected), _tag(found))
        tensors = path.with_name(manifest.tensors.file)
        read_tensor_file(tensors, staging.layout, manifest.tensors.sha256, staging.destination)
        return LoadedCheckpoint(meta, staging.tensors(), path, read_residual(tensors, manifest.tensors.sha256))

    def _write_files(
        self,
        meta: CheckpointMeta,
        staging: StagingBuffers,
        cancelled: Callable[[], bool] | None,
        residual: Tensor | None,
    ) -> CheckpointGeneration:
        from neuroshard.state.tensor_file import write_residual, write_tensor_file

        final = self._free_tensor_name(meta.step)
        temporary = self.folder / f"{TEMPORARY_PREFIX}{final.name}-{secrets.token_hex(4)}"
        try:
            with temporary.open("xb") as file:
                digest = write_tensor_file(file, staging.layout, staging.chunks(), cancelled)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(final)
            if residual is not None:
                write_residual(residual, final, digest)
            return self._commit(meta, TensorFile(final.name, staging.layout.file_bytes, digest))
        except BaseException:
            self._remove_leftovers()  # the temporary file, and a tensor file without a JSON file
            raise

    def _commit(self, meta: CheckpointMeta, tensors: TensorFile) -> CheckpointGeneration:
        """Write the JSON for a tensor file that is already in place; this creates the generation."""
        sync_folder(self.folder)
        path, manifest = self.folder / f"step-{meta.step}.json", CheckpointManifest(meta, tensors)
        write_atomically(path, encode_manifest(manifest))
        return _generation(path, manifest)

    def _free_tensor_name(self, step: int) -> Path:
        """Return an unused name: a step saved twice gets a second file, the first stays until the JSON is replaced."""
        path, number = self.folder / f"step-{step}.safetensors", 1
        while path.exists():
            number += 1
            path = self.folder / f"step-{step}-{number}.safetensors"
        return path

    def _ensure_room(self, new_bytes: int) -> None:
        for generation in generations_to_delete_for(new_bytes, self.folder, self.generations(), self._limits):
            self._delete(generation)

    def _prune(self) -> None:
        generations = self.generations()
        last_outer = max((item.outer_step for item in generations), default=0)
        at_last_outer = [item for item in generations if item.outer_step == last_outer > 0]
        for generation in superfluous(generations, at_last_outer[-1] if at_last_outer else None):
            try:
                self._delete(generation)
            except (OSError, StorageError) as error:  # the new generation is already complete
                _LOG.warning("The old checkpoint %s cannot be deleted: %s", generation.path, error)
        self._remove_leftovers()

    def _delete(self, generation: CheckpointGeneration) -> None:
        path = Path(generation.path)
        tensors = path.with_name(self._entry(path).tensors)
        path.unlink(missing_ok=True)  # first: without it the generation does not exist
        tensors.unlink(missing_ok=True)
        tensors.with_suffix(_RESIDUAL_SUFFIX).unlink(missing_ok=True)
        self._known.pop(path.name, None)

    def _remove_leftovers(self) -> None:
        """Remove files that a kill left: temporary files, and tensor files and residuals that no JSON names."""
        named: set[str] = set()
        doubtful: set[str] = set()
        for path in self._manifests():
            try:
                named.add(self._entry(path).tensors)
            except StorageError:
                doubtful.add(path.stem)  # load_newest will set it aside with its tensors
        for path in self._entries():
            tensors = path.name.replace(_RESIDUAL_SUFFIX, ".safetensors")
            match = _TENSORS_NAME.fullmatch(tensors)
            orphan = match and tensors not in named and f"step-{int(match[1])}" not in doubtful
            if orphan or path.name.startswith(TEMPORARY_PREFIX):
                with contextlib.suppress(OSError):  # the next write tries again
                    path.unlink()

    def _manifests(self) -> list[Path]:
        """JSON files of generations, newest first."""
        found = [path for path in self._entries() if _JSON_NAME.fullmatch(path.name)]
        return sorted(found, key=_step_of, reverse=True)

    def _entries(self) -> list[Path]:
        try:
            return list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.folder} cannot be listed: {error.strerror or error}.") from error


def _step_of(manifest: Path) -> int:
    return int(manifest.stem.removeprefix("step-"))


def _generation(path: Path, manifest: CheckpointManifest) -> CheckpointGeneration:
    meta = manifest.meta
    return CheckpointGeneration(
        step=meta.step,
        outer_step=meta.outer_step,
        time=meta.time,
        loss=meta.loss,
        bytes=manifest.tensors.bytes,
        path=str(path),
    )


def _difference(found: Expectation, expected: Expectation) -> str:
    if found.architecture != expected.architecture:
        return "The checkpoint has another architecture."
    if found.layers != expected.layers:
        return f"The checkpoint holds layers {found.layers.start}..{found.layers.stop}."
    return "The checkpoint belongs to another run or wallet."


def _tag(found: Expectation) -> str:
    shape = found.architecture
    return (
        f"set-aside-width{shape.hidden_size}-depth{shape.layer_count}-vocabulary{shape.vocabulary_size}"
        f"-layers{found.layers.start}to{found.layers.stop}"
    )
