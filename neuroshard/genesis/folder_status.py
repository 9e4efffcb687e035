"""What a served Genesis folder holds and what its server has done since it started, as JSON for people and programs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from neuroshard.data.genesis.layout import MANIFEST_NAME
from neuroshard.errors import DataError, StorageError
from neuroshard.genesis.data_set_status import read_status
from neuroshard.genesis.destination import FolderDestination
from neuroshard.genesis.population.checkpoints import CHECKPOINTS_NAME
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


class FolderStatus:
    """Answers /status. What the folder tells is read again only when one of its two descriptions changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = Lock()
        self._read: tuple[tuple[float, ...], dict[str, JsonValue]] | None = None

    def answer(self, traffic: Traffic, uptime_seconds: float) -> bytes:
        """JSON. What cannot be read is named under `problem`: the server goes on."""
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
