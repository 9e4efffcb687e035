"""JSON from and for strangers: the canonical bytes to sign, a strict parser, and strict readers of fields.

The readers check that every field is named, every number is finite and every text is short.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, NoReturn, cast

from neuroshard.types import JsonValue

MAX_JSON_DEPTH = 64


def canonical_json(value: JsonValue) -> bytes:
    """Return JSON with sorted keys, no spaces, UTF-8 and shortest floats: equal values give equal bytes.

    Raises ValueError for a number that is not finite and for text that is not valid Unicode.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def parse_json(data: bytes, max_bytes: int) -> JsonValue:
    """Read JSON from strangers: at most `max_bytes`, unique keys, finite numbers and valid Unicode only.

    The result can therefore be written and signed again. Raises ValueError that gives the reason.
    """
    if len(data) > max_bytes:
        raise ValueError(f"{len(data)} bytes of JSON, at most {max_bytes} are allowed")
    try:
        value = json.loads(
            data.decode(),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except RecursionError:
        raise ValueError("JSON is nested too deeply") from None
    _check_depth(value)
    if b"\\u" in data:  # only an escape can stand for half a surrogate pair
        _check_unicode(value)
    return cast("JsonValue", value)


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_JSON_DEPTH):
        if not level:
            return
        level = [child for item in level for child in _children(item)]
    # writing the value again must not reach the interpreter's recursion limit
    raise ValueError(f"JSON is nested more than {MAX_JSON_DEPTH} deep")


def _check_unicode(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("JSON has text that is not Unicode") from None


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).values()
    return cast("list[Any]", value) if isinstance(value, list) else ()


def _unique_keys(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a JSON object has one key twice")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def exact_object(value: JsonValue, names: set[str], where: str) -> Mapping[str, JsonValue]:
    """Return `value` as an object with exactly these fields. Raises ValueError that names the wrong field."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a JSON object")  # noqa: TRY004 - malformed input, not a wrong call
    for name in sorted(names - value.keys()):
        raise ValueError(f"{where} does not have the field {name!r}")
    for name in sorted(value.keys() - names):
        raise ValueError(f"{where} has the unknown field {name[:40]!r}")
    return value


def flag_field(value: JsonValue, where: str) -> bool:
    """Read true or false. Raises ValueError that names the field."""
    if not isinstance(value, bool):
        raise ValueError(f"{where} must be true or false")  # noqa: TRY004 - malformed input, not a wrong call
    return value


def text_field(value: JsonValue, max_characters: int, where: str) -> str:
    """Read text of at most `max_characters`. Raises ValueError that names the field."""
    if not isinstance(value, str) or len(value) > max_characters:
        raise ValueError(f"{where} must be text of at most {max_characters} characters")
    return value
