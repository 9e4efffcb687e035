"""What a served Genesis folder holds and what its server has done since it started, as JSON for people and programs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from neuroshard.data.genesis.layout import MANIFEST_NAME
from neuroshard.data.genesis.manifest import MAX_MANIFEST_BYTES, parse_manifest
from neuroshard.errors import DataError
from neuroshard.types import JsonValue


@dataclass(frozen=True)
class Traffic:
    """Requests since the start, by how they were answered."""

    whole: int = 0
    partial: int = 0
    not_modified: int = 0
    refused: int = 0
    bytes_sent: int = 0


class TrafficCount:
    """Counts requests; called from many threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._traffic = Traffic()

    def answered(self, status: int) -> None:
        """A request got this HTTP status."""
        name = {200: "whole", 206: "partial", 304: "not_modified"}.get(status, "refused")
        with self._lock:
            self._traffic = replace(self._traffic, **{name: getattr(self._traffic, name) + 1})

    def sent(self, byte_count: int) -> None:
        """So many bytes of files went out."""
        with self._lock:
            self._traffic = replace(self._traffic, bytes_sent=self._traffic.bytes_sent + byte_count)

    def now(self) -> Traffic:
        """All so far."""
        with self._lock:
            return self._traffic


def folder_status(folder: Path, traffic: Traffic, uptime_seconds: float) -> bytes:
    """The answer to /status. A manifest that cannot be read is named under `problem`: the server goes on."""
    value: dict[str, JsonValue] = {
        "uptime_seconds": round(uptime_seconds, 1),
        "requests": dict(vars(traffic)),
        "problem": "",
    }
    return json.dumps(value | _data_set(folder), indent=1).encode()


def _data_set(folder: Path) -> dict[str, JsonValue]:
    try:
        with (folder / MANIFEST_NAME).open("rb") as file:
            manifest = parse_manifest(file.read(MAX_MANIFEST_BYTES + 1))
    except (OSError, DataError) as error:
        return {"problem": f"The manifest cannot be read: {error}"}
    return {
        "total_shards": manifest.total_shards,
        "total_tokens": manifest.total_tokens,
        "total_size_bytes": manifest.total_size_bytes,
        "root": manifest.root(),
        "signed_by": manifest.signing_key,
        "created_at": manifest.created_at,
        "updated_at": manifest.updated_at,
        "tokenizer_version": manifest.tokenizer_version,
        "tokenizers": [dict(vars(entry)) for entry in manifest.tokenizers],
        "sources": {name: dict(vars(count)) for name, count in manifest.sources.items()},
    }
