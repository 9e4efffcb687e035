"""The write-ahead log of a member: its votes, its lock, its contribution, and the ends of the last steps.

A member writes a vote before it sends it. Texts are JSON; aggregates are stored next to them as the bytes that were
voted on, named and verified by their digests. The contribution is a line of JSON, then the encoded slices: after a
restart in the middle of a round, it separates the work in the aggregate from the work done since.
"""

from __future__ import annotations

import json
import logging
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct
from torch import Tensor

from neuroshard.compression import MalformedVectorError
from neuroshard.config.state_file import make_folder, write_atomically
from neuroshard.consensus.effects import Accuse, Complete, VoteRecord
from neuroshard.consensus.round_messages import MAX_VIEW, Quorum
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.slices import MAX_SLICES, digest_of
from neuroshard.consensus.voting import Aggregate
from neuroshard.decoders import json_decoder
from neuroshard.errors import StorageError
from neuroshard.network.blocking import BlockingRunner
from neuroshard.state.transfer_messages import Count
from neuroshard.types import HexDigest

FILE = "offer.bin"
_MAX_HEAD_BYTES = 16 * 1024
_T = TypeVar("_T")


class _StoredSlice(Struct, frozen=True, forbid_unknown_fields=True):
    """One slice of a stored contribution."""

    bytes: Count
    digest: HexDigest


class _ContributionHead(Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a stored contribution; the slices follow."""

    step: HexDigest
    sequences: Count
    slices: Annotated[tuple[_StoredSlice, ...], Meta(max_length=MAX_SLICES)]


class _StoredVotes(Struct, frozen=True, forbid_unknown_fields=True):
    """The votes in one step."""

    step: HexDigest
    view: Annotated[int, Meta(ge=-1, le=MAX_VIEW)]
    prepared: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
    lock: Quorum | None  # its aggregate is a file of its own


class _StoredEnd(Struct, frozen=True, forbid_unknown_fields=True):
    """The end of one step."""

    number: Count
    certificate: Quorum


@dataclass(frozen=True)
class SavedContribution:
    """An encoded contribution, as it is stored."""

    step_id: str
    sequences: int  # whose work is in it
    parts: tuple[bytes, ...]


def write_contribution(folder: Path, offer: SavedContribution) -> None:
    """Store the contribution and replace the one before. Raises OSError."""
    slices = tuple(_StoredSlice(len(part), digest_of(part).hex()) for part in offer.parts)
    head = _ContributionHead(offer.step_id, offer.sequences, slices)
    write_atomically(folder / FILE, (msgspec.json.encode(head) + b"\n", *offer.parts))


def read_contribution(folder: Path, step_id: str) -> SavedContribution | None:
    """Read the contribution to this step; None if the stored one is for another.

    Raises OSError, ValueError.
    """
    path = folder / FILE
    if not path.exists():
        return None
    with path.open("rb") as file:
        head = _decoded(file.readline(_MAX_HEAD_BYTES), _ContributionHead)
        if head.step != step_id:
            return None
        if file.tell() + sum(one.bytes for one in head.slices) != path.stat().st_size:
            raise ValueError("its size differs from its header")
        parts = tuple(file.read(one.bytes) for one in head.slices)
    if any(digest_of(part).hex() != one.digest for part, one in zip(parts, head.slices, strict=True)):
        raise ValueError("a slice is damaged")
    return SavedContribution(step_id, head.sequences, parts)


_LOG = logging.getLogger(__name__)

KEPT_VOTES = 8  # steps: a node changes between steps from one state when members join and leave
KEPT_STEPS = 5  # whole aggregates: a replica that missed at most this number of rounds can catch up
ROUNDS_FOLDER = "rounds"  # next to the stage's checkpoints
MAX_TEXT_BYTES = 16 << 20
MAX_PROOFS_BYTES = 1 << 20


class VoteLog(Protocol):
    """The stored memory of one stage's rounds. Its methods block."""

    def votes(self) -> Sequence[VoteRecord]:
        """This node's votes in the last KEPT_VOTES steps that it voted in, the newest last. Raises StorageError."""
        ...

    def write(self, record: VoteRecord) -> None:
        """Store a record; it is on disk when this returns. Raises StorageError."""
        ...

    def end(self, number: int, complete: Complete, kept: int = KEPT_STEPS) -> None:
        """Store the end of a step, and keep only the last `kept` steps. Raises StorageError."""
        ...

    def ended(self) -> Sequence[Quorum]:
        """The certificates of the last steps that have ended, the oldest first."""
        ...

    def aggregate(self, certificate: Quorum) -> Aggregate | None:
        """The aggregate of one of those steps; None if it is damaged, since other nodes have it too."""
        ...

    def keep_proof(self, accusation: Accuse) -> None:
        """Store the proof that a member broke the protocol. Raises StorageError."""
        ...

    def keep_offer(self, offer: SavedContribution) -> None:
        """Store the contribution to a round that may end after a restart, replacing the one before.

        Raises StorageError.
        """
        ...

    def offer(self, step_id: str) -> SavedContribution | None:
        """The stored contribution if it is for this step; otherwise, or if it is damaged, None."""
        ...


class InMemoryVoteLog:
    """A vote log for tests and for nodes without a disk. It lasts as long as the process."""

    def __init__(self) -> None:
        self._records: dict[str, VoteRecord] = {}
        self._ended: list[Complete] = []
        self.proofs: list[Accuse] = []
        self._offer: SavedContribution | None = None

    def votes(self) -> Sequence[VoteRecord]:
        return list(self._records.values())

    def write(self, record: VoteRecord) -> None:
        self._records.pop(record.step_id, None)
        self._records[record.step_id] = record

    def end(self, number: int, complete: Complete, kept: int = KEPT_STEPS) -> None:
        self._ended = [*self._ended, complete][-kept:]

    def ended(self) -> Sequence[Quorum]:
        return [complete.certificate for complete in self._ended]

    def aggregate(self, certificate: Quorum) -> Aggregate | None:
        return next((one.aggregate for one in self._ended if one.certificate == certificate), None)

    def keep_proof(self, accusation: Accuse) -> None:
        self.proofs.append(accusation)

    def keep_offer(self, offer: SavedContribution) -> None:
        self._offer = offer

    def offer(self, step_id: str) -> SavedContribution | None:
        offer = self._offer
        return offer if offer is not None and offer.step_id == step_id else None


class FileVoteLog:
    """The vote log in a folder next to the stage's checkpoints."""

    def __init__(self, folder: Path, data_dir: Path | None = None) -> None:
        """`data_dir` is the node's folder above it, which a running node must not create again."""
        self._folder = folder
        self._data_dir = data_dir

    def votes(self) -> Sequence[VoteRecord]:
        found = list[VoteRecord]()
        for path in self._by_age("votes-*.json"):
            try:
                stored = _read_json(path, _StoredVotes)
                aggregate = () if stored.lock is None else self._read_aggregate(stored.lock)
            except (OSError, ValueError) as error:
                # a second vote without knowing the first could fork the swarm
                advice = "Remove the folder to take part again as a newcomer: other nodes then send the state."
                raise StorageError(f"The votes in {path} cannot be read: {error}.", advice) from None
            found.append(VoteRecord(stored.step, stored.view, stored.prepared, stored.lock, aggregate))
        return found

    def write(self, record: VoteRecord) -> None:
        stored = _StoredVotes(record.step_id, record.view, record.prepared, record.lock)
        try:
            if record.lock is not None:
                self._write_aggregate(record.lock, record.aggregate)
            self._write_json(f"votes-{record.step_id}.json", stored)
            for old in self._by_age("votes-*.json")[:-KEPT_VOTES]:
                old.unlink()
        except OSError as error:
            raise StorageError(f"A vote could not be written to {self._folder}: {error}.", "Make room.") from None

    def end(self, number: int, complete: Complete, kept: int = KEPT_STEPS) -> None:
        certificate = complete.certificate
        try:
            self._write_aggregate(certificate, complete.aggregate)
            self._write_json(f"step-{number:010d}.json", _StoredEnd(number, certificate))
            for old in self._by_age("step-*.json")[:-kept]:
                old.unlink()
            wanted = {quorum.value.digest for quorum in self.ended()} | self._locked()
            for path in self._folder.glob("aggregate-*.bin"):
                if path.stem.removeprefix("aggregate-") not in wanted:
                    path.unlink()
        except OSError as error:
            raise StorageError(
                f"A certificate could not be written to {self._folder}: {error}.", "Make room."
            ) from None

    def ended(self) -> Sequence[Quorum]:
        """Certificates of the last steps. Damaged ones are left out: other nodes have them."""
        found = list[Quorum]()
        for path in self._by_age("step-*.json"):
            try:
                found.append(_read_json(path, _StoredEnd).certificate)
            except (OSError, ValueError) as error:
                _LOG.warning("The certificate in %s cannot be read: %s", path, error)
        return found

    def aggregate(self, certificate: Quorum) -> Aggregate | None:
        try:
            return self._read_aggregate(certificate)
        except (OSError, ValueError) as error:
            _LOG.warning("The aggregate in %s cannot be read: %s", self._path_of(certificate), error)
            return None

    def keep_proof(self, accusation: Accuse) -> None:
        """Append one JSON object per line, with the claims as signed, in base64."""
        path = self._folder / "proofs.jsonl"
        fields = {
            "node": accusation.node,
            "what": accusation.what,
            "claims": [b64encode(claim).decode() for claim in accusation.proof],
        }
        try:
            make_folder(self._folder, self._data_dir)
            if not path.exists() or path.stat().st_size < MAX_PROOFS_BYTES:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(fields) + "\n")
        except OSError as error:
            raise StorageError(f"A proof could not be written to {path}: {error}.", "Make room.") from None

    def keep_offer(self, offer: SavedContribution) -> None:
        try:
            make_folder(self._folder, self._data_dir)
            write_contribution(self._folder, offer)
        except OSError as error:
            raise StorageError(
                f"A contribution could not be written to {self._folder}: {error}.", "Make room."
            ) from None

    def offer(self, step_id: str) -> SavedContribution | None:
        try:
            return read_contribution(self._folder, step_id)
        except (OSError, ValueError) as error:
            _LOG.warning("The contribution in %s cannot be read: %s", self._folder, error)
            return None

    def _by_age(self, pattern: str) -> Sequence[Path]:
        """Files in the order in which they were written; numbers restart when a node changes to another line."""
        return sorted(self._folder.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path.name))

    def _locked(self) -> set[str]:
        """Digests of the values in stored locks: their aggregates are still needed."""
        locks = [_read_json(path, _StoredVotes).lock for path in self._by_age("votes-*.json")]
        return {lock.value.digest for lock in locks if lock is not None}

    def _write_json(self, name: str, stored: Struct) -> None:
        make_folder(self._folder, self._data_dir)
        write_atomically(self._folder / name, msgspec.json.encode(stored))

    def _write_aggregate(self, quorum: Quorum, aggregate: Aggregate) -> None:
        make_folder(self._folder, self._data_dir)
        path = self._path_of(quorum)
        if not path.exists():
            sizes = b"".join(len(part).to_bytes(8, "big") for part in aggregate)
            write_atomically(path, (sizes, *aggregate))

    def _read_aggregate(self, quorum: Quorum) -> Aggregate:
        """Raises OSError, or ValueError if the file does not match the digests of the vote."""
        data = memoryview(self._path_of(quorum).read_bytes())
        digests, parts = quorum.value.aggregate, list[bytes]()
        position = 8 * len(digests)
        for index, digest in enumerate(digests):
            size = int.from_bytes(data[8 * index : 8 * index + 8], "big")
            part = bytes(data[position : position + size])
            if digest_of(part).hex() != digest:
                raise ValueError("the aggregate is damaged")
            parts.append(part)
            position += size
        return tuple(parts)

    def _path_of(self, quorum: Quorum) -> Path:
        return self._folder / f"aggregate-{quorum.value.digest}.bin"


def _read_json(path: Path, form: type[_T]) -> _T:
    """Raises OSError, ValueError."""
    with path.open("rb") as file:
        return _decoded(file.read(MAX_TEXT_BYTES), form)


def _decoded(data: bytes, form: type[_T]) -> _T:
    try:
        return json_decoder(form).decode(data)
    except RecursionError as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True)
class RecoveredContribution:
    """A contribution sent before a restart, and the vector (k,) that the others decoded from it.

    The codec's error is not separated from the work done since: both go into the next contribution.
    """

    offer: SavedContribution
    contribution: Tensor


class ContributionRecovery:
    """Stores a stage's contribution during a round.

    Without it, the work since the contribution would count as part of it, and a restart would lose that work.
    """

    def __init__(self, book: VoteLog, offload: BlockingRunner) -> None:
        self._book = book
        self._offload = offload

    async def keep(self, offer: SavedContribution) -> None:
        """Store the contribution sent now. The round continues even if that fails."""
        try:
            await self._offload(lambda: self._book.keep_offer(offer))
        except StorageError as error:
            _LOG.warning("%s The round continues.", error)

    async def sent(self, step_id: str, work: RoundWork) -> RecoveredContribution | None:
        """The contribution sent to a step; None if there was none or it cannot be read."""
        offer = await self._offload(lambda: self._book.offer(step_id))
        if offer is None or len(offer.parts) != work.plan.count:
            return None
        try:
            return RecoveredContribution(offer, await self._offload(lambda: work.decoded_parts(offer.parts)))
        except MalformedVectorError as error:
            _LOG.warning("The contribution that was sent before the restart cannot be read: %s", error)
            return None
