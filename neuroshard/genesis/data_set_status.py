"""How far a data set is: of every source what was published and what its populator has done since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from neuroshard.data.genesis.layout import MANIFEST_NAME
from neuroshard.data.genesis.manifest import MAX_MANIFEST_BYTES, Manifest, SourceCount, parse_manifest
from neuroshard.data.genesis.object_store import ObjectReader
from neuroshard.errors import DataError
from neuroshard.genesis.population.checkpoints import (
    CHECKPOINTS_NAME,
    MAX_CHECKPOINTS_BYTES,
    Checkpoints,
    SourceCheckpoint,
    parse_checkpoints,
)
from neuroshard.types import JsonValue


@dataclass(frozen=True)
class SourceStatus:
    """One source. Counts include shards that are made and not published yet."""

    shards: int
    published_shards: int
    tokens: int
    documents_processed: int
    documents_skipped: int
    last_shard_id: int  # -1: none
    target_shards: int | None  # None: not known, there is no populator's state
    changed_at: str  # of its newest shard; "" when not known


@dataclass(frozen=True)
class DataSetStatus:
    """A data set; without a manifest nothing is published yet."""

    manifest: Manifest | None
    unpublished_shards: int
    sources: dict[str, SourceStatus]
    problem: str = ""  # why the populator's state is left out

    def to_json(self) -> dict[str, JsonValue]:
        """For programs: /status of a server, and --json."""
        value: dict[str, JsonValue] = {
            "unpublished_shards": self.unpublished_shards,
            "sources": {name: asdict(source) for name, source in self.sources.items()},
            "problem": self.problem,
        }
        manifest = self.manifest
        if manifest is None:
            return value | {"total_shards": 0}
        return value | {
            "total_shards": manifest.total_shards,
            "total_tokens": manifest.total_tokens,
            "total_size_bytes": manifest.total_size_bytes,
            "tokens_per_shard": manifest.tokens_per_shard,
            "root": manifest.root(),
            "signed_by": manifest.signing_key,
            "created_at": manifest.created_at,
            "updated_at": manifest.updated_at,
            "tokenizer_version": manifest.tokenizer_version,
            "tokenizers": [asdict(entry) for entry in manifest.tokenizers],
        }


def status_of(manifest: Manifest | None, checkpoints: Checkpoints | None, problem: str = "") -> DataSetStatus:
    """Put both descriptions of a data set together."""
    published: Mapping[str, SourceCount] = {} if manifest is None else manifest.sources
    made: Mapping[str, SourceCheckpoint] = {} if checkpoints is None else checkpoints.sources
    per_shard = 0 if checkpoints is None else checkpoints.tokens_per_shard or 0
    sources = {
        name: _source_status(published.get(name, SourceCount()), made.get(name), per_shard)
        for name in sorted(published.keys() | made.keys())
    }
    made_shards = 0 if checkpoints is None else checkpoints.total_shards
    unpublished = max(0, made_shards - (0 if manifest is None else manifest.total_shards))
    return DataSetStatus(manifest, unpublished, sources, problem)


def read_status(place: ObjectReader) -> DataSetStatus:
    """Status of the data set in a place. Raises DataError when there is none, or its manifest cannot be read."""
    there = place.read(MANIFEST_NAME, MAX_MANIFEST_BYTES)
    manifest = parse_manifest(there.content) if there is not None else None
    problem = ""
    checkpoints: Checkpoints | None = None
    try:
        state = place.read(CHECKPOINTS_NAME, MAX_CHECKPOINTS_BYTES)
        checkpoints = parse_checkpoints(state.content) if state is not None else None
    except DataError as error:
        problem = error.message
    if manifest is None and checkpoints is None:
        raise DataError(
            f"{place.description} has neither {MANIFEST_NAME} nor {CHECKPOINTS_NAME}.", "Check the location."
        )
    return status_of(manifest, checkpoints, problem)


def _source_status(published: SourceCount, made: SourceCheckpoint | None, tokens_per_shard: int) -> SourceStatus:
    if made is None or made.shards < published.shards:  # an old copy of the populator's state tells nothing
        return SourceStatus(
            shards=published.shards,
            published_shards=published.shards,
            tokens=published.tokens,
            documents_processed=published.documents_processed,
            documents_skipped=0,
            last_shard_id=published.last_shard_id,
            target_shards=made.target_shards if made is not None else None,
            changed_at="",
        )
    return SourceStatus(
        shards=made.shards,
        published_shards=published.shards,
        tokens=made.shards * tokens_per_shard,
        documents_processed=made.mark.documents,
        documents_skipped=made.mark.skipped,
        last_shard_id=made.last_shard_id,
        target_shards=made.target_shards,
        changed_at=made.timestamp,
    )
