"""Strict reading of JSON objects: every field named, none missing, none unknown."""

from __future__ import annotations

from collections.abc import Mapping

from neuroshard.types import JsonValue

MAX_NUMBER = 10**300


def exact_object(value: JsonValue, names: set[str], where: str) -> Mapping[str, JsonValue]:
    """`value` as an object with exactly these fields. Raises ValueError that names the missing or unknown one."""
    return object_fields(value, names, set(), where)


def object_fields(value: JsonValue, names: set[str], optional: set[str], where: str) -> Mapping[str, JsonValue]:
    """`value` as an object with these fields and perhaps the optional ones. Raises ValueError as exact_object does."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a JSON object")  # noqa: TRY004 - malformed input, not a wrong call
    for name in sorted(names - value.keys()):
        raise ValueError(f"{where} lacks the field {name!r}")
    for name in sorted(value.keys() - names - optional):
        raise ValueError(f"{where} has the unknown field {name[:40]!r}")
    return value


def hex_field(value: JsonValue, length: int, where: str) -> bytes:
    """Exactly `length` bytes written in lower-case hex digits. Raises ValueError that names the field."""
    if not isinstance(value, str) or len(value) != 2 * length or value != value.lower():
        raise ValueError(f"{where} must be {2 * length} lower-case hex digits")
    try:
        data = bytes.fromhex(value)
    except ValueError:
        raise ValueError(f"{where} must be {2 * length} lower-case hex digits") from None
    if len(data) != length:  # fromhex skips spaces
        raise ValueError(f"{where} must be {2 * length} lower-case hex digits")
    return data


def number_field(value: JsonValue, where: str) -> float:
    """A finite number. Raises ValueError that names the field."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where} must be a number")  # noqa: TRY004 - malformed input, not a wrong call
    if abs(value) > MAX_NUMBER:  # a whole number may be too large for a float
        raise ValueError(f"{where} is too large a number")
    return float(value)


def flag_field(value: JsonValue, where: str) -> bool:
    """True or false. Raises ValueError that names the field."""
    if not isinstance(value, bool):
        raise ValueError(f"{where} must be true or false")  # noqa: TRY004 - malformed input, not a wrong call
    return value


def text_field(value: JsonValue, max_characters: int, where: str) -> str:
    """Text of at most so many characters. Raises ValueError that names the field."""
    if not isinstance(value, str) or len(value) > max_characters:
        raise ValueError(f"{where} must be text of at most {max_characters} characters")
    return value
