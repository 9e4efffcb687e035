"""The write-ahead log of a member: its votes, its lock, its contribution, and the ends of the last steps.

A member writes a vote before it sends it. Texts are JSON; aggregates are stored next to them as the bytes that were
voted on, found and checked by their digests. The contribution is a line of JSON, then the encoded slices: after a
restart in the middle of a round, it separates the work in the aggregate from the work done since."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

from torch import Tensor

from neuroshard.compression import MalformedVectorError
from neuroshard.config.state_file import make_folder, write_atomically
from neuroshard.consensus.effects import Accuse, Complete, VoteRecord
from neuroshard.consensus.message_frames import MAX_CLAIM_BYTES, quorum_from, quorum_to_json
from neuroshard.consensus.roster import MAX_SLICES, digest_of
from neuroshard.consensus.round_messages import MAX_MEMBERS, MAX_VIEW, Quorum
from neuroshard.consensus.round_work import RoundWork
from neuroshard.consensus.voting import Aggregate
from neuroshard.errors import DataError, StorageError
from neuroshard.identity import parse_json
from neuroshard.identity.strict_json import exact_object, hash_field, line_field, list_field, whole_field
from neuroshard.network.blocking import BlockingRunner
from neuroshard.state.transfer_messages import LARGEST_NUMBER
from neuroshard.types import JsonValue

FILE = "offer.bin"
_MAX_HEAD_BYTES = 16 * 1024


@dataclass(frozen=True)
class SavedContribution:
    """A contribution, encoded."""

    step_id: str
    sequences: int  # whose work is in it
    parts: tuple[bytes, ...]


def write_offer(folder: Path, offer: SavedContribution) -> None:
    """Put the offer in the place of the one before. Raises OSError."""
    fields = {
        "step": offer.step_id,
        "sequences": offer.sequences,
        "slices": [{"bytes": len(part), "digest": digest_of(part).hex()} for part in offer.parts],
    }
    write_atomically(folder / FILE, (json.dumps(fields).encode() + b"\n", *offer.parts))


def read_offer(folder: Path, step_id: str) -> SavedContribution | None:
    """The offer to this step; None when the newest one was to another. Raises OSError, ValueError, DataError."""
    path = folder / FILE
    if not path.exists():
        return None
    with path.open("rb") as file:
        head = parse_json(file.readline(_MAX_HEAD_BYTES), _MAX_HEAD_BYTES)
        fields = exact_object(head, {"step", "sequences", "slices"}, "the offer")
        if fields["step"] != step_id:
            return None
        slices = [
            exact_object(one, {"bytes", "digest"}, "a slice")
            for one in list_field(fields["slices"], MAX_SLICES, "slices")
        ]
        size = path.stat().st_size
        sizes = [whole_field(one["bytes"], 0, size, "bytes") for one in slices]
        if file.tell() + sum(sizes) != size:
            raise ValueError("it has another size than it says")
        parts = tuple(file.read(count) for count in sizes)
    if any(
        digest_of(part).hex() != hash_field(one["digest"], "digest") for part, one in zip(parts, slices, strict=True)
    ):
        raise ValueError("a slice is damaged")
    return SavedContribution(step_id, whole_field(fields["sequences"], 0, LARGEST_NUMBER, "sequences"), parts)


_LOG = logging.getLogger(__name__)

KEPT_VOTES = 8  # steps: a node leaves one for another from the same state when members come and go
KEPT_STEPS = 5  # whole aggregates that are kept: who missed no more than those catches up with them (DESIGN 4.6)
ROUNDS_FOLDER = "rounds"  # beside the stage's checkpoints
MAX_TEXT_BYTES = 16 << 20
MAX_PROOFS_BYTES = 1 << 20


class VoteLog(Protocol):
    """The memory of one stage's rounds. Its methods block."""

    def votes(self) -> Sequence[VoteRecord]:
        """The votes in the last KEPT_VOTES steps that this node voted in, the newest last. Raises StorageError."""
        ...

    def write(self, record: VoteRecord) -> None:
        """Write down a record; it is on the disk when this returns. Raises StorageError."""
        ...

    def end(self, number: int, complete: Complete, kept: int = KEPT_STEPS) -> None:
        """Write down how a step has ended, and keep no more than the last `kept` steps. Raises StorageError."""
        ...

    def ended(self) -> Sequence[Quorum]:
        """The certificates of the last steps that have ended, the oldest first."""
        ...

    def aggregate(self, certificate: Quorum) -> Aggregate | None:
        """The aggregate of one of those steps; None when it is damaged: others have it, too."""
        ...

    def keep_proof(self, accusation: Accuse) -> None:
        """Keep what shows that a member broke its word. Raises StorageError."""
        ...

    def keep_offer(self, offer: SavedContribution) -> None:
        """Keep what a round may end with after a restart, instead of the one before. Raises StorageError."""
        ...

    def offer(self, step_id: str) -> SavedContribution | None:
        """The offer that is kept, if it was made in this step; None also when it is damaged."""
        ...


class InMemoryVoteLog:
    """The book of tests, and of whoever has no disk: it lasts as long as the process."""

    def __init__(self) -> None:
        self._records: dict[str, VoteRecord] = {}
        self._ended: list[Complete] = []
        self.proofs: list[Accuse] = []
        self._offer: SavedContribution | None = None

    def votes(self) -> Sequence[VoteRecord]:
        """See VoteLog."""
        return list(self._records.values())

    def write(self, record: VoteRecord) -> None:
        """See VoteLog."""
        self._records.pop(record.step_id, None)
        self._records[record.step_id] = record

    def end(self, number: int, complete: Complete, kept: int = KEPT_STEPS) -> None:
        """See VoteLog."""
        self._ended = [*self._ended, complete][-kept:]

    def ended(self) -> Sequence[Quorum]:
        """See VoteLog."""
        return [complete.certificate for complete in self._ended]

    def aggregate(self, certificate: Quorum) -> Aggregate | None:
        """See VoteLog."""
        return next((one.aggregate for one in self._ended if one.certificate == certificate), None)

    def keep_proof(self, accusation: Accuse) -> None:
        """See VoteLog."""
        self.proofs.append(accusation)

    def keep_offer(self, offer: SavedContribution) -> None:
        """See VoteLog."""
        self._offer = offer

    def offer(self, step_id: str) -> SavedContribution | None:
        """See VoteLog."""
        offer = self._offer
        return offer if offer is not None and offer.step_id == step_id else None


class FileVoteLog:
    """The book in a folder of its own beside the stage's checkpoints."""

    def __init__(self, folder: Path, data_dir: Path | None = None) -> None:
        """`data_dir` is the node's folder above it, which a running node does not make anew."""
        self._folder = folder
        self._data_dir = data_dir

    def votes(self) -> Sequence[VoteRecord]:
        """See VoteLog."""
        found = list[VoteRecord]()
        for path in self._by_age("votes-*.json"):
            try:
                record = _read_votes(path)
                if record.lock is not None:
                    record = replace(record, aggregate=self._read_aggregate(record.lock))
            except (OSError, ValueError, DataError) as error:
                # to vote again without knowing the own votes could split the swarm
                advice = "Remove the folder to take part again as a newcomer: the state is then fetched from others."
                raise StorageError(f"The votes in {path} cannot be read: {error}.", advice) from None
            found.append(record)
        return found

    def write(self, record: VoteRecord) -> None:
        """See VoteLog."""
        fields: JsonValue = {
            "step": record.step_id,
            "view": record.view,
            "prepared": record.prepared,
            "lock": None if record.lock is None else quorum_to_json(record.lock),
            "votes": [] if record.lock is None else [vote.claim.decode() for vote in record.lock.votes],
        }
        try:
            if record.lock is not None:
                self._write_aggregate(record.lock, record.aggregate)
            self._write_json(f"votes-{record.step_id}.json", fields)
            for old in self._by_age("votes-*.json")[:-KEPT_VOTES]:
                old.unlink()
        except OSError as error:
            raise StorageError(f"A vote could not be written to {self._folder}: {error}.", "Make room.") from None

    def end(self, number: int, complete: Complete, kept: int = KEPT_STEPS) -> None:
        """See VoteLog."""
        certificate = complete.certificate
        fields: JsonValue = {
            "number": number,
            "certificate": quorum_to_json(certificate),
            "votes": [vote.claim.decode() for vote in certificate.votes],
        }
        try:
            self._write_aggregate(certificate, complete.aggregate)
            self._write_json(f"step-{number:010d}.json", fields)
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
        """See VoteLog. What is damaged is left out: it can be fetched from others."""
        found = list[Quorum]()
        for path in self._by_age("step-*.json"):
            try:
                fields = exact_object(_read_json(path), {"number", "certificate", "votes"}, "a certificate")
                found.append(quorum_from(fields["certificate"], _claims(fields["votes"])))
            except (OSError, ValueError, DataError) as error:
                _LOG.warning("The certificate in %s cannot be read: %s", path, error)
        return found

    def aggregate(self, certificate: Quorum) -> Aggregate | None:
        """See VoteLog."""
        try:
            return self._read_aggregate(certificate)
        except (OSError, ValueError) as error:
            _LOG.warning("The aggregate in %s cannot be read: %s", self._path_of(certificate), error)
            return None

    def keep_proof(self, accusation: Accuse) -> None:
        """See VoteLog. One JSON object a line, the claims as their node signed them."""
        path = self._folder / "proofs.jsonl"
        fields = {
            "node": accusation.node,
            "what": accusation.what,
            "claims": [claim.decode() for claim in accusation.proof],
        }
        try:
            make_folder(self._folder, self._data_dir)
            if not path.exists() or path.stat().st_size < MAX_PROOFS_BYTES:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(fields) + "\n")
        except OSError as error:
            raise StorageError(f"A proof could not be written to {path}: {error}.", "Make room.") from None

    def keep_offer(self, offer: SavedContribution) -> None:
        """See VoteLog."""
        try:
            make_folder(self._folder, self._data_dir)
            write_offer(self._folder, offer)
        except OSError as error:
            raise StorageError(
                f"A contribution could not be written to {self._folder}: {error}.", "Make room."
            ) from None

    def offer(self, step_id: str) -> SavedContribution | None:
        """See VoteLog."""
        try:
            return read_offer(self._folder, step_id)
        except (OSError, ValueError, DataError) as error:
            _LOG.warning("The contribution in %s cannot be read: %s", self._folder, error)
            return None

    def _by_age(self, pattern: str) -> Sequence[Path]:
        """Files in the order in which they were written; numbers begin again when a node changes to another line."""
        return sorted(self._folder.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path.name))

    def _locked(self) -> set[str]:
        """Digests of the values that kept votes are locked on: their aggregates are still needed."""
        locks = [_read_votes(path).lock for path in self._by_age("votes-*.json")]
        return {lock.value.digest for lock in locks if lock is not None}

    def _write_json(self, name: str, fields: JsonValue) -> None:
        make_folder(self._folder, self._data_dir)
        write_atomically(self._folder / name, json.dumps(fields).encode())

    def _write_aggregate(self, quorum: Quorum, aggregate: Aggregate) -> None:
        make_folder(self._folder, self._data_dir)
        path = self._path_of(quorum)
        if not path.exists():
            sizes = b"".join(len(part).to_bytes(8, "big") for part in aggregate)
            write_atomically(path, (sizes, *aggregate))

    def _read_aggregate(self, quorum: Quorum) -> Aggregate:
        """Raises OSError, ValueError when the file is not what was voted on."""
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


def _read_json(path: Path) -> JsonValue:
    return parse_json(path.read_bytes(), MAX_TEXT_BYTES)


def _read_votes(path: Path) -> VoteRecord:
    """The record without the aggregate. Raises OSError, ValueError, DataError."""
    fields = exact_object(_read_json(path), {"step", "view", "prepared", "lock", "votes"}, "votes")
    prepared, lock = fields["prepared"], fields["lock"]
    return VoteRecord(
        hash_field(fields["step"], "step"),
        whole_field(fields["view"], -1, MAX_VIEW, "view"),
        "" if prepared == "" else hash_field(prepared, "prepared"),
        None if lock is None else quorum_from(lock, _claims(fields["votes"])),
    )


def _claims(value: JsonValue) -> list[bytes]:
    texts = list_field(value, MAX_MEMBERS, "votes")
    return [line_field(cast("str", text), MAX_CLAIM_BYTES, "vote").encode() for text in texts]


@dataclass(frozen=True)
class RecoveredContribution:
    """What was sent, and the vector (k,) that the others read from it.

    What the codec lost of it is not told from what was trained since: both are for the next contribution.
    """

    offer: SavedContribution
    contribution: Tensor


class ContributionRecovery:
    """Of one stage. Without it the work since a contribution is taken for a part of it, and lost with a restart."""

    def __init__(self, book: VoteLog, offload: BlockingRunner) -> None:
        self._book = book
        self._offload = offload

    async def keep(self, offer: SavedContribution) -> None:
        """Write down what is sent now; the round goes on also when that is not possible."""
        try:
            await self._offload(lambda: self._book.keep_offer(offer))
        except StorageError as error:
            _LOG.warning("%s The round goes on.", error)

    async def sent(self, step_id: str, work: RoundWork) -> RecoveredContribution | None:
        """What was sent to a step; None when that was nothing, or cannot be read."""
        offer = await self._offload(lambda: self._book.offer(step_id))
        if offer is None or len(offer.parts) != work.plan.count:
            return None
        try:
            return RecoveredContribution(offer, await self._offload(lambda: work.decoded_parts(offer.parts)))
        except MalformedVectorError as error:
            _LOG.warning("What was sent to the round before the restart cannot be read: %s", error)
            return None
