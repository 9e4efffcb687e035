"""Strict reading of typed fields from decoded JSON; what is not exactly as expected is named in the error."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from neuroshard.types import JsonValue

_MAX_LABEL = 200
_NOTHING: Mapping[str, JsonValue] = {}
_LOWER_HEX = re.compile(r"[0-9a-f]*")


class MalformedFieldError(ValueError):
    """A field that is missing, of the wrong type, out of range or unknown; the message names it."""


class Fields:
    """One JSON object with its place in the document; remembers which fields were read."""

    def __init__(self, value: JsonValue, place: str) -> None:
        if not isinstance(value, Mapping):
            raise MalformedFieldError(f"{place} is not an object")
        self._value = value
        self._place = place
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the field is there."""
        return name in self._value

    def integer(self, name: str, lowest: int, highest: int, default: int | None = None) -> int:
        """An integer within limits; booleans and floats are not integers."""
        if default is not None and not self.has(name):
            return default
        value = self._take(name)
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
            raise MalformedFieldError(f"{self._place}.{name} must be an integer from {lowest} to {highest}")
        return value

    def label(self, name: str) -> str:
        """A short text; numbers are spelled out, an absent field is empty (dates and versions vary in form)."""
        value = self._take(name) if self.has(name) else ""
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise MalformedFieldError(f"{self._place}.{name} must be text")
        text = str(value)
        if len(text) > _MAX_LABEL or not text.isprintable():
            raise MalformedFieldError(f"{self._place}.{name} must be printable text of at most {_MAX_LABEL} characters")
        return text

    def hexadecimal(self, name: str, byte_count: int) -> str:
        """Lower-case hex digits of exactly so many bytes."""
        return self._hex(self._take(name), f"{self._place}.{name}", byte_count)

    def hexadecimals(self, name: str, byte_count: int, count: int) -> tuple[str, ...]:
        """A list of exactly `count` such values."""
        items = self.sequence(name, count, count)
        return tuple(self._hex(item, f"{self._place}.{name}[{i}]", byte_count) for i, item in enumerate(items))

    def mapping(self, name: str) -> Mapping[str, JsonValue]:
        """An object, empty when the field is absent."""
        value = self._take(name) if self.has(name) else _NOTHING
        if not isinstance(value, Mapping):
            raise MalformedFieldError(f"{self._place}.{name} must be an object")
        return value

    def sequence(self, name: str, shortest: int, longest: int) -> Sequence[JsonValue]:
        """A list whose length is within limits."""
        value = self._take(name)
        if not isinstance(value, Sequence) or isinstance(value, str) or not shortest <= len(value) <= longest:
            wanted = str(shortest) if shortest == longest else f"{shortest} to {longest}"
            raise MalformedFieldError(f"{self._place}.{name} must be a list of {wanted} items")
        return value

    def skip(self, name: str) -> None:
        """Allow a field that is read elsewhere."""
        self._read.add(name)

    def refuse_unknown(self) -> None:
        """Raise when the object has fields nobody asked for."""
        unknown = sorted(self._value.keys() - self._read)
        if unknown:
            raise MalformedFieldError(f"{self._place} has the unknown field {unknown[0][:40]!r}")

    def _take(self, name: str) -> JsonValue:
        if name not in self._value:
            raise MalformedFieldError(f"{self._place}.{name} is missing")
        self._read.add(name)
        return self._value[name]

    @staticmethod
    def _hex(value: JsonValue, place: str, byte_count: int) -> str:
        if not isinstance(value, str) or len(value) != 2 * byte_count or not _LOWER_HEX.fullmatch(value):
            raise MalformedFieldError(f"{place} must be {2 * byte_count} lower-case hex digits")
        return value
