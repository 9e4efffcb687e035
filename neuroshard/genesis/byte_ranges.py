"""The decisions of a file server about one request: conditions and byte ranges (RFC 9110, 13 and 14). Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)


@dataclass(frozen=True)
class Answer:
    """Status code and the bytes start .. stop - 1 to send."""

    status: int  # 200, 206, 304 or 416
    start: int = 0
    stop: int = 0


def answer_for(
    size: int, etag: str, *, range_header: str | None, if_range: str | None, if_none_match: str | None
) -> Answer:
    """What to send of a file with this size and strong ETag. Several ranges at once, or nonsense, get all of it."""
    if if_none_match is not None and _names(if_none_match, etag):
        return Answer(304)
    match = _RANGE.fullmatch(range_header.strip()) if range_header is not None else None
    is_whole = match is None or (if_range is not None and if_range.strip() != etag)
    if match is None or is_whole or not (match[1] or match[2]):
        return Answer(200, 0, size)
    if not match[1]:  # the last n bytes
        length = min(int(match[2]), size)
        return Answer(206, size - length, size) if length > 0 else Answer(416)
    start = int(match[1])
    stop = min(int(match[2]) + 1, size) if match[2] else size
    if match[2] and int(match[2]) < start:
        return Answer(200, 0, size)  # invalid: ignored
    return Answer(206, start, stop) if start < size else Answer(416)


def _names(if_none_match: str, etag: str) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag in tags
