"""msgpack without its loopholes: bounded depth and number of values, text keys used once, finite floats, no extensions.

The msgpack package reads the scalars; the structure is read here, because its containers are allocated from the length
that a peer claims, before one of their values was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Protocol, TypeAlias, cast

import msgpack

from neuroshard.wire.frame import MalformedFrameError, WireValue

MAX_DEPTH = 16  # containers inside containers
MAX_VALUES = 16_384  # every container, key and scalar counts
# extension types, and the one marker without a meaning
_EXTENSIONS = frozenset({0xC1, 0xC7, 0xC8, 0xC9, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8})
_Plain: TypeAlias = "bool | int | float | str | bytes | list[_Plain] | dict[str, _Plain] | None"


class _Unpacker(Protocol):
    """The part of msgpack.Unpacker that is used here; the package has no type stubs."""

    def feed(self, next_bytes: bytes) -> None: ...
    def tell(self) -> int: ...
    def unpack(self) -> object: ...
    def read_array_header(self) -> int: ...
    def read_map_header(self) -> int: ...


_new_unpacker = cast("Callable[..., _Unpacker]", msgpack.Unpacker)  # pyright: ignore[reportUnknownMemberType]


def pack(value: WireValue) -> bytes:
    """The msgpack bytes of a value. Raises MalformedFrameError for one that `unpack` would not read."""
    try:
        return cast("bytes", msgpack.packb(_Checker().plain(value, 0), use_bin_type=True))  # pyright: ignore[reportUnknownMemberType]
    except (ValueError, OverflowError) as error:  # numbers beyond 64 bits, text that is not Unicode
        raise MalformedFrameError(f"A header cannot be encoded: {error}.") from None


def unpack(data: bytes) -> WireValue:
    """Read what `pack` wrote; arrays become lists. Raises MalformedFrameError, also for bytes after the value."""
    reader = _Reader(data)
    try:
        value = reader.value(0)
    except msgpack.OutOfData:
        raise MalformedFrameError("A header ends too early.") from None
    except ValueError as error:  # text that is not UTF-8
        raise MalformedFrameError(f"A header cannot be read: {str(error)[:200]}.") from None
    if reader.position != len(data):
        raise MalformedFrameError("A header has bytes after its value.")
    return value


class _Checker:
    """Counts the values on their way to plain lists and dictionaries, with the rules that the reader has."""

    def __init__(self) -> None:
        self._count = 0

    def plain(self, value: object, depth: int) -> _Plain:
        self._count = _counted(self._count, 1)
        match value:
            case None | bool() | int() | str() | bytes():
                return value
            case float():
                return _finite(value)
            case Mapping():
                return self._plain_map(cast("Mapping[object, object]", value), _deeper(depth))
            case Sequence() if not isinstance(value, bytearray | memoryview):
                inner = _deeper(depth)
                return [self.plain(item, inner) for item in cast("Sequence[object]", value)]
            case _:
                raise MalformedFrameError(f"A header cannot hold a value of type {type(value).__name__}.")

    def _plain_map(self, value: Mapping[object, object], depth: int) -> dict[str, _Plain]:
        self._count = _counted(self._count, len(value))
        return {_text_key(key): self.plain(item, depth) for key, item in value.items()}


class _Reader:
    """One pass over the bytes; a container is never larger than the bytes that are left could fill."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._count = 0
        self._unpacker = _new_unpacker(max_buffer_size=max(1, len(data)))
        self._unpacker.feed(data)

    @property
    def position(self) -> int:
        """Bytes read so far."""
        return self._unpacker.tell()

    def value(self, depth: int) -> WireValue:
        """The next value. Raises ValueError (MalformedFrameError for a broken rule) or msgpack.OutOfData."""
        self._count = _counted(self._count, 1)
        position = self.position
        if position >= len(self._data):
            raise MalformedFrameError("A header ends too early.")
        marker = self._data[position]
        if 0x80 <= marker <= 0x8F or marker in {0xDE, 0xDF}:
            return self._map(_deeper(depth))
        if 0x90 <= marker <= 0x9F or marker in {0xDC, 0xDD}:
            inner = _deeper(depth)
            return [self.value(inner) for _ in range(self._claimed(self._unpacker.read_array_header(), 1))]
        if marker in _EXTENSIONS:
            raise MalformedFrameError("A header holds a value of an unknown type.")
        scalar = self._unpacker.unpack()
        return _finite(scalar) if isinstance(scalar, float) else cast("WireValue", scalar)

    def _map(self, depth: int) -> dict[str, WireValue]:
        result: dict[str, WireValue] = {}
        for _ in range(self._claimed(self._unpacker.read_map_header(), 2)):
            key = _text_key(self.value(depth))
            if key in result:
                raise MalformedFrameError(f"A header names {key[:64]!r} twice.")
            result[key] = self.value(depth)
        return result

    def _claimed(self, length: int, bytes_each: int) -> int:
        if length * bytes_each > len(self._data) - self.position:
            raise MalformedFrameError("A header claims more values than it has bytes.")
        return length


def _counted(count: int, more: int) -> int:
    if count + more > MAX_VALUES:
        raise MalformedFrameError(f"A header holds more than {MAX_VALUES} values.")
    return count + more


def _deeper(depth: int) -> int:
    if depth == MAX_DEPTH:
        raise MalformedFrameError(f"A header is nested deeper than {MAX_DEPTH} levels.")
    return depth + 1


def _finite(value: float) -> float:
    if not isfinite(value):
        raise MalformedFrameError("A header holds a number that is not finite.")
    return value


def _text_key(key: object) -> str:
    if not isinstance(key, str):
        raise MalformedFrameError("A header has a key that is not text.")
    return key
