"""The status of a data set: published and unpublished shards per source, and the requests its server answered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock

from msgspec import structs

from neuroshard.data.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, DataSetManifest, SourceCount, parse_manifest
from neuroshard.dataset.destination import FolderDestination
from neuroshard.dataset.object_store import ObjectReader
from neuroshard.dataset.population_state import (
    CHECKPOINTS_NAME,
    MAX_CHECKPOINTS_BYTES,
    Checkpoints,
    SourceCheckpoint,
    parse_checkpoints,
)
from neuroshard.errors import DataError, StorageError
from neuroshard.types import JsonValue


@dataclass(frozen=True)
class SourceStatus:
    """Status of one source. Counts include shards that are not published yet."""

    shards: int
    published_shards: int
    tokens: int
    documents_processed: int
    documents_skipped: int
    last_shard_id: int  # -1: none
    target_shards: int | None  # None: unknown without a populator's state
    changed_at: str  # of its newest shard; "" when not known


@dataclass(frozen=True)
class DataSetStatus:
    """Status of a data set; without a manifest nothing is published yet."""

    manifest: DataSetManifest | None
    unpublished_shards: int
    sources: dict[str, SourceStatus]
    problem: str = ""  # why the populator's state is left out

    def to_json(self) -> dict[str, JsonValue]:
        """Return the JSON for /status and --json."""
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
            "tokenizers": [structs.asdict(entry) for entry in manifest.tokenizers],
        }


def status_of(manifest: DataSetManifest | None, checkpoints: Checkpoints | None, problem: str = "") -> DataSetStatus:
    """Combine both descriptions of a data set."""
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
    """Read the status of the data set in a place. Raises DataError when it is missing or its manifest is unreadable."""
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
    if made is None or made.shards < published.shards:  # ignore an old copy of the populator's state
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


@dataclass(frozen=True)
class ServerTraffic:
    """Requests since the start, by how they were answered."""

    whole: int = 0
    partial: int = 0
    not_modified: int = 0
    refused: int = 0
    bytes_sent: int = 0


class ServerTrafficCount:
    """Counts requests; called from many threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._traffic = ServerTraffic()

    def answered(self, status: int) -> None:
        """Count a request by its HTTP status."""
        name = {200: "whole", 206: "partial", 304: "not_modified"}.get(status, "refused")
        with self._lock:
            self._traffic = replace(self._traffic, **{name: getattr(self._traffic, name) + 1})

    def sent(self, byte_count: int) -> None:
        """Count bytes of files that were sent."""
        with self._lock:
            self._traffic = replace(self._traffic, bytes_sent=self._traffic.bytes_sent + byte_count)

    def now(self) -> ServerTraffic:
        """Return all counts since the start."""
        with self._lock:
            return self._traffic


class FolderStatus:
    """Answers /status. The folder is read again only when one of its two descriptions changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = Lock()
        self._read: tuple[tuple[float, ...], dict[str, JsonValue]] | None = None

    def answer(self, traffic: ServerTraffic, uptime_seconds: float) -> bytes:
        """Return the JSON. Files that cannot be read are named under `problem`; the server continues."""
        value: dict[str, JsonValue] = {"uptime_seconds": round(uptime_seconds, 1), "requests": dict(vars(traffic))}
        with self._lock:
            state = _state(self._folder / MANIFEST_NAME) + _state(self._folder / CHECKPOINTS_NAME)
            if self._read is None or self._read[0] != state:
                self._read = state, _data_set(self._folder)
            return json.dumps(value | self._read[1], indent=1).encode()


def _state(path: Path) -> tuple[float, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_ino, status.st_size, status.st_mtime_ns)


def _data_set(folder: Path) -> dict[str, JsonValue]:
    try:
        return read_status(FolderDestination(folder)).to_json()
    except (StorageError, DataError) as error:
        return {"problem": f"The data set cannot be described: {error}"}
