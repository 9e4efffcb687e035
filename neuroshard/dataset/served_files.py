"""Decisions of the Genesis file server: served names, cache headers, conditional requests and byte ranges. Pure.

Conditions and ranges follow RFC 9110, sections 13 and 14."""

from __future__ import annotations

import re
from dataclasses import dataclass

from neuroshard.data.manifest import MAX_PAGE_BYTES

STATUS_NAME = "status"
# Only these names are looked up, so no path can leave the folder or reach other files in it.
_SERVED = re.compile(
    r"manifest\.json|tokenizer\.json|checkpoints\.json|run\.json|pages/[0-9]{5}\.bin|shard_[0-9]{1,9}\.(?:bin|pt)"
    r"|tokenizers/[0-9a-f]{64}\.json",
    re.ASCII,
)
_IMMUTABLE = "public, max-age=31536000, immutable"
_REVALIDATED = "no-cache"  # cached, but revalidated before each use, which costs one answer without a body


def is_served(name: str) -> bool:
    """Return whether a file of this name may be sent to others."""
    return _SERVED.fullmatch(name) is not None


def cache_control(name: str, size: int) -> str:
    """Return the cache header for a file of `size` bytes.

    Shards and archived tables never change, nor does a page that is full. The last page grows with the data set, like
    the manifest and the newest table: an old copy with a new manifest would not match its digest.
    """
    is_full_page = name.startswith("pages/") and size == MAX_PAGE_BYTES
    never_changes = name.startswith(("shard_", "tokenizers/")) or is_full_page
    return _IMMUTABLE if never_changes else _REVALIDATED


def content_type(name: str) -> str:
    """Return the media type of a file."""
    return "application/json" if name.endswith(".json") else "application/octet-stream"


_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)


@dataclass(frozen=True)
class RangeResponse:
    """Status code and the bytes start .. stop - 1 to send."""

    status: int  # 200, 206, 304 or 416
    start: int = 0
    stop: int = 0


def range_response(
    size: int, etag: str, *, range_header: str | None, if_range: str | None, if_none_match: str | None
) -> RangeResponse:
    """Return the response for a file with this size and strong ETag; several ranges or invalid ones get all of it."""
    if if_none_match is not None and _names(if_none_match, etag):
        return RangeResponse(304)
    match = _RANGE.fullmatch(range_header.strip()) if range_header is not None else None
    is_whole = match is None or (if_range is not None and if_range.strip() != etag)
    if match is None or is_whole or not (match[1] or match[2]):
        return RangeResponse(200, 0, size)
    if not match[1]:  # the last n bytes
        length = min(int(match[2]), size)
        return RangeResponse(206, size - length, size) if length > 0 else RangeResponse(416)
    start = int(match[1])
    stop = min(int(match[2]) + 1, size) if match[2] else size
    if match[2] and int(match[2]) < start:
        return RangeResponse(200, 0, size)  # invalid: ignored
    return RangeResponse(206, start, stop) if start < size else RangeResponse(416)


def _names(if_none_match: str, etag: str) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag in tags
