"""The state of a population: checkpoints.json, and the ledger that writes shards, tables and manifest in a safe order.

The process may be killed between any two writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np
from msgspec import Meta, Struct

from neuroshard.data.manifest import (
    CHECKPOINTS_NAME,
    MANIFEST_NAME,
    MANIFEST_VERSIONS,
    MAX_MANIFEST_BYTES,
    SHARD_FORMATS,
    Label,
    ShardCount,
    ShardNumber,
    ShardTokens,
    SourceCount,
    StoredCount,
    archived_tokenizer_name,
    label_text,
)
from neuroshard.data.shard_file import ShardFormat
from neuroshard.data.tokenizer import TokenizerTable
from neuroshard.data.tokenizer.table import DEFAULT_MAX_FILE_BYTES, FIRST_MERGE_ID, MAX_VOCABULARY
from neuroshard.dataset.batches import NO_TOKENS, Ids, Mark, PackedShard
from neuroshard.dataset.destination import Destination
from neuroshard.dataset.object_store import Condition, ExpectedVersion, put_once
from neuroshard.dataset.packing import MIN_SHARDS
from neuroshard.dataset.records import PopulationSource
from neuroshard.dataset.writer import GenesisWriter, Unpublished
from neuroshard.decoders import read_json
from neuroshard.errors import DataError
from neuroshard.identity.signing import Signer
from neuroshard.types import HexDigest

MAX_CHECKPOINTS_BYTES = 256 << 20


@dataclass(frozen=True)
class SourceCheckpoint:
    """The state of one source after its last shard."""

    origin: str
    target_shards: int
    mark: Mark = field(default_factory=Mark)
    leftover: Ids = field(default_factory=lambda: NO_TOKENS)  # tokens before the mark that are in no shard yet
    shards: int = 0
    last_shard_id: int = -1
    timestamp: str = ""
    merges: int = 0  # requested from the source for the vocabulary


@dataclass(frozen=True)
class Checkpoints:
    """Contents of checkpoints.json."""

    tokenizer_sha256: str  # of the table for the next shards
    next_merge_id: int
    tokens_per_shard: int | None = None  # None: not known yet, as no shard exists
    total_shards: int = 0
    total_size_bytes: int = 0
    unpublished: tuple[bytes, ...] = ()  # digests of the newest shards
    sources: Mapping[str, SourceCheckpoint] = field(default_factory=dict[str, SourceCheckpoint])
    shard_format: ShardFormat = "bin"

    def to_json(self) -> bytes:
        """The bytes of checkpoints.json."""
        file = CheckpointsFile(
            MANIFEST_VERSIONS[self.shard_format],
            self.tokens_per_shard,
            self.total_shards,
            self.total_size_bytes,
            CheckpointTable(self.tokenizer_sha256, self.next_merge_id),
            tuple(digest.hex() for digest in self.unpublished),
            {name: _written(source) for name, source in sorted(self.sources.items())},
        )
        return json.dumps(msgspec.to_builtins(file), separators=(",", ":"), sort_keys=True).encode()


class CheckpointTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The tokenizer table for the next shards."""

    sha256: HexDigest
    next_merge_id: Annotated[int, Meta(ge=FIRST_MERGE_ID, le=MAX_VOCABULARY)]


class StoredSource(Struct, frozen=True, forbid_unknown_fields=True):
    """A SourceCheckpoint in checkpoints.json."""

    documents_processed: StoredCount
    last_shard_id: ShardNumber
    leftover_tokens: list[Annotated[int, Meta(ge=0, lt=MAX_VOCABULARY)]]
    timestamp: Label
    shards: ShardCount
    target_shards: ShardCount
    skipped: StoredCount
    origin: Label
    position: dict[str, Any]
    character: StoredCount
    merges: Annotated[int, Meta(ge=0, le=MAX_VOCABULARY)]  # asked of the source when the table was learned


class CheckpointsFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of checkpoints.json."""

    format_version: Literal[1, 2]  # that of the manifest
    tokens_per_shard: ShardTokens | None
    total_shards: ShardCount
    total_size_bytes: StoredCount
    tokenizer: CheckpointTable
    unpublished: tuple[HexDigest, ...]  # of the newest shards, at least of those that the manifest does not name
    sources: dict[str, StoredSource]

    def __post_init__(self) -> None:
        """Raise ValueError for fields that contradict each other."""
        if self.total_shards and self.tokens_per_shard is None:
            raise ValueError("tokens_per_shard is missing")
        if len(self.unpublished) > self.total_shards:
            raise ValueError("unpublished names more shards than there are")


def parse_checkpoints(data: bytes) -> Checkpoints:
    """Parse the file strictly. Raises DataError that names the problem."""
    try:
        file = read_json(data, CheckpointsFile, MAX_CHECKPOINTS_BYTES)
        return Checkpoints(
            file.tokenizer.sha256,
            file.tokenizer.next_merge_id,
            file.tokens_per_shard if file.total_shards else None,
            file.total_shards,
            file.total_size_bytes,
            tuple(map(bytes.fromhex, file.unpublished)),
            {name: _read(source) for name, source in file.sources.items()},
            SHARD_FORMATS[file.format_version],
        )
    except ValueError as error:
        raise DataError(f"{CHECKPOINTS_NAME} is damaged: {error}.", "Build into a new folder.") from error


def _written(source: SourceCheckpoint) -> StoredSource:
    return StoredSource(
        documents_processed=source.mark.documents,
        last_shard_id=source.last_shard_id,
        leftover_tokens=cast("list[int]", source.leftover.tolist()),
        timestamp=source.timestamp,
        shards=source.shards,
        target_shards=source.target_shards,
        skipped=source.mark.skipped,
        origin=source.origin,
        position=dict(source.mark.position),
        character=source.mark.character,
        merges=source.merges,
    )


def _read(source: StoredSource) -> SourceCheckpoint:
    return SourceCheckpoint(
        origin=label_text(source.origin),
        target_shards=source.target_shards,
        mark=Mark(source.position, source.character, source.documents_processed, source.skipped),
        leftover=np.array(source.leftover_tokens, dtype=np.uint32),
        shards=source.shards,
        last_shard_id=source.last_shard_id,
        timestamp=label_text(source.timestamp),
        merges=source.merges,
    )


_OTHERWISE_BUILT = "Name a new folder; this one was not made by `genesis build --config`."


class Ledger:
    """The state of one data set at its destination. Every method needs the destination's claim."""

    def __init__(
        self,
        destination: Destination,
        signer: Signer,
        clock: Callable[[], str],
        shard_format: ShardFormat | None = None,
    ) -> None:
        """Read the state; `clock` gives ISO 8601 dates. Without a `shard_format`, that of a build that continues.

        Raises DataError when another program made the data set, or when its shards have another format.
        """
        self._destination = destination
        self._signer = signer
        self._clock = clock
        self._writer: GenesisWriter | None = None
        self._table_json = b""
        self._written = b""
        self._now: Checkpoints | None = None
        self._version: ExpectedVersion = Condition.ABSENT
        there = destination.read(CHECKPOINTS_NAME, MAX_CHECKPOINTS_BYTES)
        if there is not None:
            self._version = there.version
            self._written = there.content
            self._now = parse_checkpoints(there.content)
            if shard_format not in (None, self._now.shard_format):
                raise DataError(
                    f"The shards of {destination.description} have the format {self._now.shard_format}.",
                    f"Give --format {self._now.shard_format}, or name a new place.",
                )
            shard_format = self._now.shard_format
        elif destination.read(MANIFEST_NAME, MAX_MANIFEST_BYTES) is not None:
            raise DataError(f"{destination.description} has a manifest but no {CHECKPOINTS_NAME}.", _OTHERWISE_BUILT)
        self._shard_format: ShardFormat = shard_format or "bin"

    @property
    def checkpoints(self) -> Checkpoints:
        """Return the state of all sources. There must be a table."""
        if self._now is None:
            raise ValueError("there is no table yet")
        return self._now

    def asked_merges(self) -> dict[str, int]:
        """Return the merges that each source was asked for when the table was learned."""
        return {name: source.merges for name, source in self._now.sources.items()} if self._now else {}

    def load_table(self) -> TokenizerTable | None:
        """Return the newest table; None before there is one. Raises DataError when it is missing or damaged."""
        if self._now is None:
            return None
        name = archived_tokenizer_name(self._now.tokenizer_sha256)
        there = self._destination.read(name, DEFAULT_MAX_FILE_BYTES)
        if there is None:
            raise DataError(f"{name} is missing in {self._destination.description}.", "Restore it from a copy.")
        if sha256(there.content).hexdigest() != self._now.tokenizer_sha256:
            raise DataError(f"{name} in {self._destination.description} is damaged.", "Restore it from a copy.")
        self._table_json = there.content
        return TokenizerTable.load(there.content)

    def take_sources(self, sources: Sequence[PopulationSource]) -> None:
        """Compare with the sources read before. Raises DataError when a name now means another source."""
        for source in sources:
            known = self._now.sources.get(source.name) if self._now else None
            if known is not None and known.origin != source.origin:
                raise DataError(
                    f"Source {source.name!r} was {known.origin} when its shards were made and is {source.origin} now.",
                    "Give the new source a name of its own.",
                )

    def take_table(self, table: TokenizerTable, merges: Mapping[str, int], sources: Sequence[PopulationSource]) -> None:
        """Set the table of all further shards, with the merges that each source was asked for."""
        known = self._now or Checkpoints(table.sha256, table.next_merge_id, shard_format=self._shard_format)
        asked = self.asked_merges()
        taken = dict(known.sources)
        for source in sources:
            most = max(merges.get(source.name, 0), asked.get(source.name, 0))
            entry = taken.get(source.name) or SourceCheckpoint(source.origin, source.target_shards)
            taken[source.name] = replace(entry, target_shards=source.target_shards, merges=most)
        digest = known.tokenizer_sha256
        if table.next_merge_id != known.next_merge_id or not self._table_json:
            self._table_json = table.to_json()
            digest = table.sha256
            put_once(self._destination, archived_tokenizer_name(digest), self._table_json)
        self._now = replace(
            known, tokenizer_sha256=digest, next_merge_id=table.next_merge_id, sources=taken
        )  # fmt: skip
        self._save()

    def open_writer(self, tokens_per_shard: int) -> None:
        """Continue with shards of this size, which never changes after the first shard."""
        now = self.checkpoints
        self._now = replace(now, tokens_per_shard=tokens_per_shard)
        unpublished = Unpublished(now.total_shards, now.unpublished, now.total_size_bytes)
        self._writer = GenesisWriter(
            self._destination,
            tokens_per_shard=tokens_per_shard,
            shard_format=now.shard_format,
            unpublished=unpublished,
        )

    def add_shard(self, source: str, packed: PackedShard) -> None:
        """Write one shard and the state of its source after it."""
        writer, now = self._open(), self.checkpoints
        shard = writer.add_shard(packed.ids)
        before = now.sources[source]
        after = replace(
            before,
            mark=packed.mark,
            leftover=packed.leftover,
            shards=before.shards + 1,
            last_shard_id=shard,
            timestamp=max(before.timestamp, self._clock()),  # never earlier, even if the clock went back
        )
        self._now = replace(
            now,
            total_shards=writer.shard_count,
            total_size_bytes=writer.size_bytes,
            unpublished=(*now.unpublished, writer.digest(shard)),
            sources={**now.sources, source: after},
        )
        self._save()

    def publish(self) -> bool:
        """Publish all shards; False when there are no new ones, or fewer than any data set has."""
        now = self.checkpoints
        if now.tokens_per_shard is None or now.total_shards < MIN_SHARDS:
            return False
        writer = self._open()
        published = writer.published
        if published is None or published.total_shards < now.total_shards:
            size = now.tokens_per_shard
            sources = {
                name: SourceCount(item.shards, item.shards * size, item.mark.documents, item.last_shard_id)
                for name, item in sorted(now.sources.items())
            }
            tables = published.tokenizers if published else ()
            is_new = not tables or tables[-1].sha256 != now.tokenizer_sha256
            writer.finish(
                self._signer,
                tokenizer_version=str(len(tables) + is_new),
                tokenizer=self._table_json,
                next_merge_id=now.next_merge_id,
                now=max(published.updated_at if published else "", self._clock()),
                sources=sources,
            )
        self._now = replace(now, unpublished=())
        self._save()
        return True

    def _open(self) -> GenesisWriter:
        if self._writer is None:
            raise ValueError("the size of shards is not settled yet")
        return self._writer

    def _save(self) -> None:
        """Write the checkpoints if they changed; another populator's are never overwritten."""
        data = self.checkpoints.to_json()
        if data != self._written:
            self._version = self._destination.write(CHECKPOINTS_NAME, data, expected=self._version)
            self._written = data
