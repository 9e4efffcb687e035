"""build.json: what a finished build was made of, so that it can be reused and told to the user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar, cast

from neuroshard.types import JsonValue

_Value = TypeVar("_Value", str, int, float)

REPORT_NAME = "build.json"
UNFINISHED_SUFFIX = ".unfinished"  # of the folder that a build works in
_MAX_REPORT_BYTES = 65_536


@dataclass(frozen=True)
class BuildReport:
    """A finished Genesis folder in numbers."""

    fingerprint: str  # of the text, the options and the signing key
    source: str
    documents: int  # as found
    near_duplicates: int  # of them dropped
    text_bytes: int  # UTF-8, after dropping
    vocabulary: int  # ids in use
    tokens: int  # in all shards together
    shards: int
    tokens_per_shard: int
    unigram_entropy: float  # nats a token, over all shards

    def to_json(self) -> bytes:
        """The bytes of build.json."""
        return json.dumps(asdict(self), indent=1).encode()


def read_report(folder: Path) -> BuildReport | None:
    """The report of a folder built here; None when there is none or it cannot be understood."""
    try:
        with (folder / REPORT_NAME).open("rb") as file:
            return _report_from(cast("JsonValue", json.loads(file.read(_MAX_REPORT_BYTES))))
    except (OSError, ValueError, TypeError, RecursionError):
        return None  # no report, no reuse: the folder is built again


def _report_from(value: JsonValue) -> BuildReport:
    """Raises TypeError when a field is missing or of another type."""
    if not isinstance(value, Mapping):
        raise TypeError("a report is an object")
    return BuildReport(
        fingerprint=_field(value, "fingerprint", str),
        source=_field(value, "source", str),
        documents=_field(value, "documents", int),
        near_duplicates=_field(value, "near_duplicates", int),
        text_bytes=_field(value, "text_bytes", int),
        vocabulary=_field(value, "vocabulary", int),
        tokens=_field(value, "tokens", int),
        shards=_field(value, "shards", int),
        tokens_per_shard=_field(value, "tokens_per_shard", int),
        unigram_entropy=_field(value, "unigram_entropy", float),
    )


def _field(value: Mapping[str, JsonValue], name: str, kind: type[_Value]) -> _Value:
    item = value.get(name)
    if isinstance(item, bool) or not isinstance(item, kind):
        raise TypeError(f"{name} is not of type {kind.__name__}")
    return item
