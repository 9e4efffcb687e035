"""A shard file that comes piece by piece: its tokens are given on at once, the rest of it is checked at its end."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neuroshard.data.genesis.torch_file import (
    ITEM_BYTES,
    MAX_CONTAINER_BYTES,
    check_token_count,
    expected_place,
    inspect_container,
)
from neuroshard.errors import DataError


@dataclass(frozen=True)
class ShardForm:
    """What is known of a shard file before it comes."""

    name: str
    max_tokens: int
    exact_tokens: int | None = None
    has_digest: bool = False  # of the whole file; else the file's own checksum of its tokens is compared


@dataclass(frozen=True)
class ShardFrame:
    """What a checked shard file has before and after its tokens."""

    before: bytes
    after: bytes
    token_count: int


class ShardStream:
    """Takes the bytes of one file in any pieces. Until `end` has agreed, its tokens are only a claim of the file."""

    def __init__(self, form: ShardForm) -> None:
        self._form = form
        self._before = bytearray()
        self._after = bytearray()
        self._half = b""  # the beginning of a token whose rest is not here yet
        self._place: tuple[int, int] | None = None  # start and number of the tokens
        self._missing = 0  # bytes of tokens still to come
        self._crc32 = 0

    def feed(self, data: bytes) -> Iterator[NDArray[np.int64]]:
        """The tokens in the next bytes, in one or several (n,) arrays. Raises DataError for what is no shard file."""
        rest = memoryview(data)
        if self._place is None:
            rest = self._find_tokens(rest)
        tokens, rest = rest[: self._missing], rest[self._missing :]
        self._missing -= len(tokens)
        if not self._form.has_digest:
            self._crc32 = zlib.crc32(tokens, self._crc32)
        yield from self._whole(tokens)
        if len(self._after) + len(rest) > MAX_CONTAINER_BYTES:
            raise DataError(f"{self._form.name} has more bytes than a shard of its tokens can have.")
        self._after += rest

    def end(self) -> ShardFrame:
        """That was all. Raises DataError when the file is not the shard that its beginning described."""
        if self._place is None or self._missing:
            raise DataError(f"{self._form.name} is not a shard file: it ends before its tokens do.")
        start, count = self._place
        around, form = _AroundTokens(bytes(self._before), count * ITEM_BYTES, bytes(self._after)), self._form
        found = inspect_container(around, form.name, max_tokens=form.max_tokens, exact_tokens=form.exact_tokens)
        if (found.start, found.count) != (start, count):
            raise DataError(f"{self._form.name} is not a shard file: its tokens are not where its beginning says.")
        if not self._form.has_digest and found.crc32 != self._crc32:
            raise DataError(f"{self._form.name} is damaged: its tokens do not match the checksum in the file.")
        return ShardFrame(around.before, around.after, count)

    def _find_tokens(self, data: memoryview) -> memoryview:
        """Collect the beginning of the file; what of these bytes comes after it."""
        known = len(self._before)
        self._before += data[: MAX_CONTAINER_BYTES - known]
        place = expected_place(self._before)
        if place is None or place[0] > len(self._before):
            if len(self._before) == MAX_CONTAINER_BYTES:
                raise DataError(f"{self._form.name} is not a shard file: its beginning describes no tokens.")
            return data[len(data) :]
        start, count = place
        check_token_count(self._form.name, count, self._form.max_tokens, self._form.exact_tokens)
        self._place, self._missing = place, count * ITEM_BYTES
        del self._before[start:]
        return data[start - known :]

    def _whole(self, data: memoryview) -> Iterator[NDArray[np.int64]]:
        """The tokens that are complete."""
        if self._half:
            wanted = ITEM_BYTES - len(self._half)
            self._half += data[:wanted]
            data = data[wanted:]
            if len(self._half) < ITEM_BYTES:
                return
            yield np.frombuffer(self._half, dtype="<i8")
        count = len(data) // ITEM_BYTES
        self._half = bytes(data[count * ITEM_BYTES :])
        if count:
            yield np.frombuffer(data, dtype="<i8", count=count)


class _AroundTokens:
    """A shard file whose tokens cannot be read."""

    def __init__(self, before: bytes, token_bytes: int, after: bytes) -> None:
        self.before = before
        self.after = after
        self._after_at = len(before) + token_bytes
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Of the places that are asked for: from the beginning, or the end itself."""
        self._at = offset if whence == io.SEEK_SET else self._after_at + len(self.after) + offset
        return self._at

    def read(self, size: int, /) -> bytes:
        """Nothing where the tokens are."""
        if self._at < self._after_at:
            return self.before[self._at : self._at + size]
        return self.after[self._at - self._after_at : self._at - self._after_at + size]
