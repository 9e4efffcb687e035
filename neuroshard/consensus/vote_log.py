"""The write-ahead log of a member: its votes, its lock, its contribution, and the ends of the last steps.

A member writes a vote before it sends it. Votes and ends are records of one file, `votes.log`, which is only appended
to: counter, length, BLAKE3, content in msgpack. The counter rises; no clock orders or deletes anything. When a record
is on disk, its counter is written to `votes.count`, and only then the vote may leave. So after a crash:

    votes.log ends in     counter in votes.count   meaning
    an intact record      its own                  all is here
    an intact record      a smaller one            the last vote never left; it is kept as if it had
    damaged bytes         the last intact one's    these bytes never left: the next record replaces them
    anything              a larger one             a vote that left is lost: the log is damaged, the node must not vote

The first record names the newest certified height when the log began. So a node whose log was deleted knows that it may
have sent votes above its seating which the new log does not have.

Aggregates are files of their own, as the bytes that were voted on, named and verified by their digests. The
contribution is a record, then the encoded slices: after a restart in the middle of a round, it separates the work in
the aggregate from the work done since.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from struct import Struct as Layout
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct
from torch import Tensor

from neuroshard.compression import MalformedVectorError
from neuroshard.config.state_file import make_folder, sync_folder, write_atomically
from neuroshard.consensus.chain import LogStart
from neuroshard.consensus.committee import Height
from neuroshard.consensus.effects import Accuse, Complete, EncodedContribution, RoundProgress, VoteRecord
from neuroshard.consensus.round_messages import MAX_VIEW, Quorum, Value
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.slices import DIGEST_BYTES, MAX_SLICES, Encoded, digest_of
from neuroshard.consensus.voting import Aggregate
from neuroshard.decoders import msgpack_decoder
from neuroshard.errors import StorageError
from neuroshard.network.blocking import BlockingRunner
from neuroshard.state.transfer_messages import Count
from neuroshard.types import HexDigest

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

KEPT_VOTES = 8  # steps: a node changes between steps from one state when members join and leave
KEPT_STEPS = 5  # whole aggregates: a replica that missed at most this number of rounds can catch up
MOST_KEPT_STEPS = 24  # since the newest checkpoint: with int4, about as many bytes as the checkpoint
KEPT_OFFERS = 4  # exchanges: two tries of a node that waits for two views each
ROUNDS_FOLDER = "rounds"  # next to the stage's checkpoints
LOG_FILE, COUNT_FILE, CONTRIBUTION_FILE = "votes.log", "votes.count", "offer.bin"
SPARE_BYTES = 1 << 20  # of records that are not needed any more, before the log is written again without them
MAX_PROOFS_BYTES = 1 << 20
OLD_LOG = LogStart(-1, -1)  # without a record of its start: an earlier program began it with the node's first vote


class _StoredStart(Struct, frozen=True, tag="start", forbid_unknown_fields=True):
    """The first record of a log: all later votes are in it."""

    epoch: Height
    height: Height


class _StoredVotes(Struct, frozen=True, tag="votes", forbid_unknown_fields=True):
    """The votes in one step. The lock's aggregate is a file of its own."""

    step_id: HexDigest
    view: Annotated[int, Meta(ge=-1, le=MAX_VIEW)]
    prepared: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
    lock: Quorum | None
    is_incomplete: bool


class _StoredEnd(Struct, frozen=True, tag="end", forbid_unknown_fields=True):
    """The end of one step. Its aggregate is a file of its own."""

    number: Count
    kept: Annotated[int, Meta(ge=1)]  # number of ended steps to keep from now on
    certificate: Quorum


class _StoredSlice(Struct, frozen=True, forbid_unknown_fields=True):
    """One slice of a stored contribution."""

    size: Count  # in bytes
    digest: HexDigest


class _StoredContribution(Struct, frozen=True, forbid_unknown_fields=True):
    """The record at the start of a stored contribution; the slices follow."""

    step_id: HexDigest
    sequences: Count
    slices: Annotated[tuple[_StoredSlice, ...], Meta(max_length=MAX_SLICES)]


class _StoredProof(Struct, frozen=True, forbid_unknown_fields=True):
    """One line of `proofs.jsonl`, with the claims as signed, in base64."""

    node: str
    what: str
    claims: tuple[bytes, ...]


_StoredRecord: TypeAlias = _StoredStart | _StoredVotes | _StoredEnd
_LENGTHS = Layout("<QI")  # counter, length of the content
_HEAD_BYTES = _LENGTHS.size + DIGEST_BYTES


def pack_record(counter: int, content: bytes) -> bytes:
    """A record: counter (8 bytes), length (4 bytes), BLAKE3 of both and the content, then the content."""
    lengths = _LENGTHS.pack(counter, len(content))
    return b"".join((lengths, blake3(lengths).update(content).digest(), content))


def intact_records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Counter and content of the records at the start of `data`, up to the first that is damaged or does not rise."""
    last, view = 0, memoryview(data)
    while len(view) >= _HEAD_BYTES:
        counter, size = _LENGTHS.unpack_from(view)
        record = view[: _HEAD_BYTES + size]
        content = bytes(record[_HEAD_BYTES:])
        if counter <= last or len(content) != size or bytes(record) != pack_record(counter, content):
            return
        yield counter, content
        last, view = counter, view[len(record) :]


@dataclass(frozen=True)
class SavedContribution:
    """An encoded contribution, as it is stored."""

    step_id: str
    sequences: int  # whose work is in it
    parts: tuple[Encoded, ...]


class VoteLog(Protocol):
    """The stored memory of one stage's rounds. Its methods block."""

    def start(self) -> LogStart | None:
        """The place where the log began; None before its first record. Raises StorageError as `votes` does."""
        ...

    def begin(self, start: LogStart) -> None:
        """Store the place where the log begins, before its first vote. Raises StorageError."""
        ...

    def votes(self) -> Sequence[VoteRecord]:
        """This node's votes in the last KEPT_VOTES steps that it voted in, the newest last.

        Raises StorageError if a vote that was sent may be missing: the node must not vote then.
        """
        ...

    def write(self, record: VoteRecord) -> None:
        """Store a record; it is on disk when this returns. Raises StorageError."""
        ...

    def end(self, number: int, complete: Complete, kept: int = KEPT_STEPS) -> None:
        """Store the end of a step, and keep only the last `kept` steps. Raises StorageError."""
        ...

    def ended(self) -> Sequence[Quorum]:
        """The certificates of the last steps that have ended, the oldest first. Raises StorageError as `votes` does."""
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

    def offer(self) -> SavedContribution | None:
        """The stored contribution; None if there is none or it is damaged."""
        ...


class InMemoryVoteLog:
    """A vote log for tests and for nodes without a disk. It lasts as long as the process."""

    def __init__(self) -> None:
        self._records: dict[str, VoteRecord] = {}
        self._ended: list[Complete] = []
        self.proofs: list[Accuse] = []
        self._offer: SavedContribution | None = None
        self._start: LogStart | None = None

    def start(self) -> LogStart | None:
        return self._start

    def begin(self, start: LogStart) -> None:
        self._start = start

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

    def offer(self) -> SavedContribution | None:
        return self._offer


@dataclass(frozen=True)
class _Entry:
    """A record of the log that is still needed."""

    counter: int
    size: int  # in bytes
    record: _StoredRecord


class FileVoteLog:
    """The vote log in a folder next to the stage's checkpoints. One thread at a time may use it."""

    def __init__(self, folder: Path, data_dir: Path | None = None, *, spare_bytes: int = SPARE_BYTES) -> None:
        """`data_dir` is the node's folder above it, which a running node must not create again."""
        self._folder = folder
        self._data_dir = data_dir
        self._spare_bytes = spare_bytes
        self._entries: list[_Entry] | None = None  # by counter; None before they are read, and after a failed write
        self._length = 0  # of the intact part of the log, in bytes

    def start(self) -> LogStart | None:
        for record in self._records(_StoredStart):
            return LogStart(record.epoch, record.height)
        return OLD_LOG if self._read() else None

    def begin(self, start: LogStart) -> None:
        try:
            self._append(_StoredStart(start.epoch, start.height))
        except OSError as error:
            raise StorageError(f"The vote log could not be written to {self._folder}: {error}.", "Make room.") from None

    def votes(self) -> Sequence[VoteRecord]:
        found = list[VoteRecord]()
        for record in self._records(_StoredVotes):
            try:
                aggregate = () if record.lock is None else self._read_aggregate(record.lock)
            except (OSError, ValueError) as error:
                raise self._damaged(str(error)) from None
            votes = VoteRecord(record.step_id, record.view, record.prepared, record.lock, aggregate)
            found.append(replace(votes, is_incomplete=record.is_incomplete))
        return found

    def write(self, record: VoteRecord) -> None:
        try:
            if record.lock is not None:
                self._write_aggregate(record.lock, record.aggregate)
            stored = _StoredVotes(record.step_id, record.view, record.prepared, record.lock, record.is_incomplete)
            self._append(stored)
        except OSError as error:
            raise StorageError(f"A vote could not be written to {self._folder}: {error}.", "Make room.") from None

    def end(self, number: int, complete: Complete, kept: int = KEPT_STEPS) -> None:
        try:
            self._write_aggregate(complete.certificate, complete.aggregate)
            self._append(_StoredEnd(number, kept, complete.certificate))
            unused = set(self._folder.glob("aggregate-*.bin"))
            for entry in self._read():
                match entry.record:
                    case _StoredVotes(lock=Quorum() as quorum) | _StoredEnd(certificate=quorum):
                        unused.discard(self._path_of(quorum))
                    case _:
                        pass
            for path in unused:
                path.unlink()
        except OSError as error:
            raise StorageError(
                f"A certificate could not be written to {self._folder}: {error}.", "Make room."
            ) from None

    def ended(self) -> Sequence[Quorum]:
        return [record.certificate for record in self._records(_StoredEnd)]

    def aggregate(self, certificate: Quorum) -> Aggregate | None:
        try:
            return self._read_aggregate(certificate)
        except (OSError, ValueError) as error:
            _LOG.warning("The aggregate in %s cannot be read: %s", self._path_of(certificate), error)
            return None

    def keep_proof(self, accusation: Accuse) -> None:
        path = self._folder / "proofs.jsonl"
        proof = _StoredProof(accusation.node, accusation.what, accusation.proof)
        try:
            make_folder(self._folder, self._data_dir)
            if not path.exists() or path.stat().st_size < MAX_PROOFS_BYTES:
                with path.open("ab") as file:
                    file.write(msgspec.json.encode(proof) + b"\n")
        except OSError as error:
            raise StorageError(f"A proof could not be written to {path}: {error}.", "Make room.") from None

    def keep_offer(self, offer: SavedContribution) -> None:
        slices = tuple(_StoredSlice(len(part), digest_of(part).hex()) for part in offer.parts)
        head = msgspec.msgpack.encode(_StoredContribution(offer.step_id, offer.sequences, slices))
        try:
            make_folder(self._folder, self._data_dir)
            write_atomically(self._folder / CONTRIBUTION_FILE, (pack_record(1, head), *offer.parts))
        except OSError as error:
            raise StorageError(
                f"A contribution could not be written to {self._folder}: {error}.", "Make room."
            ) from None

    def offer(self) -> SavedContribution | None:
        try:
            data = (self._folder / CONTRIBUTION_FILE).read_bytes()
            _, content = next(intact_records(data), (0, b""))
            head: _StoredContribution = _decoded(content, _StoredContribution)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            _LOG.warning("The contribution in %s cannot be read: %s", self._folder, error)
            return None
        position, parts, digests = _HEAD_BYTES + len(content), list[bytes](), list[str]()
        for one in head.slices:
            parts.append(data[position : position + one.size])
            digests.append(digest_of(parts[-1]).hex())
            position += one.size
        if position != len(data) or digests != [one.digest for one in head.slices]:
            _LOG.warning("The contribution in %s is damaged.", self._folder)
            return None
        return SavedContribution(head.step_id, head.sequences, tuple(parts))

    def _records(self, form: type[_T]) -> Sequence[_T]:
        return [entry.record for entry in self._read() if isinstance(entry.record, form)]

    def _read(self) -> list[_Entry]:
        """The needed records, read from disk unless that was done. Raises StorageError if one may be missing."""
        if self._entries is None:
            try:
                data, count = (_content(self._folder / name) for name in (LOG_FILE, COUNT_FILE))
            except OSError as error:
                raise StorageError(f"{error.filename} cannot be read: {error}.", "Check the disk.") from None
            entries, length = list[_Entry](), 0
            for counter, content in intact_records(data):
                try:
                    record: _StoredRecord = _decoded(content, _StoredRecord)
                except ValueError as error:
                    raise self._damaged(f"record {counter} is of another version ({error})") from None
                size = _HEAD_BYTES + len(content)
                entries, length = _needed([*entries, _Entry(counter, size, record)]), length + size
            counts = [counter for counter, _ in intact_records(count)]
            # before the first vote left there is no count, and no second record
            if not counts and (count or len(entries) > 1):
                raise self._damaged(f"{COUNT_FILE} is missing or damaged")
            if counts and (not entries or entries[-1].counter < counts[0]):
                raise self._damaged(f"record {counts[0]}, which was written, cannot be read")
            self._entries, self._length = entries, length
        return self._entries

    def _append(self, record: _StoredRecord) -> None:
        """Write a record; nothing that follows from it may leave before this returns. Raises OSError, StorageError."""
        entries, path = self._read(), self._folder / LOG_FILE
        counter = entries[-1].counter + 1 if entries else 1
        data = pack_record(counter, msgspec.msgpack.encode(record))
        self._entries = None  # a write that fails half-way is read again as it is on disk
        make_folder(self._folder, self._data_dir)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.truncate(self._length)  # what is left of a record that never left
            file.seek(self._length)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not self._length:
            sync_folder(self._folder)  # the file itself is new
        write_atomically(self._folder / COUNT_FILE, pack_record(counter, b""))
        self._entries = _needed([*entries, _Entry(counter, len(data), record)])
        self._length += len(data)
        if self._length > self._spare_bytes + 2 * sum(map(attrgetter("size"), self._entries)):
            self._compact(self._entries)

    def _compact(self, entries: Sequence[_Entry]) -> None:
        """Write the log again, with the needed records under their old counters."""
        records = [pack_record(entry.counter, msgspec.msgpack.encode(entry.record)) for entry in entries]
        try:
            write_atomically(self._folder / LOG_FILE, records)
            self._length = sum(map(len, records))
        except OSError as error:
            self._entries = None  # perhaps only the last flush failed
            _LOG.warning("%s cannot be shortened now: %s", self._folder / LOG_FILE, error)

    def _damaged(self, reason: str) -> StorageError:
        # a second vote without knowing the first could fork the swarm
        advice = "Remove the folder: this node then votes again when the other voting nodes have confirmed its new log."
        return StorageError(f"The vote log in {self._folder} is damaged, so this node must not vote: {reason}.", advice)

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


def _content(path: Path) -> bytes:
    """The content of a file; b"" if there is none. Raises OSError."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return b""


def _decoded(content: bytes, form: Any) -> Any:
    try:
        return msgpack_decoder(form).decode(content)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _needed(entries: Sequence[_Entry]) -> list[_Entry]:
    """The log's start, the newest votes in each of the last KEPT_VOTES steps, and the last ended steps, by counter."""
    start, votes, ends, kept = list[_Entry](), dict[str, _Entry](), dict[str, _Entry](), KEPT_STEPS
    for entry in entries:
        match entry.record:
            case _StoredVotes(step_id=step_id):
                votes.pop(step_id, None)
                votes[step_id] = entry
            case _StoredEnd(kept=kept, certificate=certificate):
                ends.pop(certificate.value.digest, None)
                ends[certificate.value.digest] = entry
            case _StoredStart():
                start = [entry]
    needed = [*start, *list(votes.values())[-KEPT_VOTES:], *list(ends.values())[-kept:]]
    return sorted(needed, key=attrgetter("counter"))


@dataclass(frozen=True)
class RecoveredContribution:
    """A contribution sent before a restart or in an earlier try, and the vector (k,) that the others decoded from it.

    The codec's error is not separated from the work done since: both go into the next contribution.
    """

    offer: SavedContribution
    contribution: Tensor


class ContributionRecovery:
    """Stores a stage's contribution during a round, and those of tries that this node has abandoned.

    Without it, the work since the contribution would count as part of it, and would be lost.
    """

    def __init__(self, book: VoteLog, offload: BlockingRunner) -> None:
        self.offered: dict[str | None, EncodedContribution] = {}  # to the newest exchanges of this step, by round id
        self._book = book
        self._offload = offload
        self._stored_for: str | None = None  # id of the step whose contribution is stored; None until it is read

    def note(self, progress: RoundProgress) -> None:
        """Keep the contribution to an exchange: the others may still end the step with it."""
        if progress.own is not None:
            self.offered[progress.round_id] = progress.own
            for oldest in list(self.offered)[:-KEPT_OFFERS]:
                del self.offered[oldest]

    async def judged(
        self, value: Value, present: EncodedContribution | None, work: RoundWork
    ) -> RecoveredContribution | None:
        """The contribution that this value judges; None if it is the present one, or cannot be read any more."""
        offered = self.offered.get(value.round_id, present)
        if offered is None:
            return await self.sent(value.step_id, work)
        if offered is present:
            return None
        offer = SavedContribution(value.step_id, offered.sequences, offered.parts)
        return RecoveredContribution(offer, await self._offload(partial(work.decoded, offer.parts, work.codec)))

    async def keep(self, offer: SavedContribution) -> None:
        """Store the contribution sent now. The round continues even if that fails."""
        try:
            await self._offload(partial(self._book.keep_offer, offer))
            self._stored_for = offer.step_id
        except StorageError as error:
            _LOG.warning("%s The round continues.", error)

    async def sent(self, step_id: str, work: RoundWork) -> RecoveredContribution | None:
        """The contribution sent to a step; None if there was none or it cannot be read."""
        if self._stored_for not in {None, step_id}:
            return None
        offer = await self._offload(self._book.offer)
        self._stored_for = "" if offer is None else offer.step_id
        if offer is None or offer.step_id != step_id or len(offer.parts) != work.plan.count:
            return None
        try:
            return RecoveredContribution(offer, await self._offload(partial(work.decoded, offer.parts, work.codec)))
        except MalformedVectorError as error:
            _LOG.warning("The contribution that was sent before the restart cannot be read: %s", error)
            return None
