"""Strict reading of what strangers claim: every number in its range, every text printable, every list short."""

from __future__ import annotations

import re
from collections.abc import Sequence

from neuroshard.identity.fields import number_field, text_field
from neuroshard.types import JsonValue, LayerRange, Role, RunId

MAX_LAYERS = 4096
_HASH = re.compile(r"[0-9a-f]{64}")
_PRINTABLE = re.compile(r"[ -~]*")


def whole_field(value: JsonValue, low: int, high: int, where: str) -> int:
    """A whole number in [low, high]. Raises ValueError that names the field."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{where} must be a whole number from {low} to {high}")
    return value


def real_field(value: JsonValue, low: float, high: float, where: str) -> float:
    """A number in [low, high]. Raises ValueError that names the field."""
    number = number_field(value, where)
    if not low <= number <= high:
        raise ValueError(f"{where} must be from {low:g} to {high:g}")
    return number


def line_field(value: JsonValue, max_characters: int, where: str) -> str:
    """Printable ASCII text. Raises ValueError that names the field."""
    text = text_field(value, max_characters, where)
    if not _PRINTABLE.fullmatch(text):
        raise ValueError(f"{where} must be printable ASCII text")
    return text


def list_field(value: JsonValue, max_items: int, where: str) -> Sequence[JsonValue]:
    """A list of at most so many items. Raises ValueError that names the field."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) > max_items:
        raise ValueError(f"{where} must be a list of at most {max_items} items")
    return value


def run_field(value: JsonValue, where: str) -> RunId:
    """A run id. Raises ValueError that names the field."""
    return RunId(hash_field(value, where))


def hash_field(value: JsonValue, where: str) -> str:
    """64 lower-case hex digits. Raises ValueError that names the field."""
    if not isinstance(value, str) or not _HASH.fullmatch(value):
        raise ValueError(f"{where} must be 64 lower-case hex digits")
    return value


def layers_field(value: JsonValue, where: str) -> LayerRange | None:
    """[first layer, first layer after them], or null for none. Raises ValueError that names the field."""
    if value is None:
        return None
    bounds = list_field(value, 2, where)
    numbers = [whole_field(bound, 0, MAX_LAYERS, where) for bound in bounds]
    if len(numbers) != 2 or numbers[0] >= numbers[1]:
        raise ValueError(f"{where} must be the first layer and a larger number, the first one after them")
    return LayerRange(numbers[0], numbers[1])


def layers_to_json(layers: LayerRange | None) -> JsonValue:
    """What `layers_field` reads."""
    return None if layers is None else [layers.start, layers.stop]


def roles_field(value: JsonValue, where: str) -> tuple[Role, ...]:
    """Distinct roles. Raises ValueError that names the field."""
    names = list_field(value, len(Role), where)
    if len(set(map(repr, names))) != len(names) or not all(name in tuple(Role) for name in names):
        raise ValueError(f"{where} must be distinct roles: {', '.join(Role)}")
    return tuple(Role(name) for name in names)
