"""The write-ahead log of a member: its votes, its lock, its contribution, and the ends of the last steps.

A member writes a vote before it sends it. Texts are JSON; aggregates are stored next to them as the bytes that were
voted on, named and verified by their digests. The contribution is a line of JSON, then the encoded slices: after a
restart in the middle of a round, it separates the work in the aggregate from the work done since.
"""

from __future__ import annotations

import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from torch import Tensor

from neuroshard.compression import MalformedVectorError
from neuroshard.config.state_file import make_folder, write_atomically
from neuroshard.consensus.effects import Accuse, Complete, VoteRecord
from neuroshard.consensus.message_frames import MAX_ROUND_CLAIM_BYTES, quorum_from, quorum_to_json
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
    """An encoded contribution, as it is stored."""

    step_id: str
    sequences: int  # whose work is in it
    parts: tuple[bytes, ...]


def write_contribution(folder: Path, offer: SavedContribution) -> None:
    """Store the contribution and replace the one before. Raises OSError."""
    fields = {
        "step": offer.step_id,
        "sequences": offer.sequences,
        "slices": [{"bytes": len(part), "digest": digest_of(part).hex()} for part in offer.parts],
    }
    write_atomically(folder / FILE, (json.dumps(fields).encode() + b"\n", *offer.parts))


def read_contribution(folder: Path, step_id: str) -> SavedContribution | None:
    """Read the contribution to this step; None if the stored one is for another.

    Raises OSError, ValueError, DataError.
    """
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
            raise ValueError("its size differs from its header")
        parts = tuple(file.read(count) for count in sizes)
    if any(
        digest_of(part).hex() != hash_field(one["digest"], "digest") for part, one in zip(parts, slices, strict=True)
    ):
        raise ValueError("a slice is damaged")
    return SavedContribution(step_id, whole_field(fields["sequences"], 0, LARGEST_NUMBER, "sequences"), parts)


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
                record = _read_votes(path)
                if record.lock is not None:
                    record = replace(record, aggregate=self._read_aggregate(record.lock))
            except (OSError, ValueError, DataError) as error:
                # a second vote without knowing the first could fork the swarm
                advice = "Remove the folder to take part again as a newcomer: other nodes then send the state."
                raise StorageError(f"The votes in {path} cannot be read: {error}.", advice) from None
            found.append(record)
        return found

    def write(self, record: VoteRecord) -> None:
        fields: JsonValue = {
            "step": record.step_id,
            "view": record.view,
            "prepared": record.prepared,
            "lock": None if record.lock is None else quorum_to_json(record.lock),
            "votes": [] if record.lock is None else _texts(record.lock),
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
        certificate = complete.certificate
        fields: JsonValue = {
            "number": number,
            "certificate": quorum_to_json(certificate),
            "votes": _texts(certificate),
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
        """Certificates of the last steps. Damaged ones are left out: other nodes have them."""
        found = list[Quorum]()
        for path in self._by_age("step-*.json"):
            try:
                fields = exact_object(_read_json(path), {"number", "certificate", "votes"}, "a certificate")
                found.append(quorum_from(fields["certificate"], _claims(fields["votes"])))
            except (OSError, ValueError, DataError) as error:
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
        except (OSError, ValueError, DataError) as error:
            _LOG.warning("The contribution in %s cannot be read: %s", self._folder, error)
            return None

    def _by_age(self, pattern: str) -> Sequence[Path]:
        """Files in the order in which they were written; numbers restart when a node changes to another line."""
        return sorted(self._folder.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path.name))

    def _locked(self) -> set[str]:
        """Digests of the values in stored locks: their aggregates are still needed."""
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


def _read_json(path: Path) -> JsonValue:
    return parse_json(path.read_bytes(), MAX_TEXT_BYTES)


def _read_votes(path: Path) -> VoteRecord:
    """The record without its aggregate. Raises OSError, ValueError, DataError."""
    fields = exact_object(_read_json(path), {"step", "view", "prepared", "lock", "votes"}, "votes")
    prepared, lock = fields["prepared"], fields["lock"]
    return VoteRecord(
        hash_field(fields["step"], "step"),
        whole_field(fields["view"], -1, MAX_VIEW, "view"),
        "" if prepared == "" else hash_field(prepared, "prepared"),
        None if lock is None else quorum_from(lock, _claims(fields["votes"])),
    )


def _texts(quorum: Quorum) -> list[str]:
    """The votes as signed, in base64."""
    return [b64encode(vote.claim).decode() for vote in quorum.votes]


def _claims(value: JsonValue) -> list[bytes]:
    texts = list_field(value, MAX_MEMBERS, "votes")
    return [b64decode(line_field(text, 2 * MAX_ROUND_CLAIM_BYTES, "vote"), validate=True) for text in texts]


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
