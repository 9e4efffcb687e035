"""The older states of a stage that a node keeps on its disk: what it reports of them, and the archive of one stage.

A checkpoint contains the outer state of its outer step, so a node offers one certified state for each outer step of its
checkpoints. A node that archives also keeps a whole checkpoint at regular outer steps, with the certificate of its
state: the chain that other nodes send contains only the newest values.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import msgspec
from msgspec import Meta, Struct

from neuroshard.config.state_file import make_folder, read_bounded, sync_folder, write_atomically
from neuroshard.decoders import msgpack_decoder
from neuroshard.errors import StorageError
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.state.checkpoint_manifest import CheckpointManifest
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.download import ReplicaClient, ask_replicas
from neuroshard.state.outer_state import line_from_json, outer_root
from neuroshard.state.tensor_file import read_layout
from neuroshard.state.transfer_messages import Count, LyingDonorError, StageName
from neuroshard.status.snapshot import CheckpointGeneration
from neuroshard.types import HexDigest, NodeId, UnixSeconds

ARCHIVE_FOLDER = "archive"  # in the folder of a stage's checkpoints
MOST_STATES = 16  # in one answer
MOST_ARCHIVED = 4  # of these
MAX_CERTIFICATE_BYTES = 1 << 20
CERTIFICATE_FILE = "certificate.msgpack"  # next to a state that nodes may ask for
STATES, STATES_SECONDS = "stage/states", 20.0


@dataclass(frozen=True)
class KeptState:
    """A state on this disk."""

    generation: CheckpointGeneration
    root: str  # of its outer state
    certificate: bytes = b""  # of an archived state, encoded
    certified_at: float = 0.0  # of an archived state: seconds since the epoch


def kept_states(store: CheckpointStore) -> Iterator[KeptState]:
    """Yield the newest checkpoint of each outer step in a store, newest first. Blocks."""
    seen = set[int]()
    for generation, manifest in store.manifests():
        if generation.outer_step in seen or generation.outer_step == 0:
            continue
        with contextlib.suppress(OSError, StorageError):  # deleted meanwhile, or damaged
            yield KeptState(generation, _root_of(generation, manifest))
            seen.add(generation.outer_step)


def _root_of(generation: CheckpointGeneration, manifest: CheckpointManifest) -> str:
    """Root of the outer state in a checkpoint, which is computed unless the checkpoint names it."""
    outer: object = manifest.meta.extra.get("outer")
    noted = cast("Mapping[str, object]", outer).get("state_root") if isinstance(outer, Mapping) else None
    return noted if isinstance(noted, str) and noted else root_of_file(Path(generation.path), manifest)


def root_of_file(document: Path, manifest: CheckpointManifest) -> str:
    """Compute the root of the outer state next to a checkpoint's JSON file. Raises OSError, CheckpointError."""
    tensors = document.with_name(manifest.tensors.file)
    with tensors.open("rb") as file:
        layout, _ = read_layout(file, tensors.stat().st_size)
    line = line_from_json(manifest.meta.extra.get("outer"))
    return outer_root(tensors, layout, manifest.meta.outer_step, line)


# The archive of one stage


class ArchivedState(Struct, frozen=True, forbid_unknown_fields=True):
    """The file next to an archived checkpoint."""

    root: HexDigest
    certified_at: UnixSeconds
    certificate: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)]


@dataclass(frozen=True)
class StageArchive:
    """The checkpoints that a node keeps for ever, each in a folder of its own. Its methods block."""

    folder: Path
    data_dir: Path | None = None

    @classmethod
    def of(cls, store: CheckpointStore) -> StageArchive:
        """The archive next to a stage's checkpoints."""
        return cls(store.folder / ARCHIVE_FOLDER, store.data_dir)

    def newest(self) -> int:
        """The last archived outer step; 0 without one."""
        return max((step for step, _ in self._folders()), default=0)

    def states(self) -> Iterator[KeptState]:
        """Yield the archived states, newest first."""
        for _, folder in sorted(self._folders(), reverse=True):
            with contextlib.suppress(OSError, StorageError, ValueError):
                noted = read_bounded(folder / CERTIFICATE_FILE, 2 * MAX_CERTIFICATE_BYTES)
                generation = next(iter(CheckpointStore(folder).generations()), None)
                if noted is not None and generation is not None:
                    archived = msgpack_decoder(ArchivedState).decode(noted)
                    yield KeptState(generation, archived.root, archived.certificate, archived.certified_at)

    def keep(self, store: CheckpointStore, state: KeptState) -> None:
        """Add a checkpoint of a store. Raises StorageError; an incomplete folder counts as none."""
        document = Path(state.generation.path)
        folder = self.folder / f"{_PREFIX}{state.generation.outer_step}"
        archived = ArchivedState(state.root, state.certified_at, state.certificate)
        try:
            tensors = document.with_name(store.read_manifest(document).tensors.file)
            make_folder(folder, self.data_dir)
            for source in (tensors, document):
                _link(source, folder / source.name)
            sync_folder(folder)
            write_atomically(folder / CERTIFICATE_FILE, msgspec.msgpack.encode(archived))
        except OSError as error:
            raise StorageError(f"{folder} cannot be written: {error.strerror or error}.") from error

    def _folders(self) -> Iterator[tuple[int, Path]]:
        with contextlib.suppress(OSError):
            for path in self.folder.iterdir():
                number = path.name.removeprefix(_PREFIX)
                if path.name.startswith(_PREFIX) and number.isdecimal() and (path / CERTIFICATE_FILE).exists():
                    yield int(number), path


_PREFIX = "outer-step-"


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, which takes no space until the first one is deleted; where none can be, copy it."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


# The messages


class OfferedState(Struct, frozen=True, forbid_unknown_fields=True):
    """A state that the node can send. Only its chunks and a certificate prove it."""

    outer_step: Count
    root: HexDigest
    certificate_bytes: Count = 0  # of its certificate in the answer's tensor; 0: the stage's chain has it


class StatesRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for the states of a stage: those of the present checkpoints, and the newest archived ones up to a limit."""

    stage: StageName
    outer_step: Count | None = None  # of archived states, at most
    certified_at: UnixSeconds | None = None  # of archived states, at most


class StatesAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """The states, the newest first. Their certificates, one after the other, are the frame's tensor."""

    states: Annotated[tuple[OfferedState, ...], Meta(max_length=MOST_STATES)]


STATES_REQUEST = FrameLimits(max_header_bytes=1024, message=StatesRequest)
STATES_ANSWER = FrameLimits(8192, MOST_ARCHIVED * MAX_CERTIFICATE_BYTES, message=StatesAnswer)


def chosen_states(asked: StatesRequest, present: Iterable[KeptState], archived: Iterable[KeptState]) -> list[KeptState]:
    """The states that answer a request."""
    chosen = list[KeptState]()
    for state in archived:
        is_late = asked.outer_step is not None and state.generation.outer_step > asked.outer_step
        if not is_late and (asked.certified_at is None or state.certified_at <= asked.certified_at):
            chosen.append(state)
        if len(chosen) == MOST_ARCHIVED:
            break
    known = {state.root for state in chosen}
    chosen += [state for state in present if state.root not in known][: MOST_STATES - len(chosen)]
    return sorted(chosen, key=lambda state: -state.generation.outer_step)


def states_frame(states: Sequence[KeptState]) -> Frame:
    """Encode the states as the answer's frame."""
    offered = tuple(OfferedState(one.generation.outer_step, one.root, len(one.certificate)) for one in states)
    data = b"".join(state.certificate for state in states)
    part = TensorPart(TensorSpec("certificates", "uint8", (len(data),)), data)
    return Frame(STATES, StatesAnswer(offered), (part,))


def _read_states(answer: Frame) -> list[tuple[OfferedState, bytes]]:
    """The states in an answer, each with its certificate. Raises LyingDonorError."""
    offered, data = answer.read(StatesAnswer).states, b"".join(bytes(part.data) for part in answer.tensors)
    found, start = list[tuple[OfferedState, bytes]](), 0
    for state in offered:
        found.append((state, data[start : start + state.certificate_bytes]))
        start += state.certificate_bytes
    if start != len(data):
        raise LyingDonorError("Its certificates have another length than it says.")
    return found


async def query_states(
    asking: ReplicaClient, request: StatesRequest, peers: Iterable[NodeId]
) -> dict[NodeId, list[tuple[OfferedState, bytes]]]:
    """Ask nodes for their states of a stage; nodes that do not answer are left out."""
    return await ask_replicas(peers, partial(_query, asking, request))


async def _query(asking: ReplicaClient, request: StatesRequest, peer: NodeId) -> list[tuple[OfferedState, bytes]]:
    with asking.blaming(peer):
        return _read_states(await asking.ask(peer, Frame(STATES, request), STATES_ANSWER, STATES_SECONDS))
