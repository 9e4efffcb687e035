"""A file that a data source began to deliver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass(frozen=True)
class OpenedFile:
    """Bytes from `offset` on: the offset asked for, or 0 when the source starts over."""

    offset: int
    total_bytes: int | None  # of the whole file, as the source claims it
    validator: str | None  # names this version of the file; without it a transfer cannot be continued
    chunks: AsyncIterator[bytes]
