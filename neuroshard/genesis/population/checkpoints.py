"""checkpoints.json: where a populator stands after each shard. From it and the sources the rest of a data set follows.

{"format_version", "tokens_per_shard", "total_shards", "total_size_bytes", "tokenizer": {"sha256", "next_merge_id"},
"unpublished": [SHA-256 of the newest shards, those at least that the manifest does not name], "sources": {name:
{documents_processed, last_shard_id, leftover_tokens, timestamp, shards, target_shards, skipped, origin, position,
character, merges}}}; `merges` is how many the source was asked for when the table was learned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from neuroshard.data.genesis.fields import Fields, MalformedFieldError
from neuroshard.data.genesis.layout import CHECKPOINTS_NAME
from neuroshard.data.genesis.manifest import MAX_SHARD_TOKENS, MAX_SHARDS
from neuroshard.data.tokenizer.table import FIRST_MERGE_ID, MAX_VOCABULARY
from neuroshard.errors import DataError
from neuroshard.genesis.population.batches import Mark
from neuroshard.genesis.population.packer import NO_TOKENS, Ids
from neuroshard.identity.canonical import parse_json
from neuroshard.types import JsonValue

MAX_CHECKPOINTS_BYTES = 256 << 20
FORMAT_VERSION = 1
_MAX_COUNT = 2**63 - 1


@dataclass(frozen=True)
class SourceCheckpoint:
    """One source after its last shard."""

    origin: str
    target_shards: int
    mark: Mark = field(default_factory=Mark)
    leftover: Ids = field(default_factory=lambda: NO_TOKENS)  # tokens before the mark that are in no shard yet
    shards: int = 0
    last_shard_id: int = -1
    timestamp: str = ""
    merges: int = 0  # asked of the source for the vocabulary


@dataclass(frozen=True)
class Checkpoints:
    """The whole file."""

    tokenizer_sha256: str  # of the table that makes the next shards
    next_merge_id: int
    tokens_per_shard: int | None = None  # None: not known yet, no shard was made
    total_shards: int = 0
    total_size_bytes: int = 0
    unpublished: tuple[bytes, ...] = ()  # digests of the newest shards
    sources: Mapping[str, SourceCheckpoint] = field(default_factory=dict[str, SourceCheckpoint])

    def to_json(self) -> bytes:
        """The bytes of checkpoints.json."""
        value: dict[str, JsonValue] = {
            "format_version": FORMAT_VERSION,
            "tokens_per_shard": self.tokens_per_shard,
            "total_shards": self.total_shards,
            "total_size_bytes": self.total_size_bytes,
            "tokenizer": {"sha256": self.tokenizer_sha256, "next_merge_id": self.next_merge_id},
            "unpublished": [digest.hex() for digest in self.unpublished],
            "sources": {name: _source_json(source) for name, source in sorted(self.sources.items())},
        }
        return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def parse_checkpoints(data: bytes) -> Checkpoints:
    """Read the file strictly. Raises DataError that names what is wrong."""
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
    fields.integer("format_version", FORMAT_VERSION, FORMAT_VERSION)
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
