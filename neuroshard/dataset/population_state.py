"""The state of a population: checkpoints.json, and the ledger that writes shards, tables and manifest in a safe order.

The process may be killed between any two writes.

{"format_version" (that of the manifest), "tokens_per_shard", "total_shards", "total_size_bytes",
"tokenizer": {"sha256", "next_merge_id"}, "unpublished": [SHA-256 of the newest shards, at least of those that the
manifest does not name], "sources": {name: {documents_processed, last_shard_id, leftover_tokens, timestamp, shards,
target_shards, skipped, origin, position, character, merges}}}; `merges` is how many the source was asked for when the
table was learned."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import cast

import numpy as np

from neuroshard.data.manifest import (
    CHECKPOINTS_NAME,
    MANIFEST_NAME,
    MANIFEST_VERSIONS,
    MAX_MANIFEST_BYTES,
    MAX_SHARD_TOKENS,
    MAX_SHARDS,
    Fields,
    MalformedFieldError,
    SourceCount,
    archived_tokenizer_name,
    read_shard_format,
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
from neuroshard.errors import DataError
from neuroshard.identity.signing import Signer
from neuroshard.identity.strict_json import parse_json
from neuroshard.types import JsonValue

MAX_CHECKPOINTS_BYTES = 256 << 20
_MAX_COUNT = 2**63 - 1


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
        value: dict[str, JsonValue] = {
            "format_version": MANIFEST_VERSIONS[self.shard_format],
            "tokens_per_shard": self.tokens_per_shard,
            "total_shards": self.total_shards,
            "total_size_bytes": self.total_size_bytes,
            "tokenizer": {"sha256": self.tokenizer_sha256, "next_merge_id": self.next_merge_id},
            "unpublished": [digest.hex() for digest in self.unpublished],
            "sources": {name: _source_json(source) for name, source in sorted(self.sources.items())},
        }
        return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def parse_checkpoints(data: bytes) -> Checkpoints:
    """Parse the file strictly. Raises DataError that names the problem."""
    try:
        return _read(Fields(parse_json(data, MAX_CHECKPOINTS_BYTES), "checkpoints"))
    except ValueError as error:
        raise DataError(f"{CHECKPOINTS_NAME} is damaged: {error}.", "Build into a new folder.") from error


def _source_json(source: SourceCheckpoint) -> dict[str, JsonValue]:
    return {
        "documents_processed": source.mark.documents,
        "last_shard_id": source.last_shard_id,
        "leftover_tokens": cast("list[JsonValue]", source.leftover.tolist()),
        "timestamp": source.timestamp,
        "shards": source.shards,
        "target_shards": source.target_shards,
        "skipped": source.mark.skipped,
        "origin": source.origin,
        "position": source.mark.position,
        "character": source.mark.character,
        "merges": source.merges,
    }


def _read(fields: Fields) -> Checkpoints:
    shard_format = read_shard_format(fields)
    total = fields.integer("total_shards", 0, MAX_SHARDS)
    size = fields.integer("tokens_per_shard", 1, MAX_SHARD_TOKENS) if total else None
    fields.skip("tokens_per_shard")
    tokenizer = Fields(fields.mapping("tokenizer"), "tokenizer")
    count = len(fields.sequence("unpublished", 0, total))
    unpublished = tuple(bytes.fromhex(digest) for digest in fields.hexadecimals("unpublished", 32, count))
    checkpoints = Checkpoints(
        tokenizer_sha256=tokenizer.hexadecimal("sha256", 32),
        next_merge_id=tokenizer.integer("next_merge_id", FIRST_MERGE_ID, MAX_VOCABULARY),
        tokens_per_shard=size,
        total_shards=total,
        total_size_bytes=fields.integer("total_size_bytes", 0, _MAX_COUNT),
        unpublished=unpublished,
        sources={name: _read_source(Fields(item, name)) for name, item in fields.mapping("sources").items()},
        shard_format=shard_format,
    )
    tokenizer.refuse_unknown()
    fields.refuse_unknown()
    return checkpoints


def _read_source(fields: Fields) -> SourceCheckpoint:
    source = SourceCheckpoint(
        origin=fields.label("origin"),
        target_shards=fields.integer("target_shards", 0, MAX_SHARDS),
        mark=Mark(
            fields.mapping("position"),
            fields.integer("character", 0, _MAX_COUNT),
            fields.integer("documents_processed", 0, _MAX_COUNT),
            fields.integer("skipped", 0, _MAX_COUNT),
        ),
        leftover=_read_tokens(fields.sequence("leftover_tokens", 0, MAX_CHECKPOINTS_BYTES)),
        shards=fields.integer("shards", 0, MAX_SHARDS),
        last_shard_id=fields.integer("last_shard_id", -1, MAX_SHARDS),
        timestamp=fields.label("timestamp"),
        merges=fields.integer("merges", 0, MAX_VOCABULARY),
    )
    fields.refuse_unknown()
    return source


def _read_tokens(values: object) -> Ids:
    tokens = cast("list[JsonValue]", values)
    if not all(type(token) is int and 0 <= token < MAX_VOCABULARY for token in tokens):
        raise MalformedFieldError("leftover_tokens must be token ids")
    return np.array(tokens, dtype=np.uint32)


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
