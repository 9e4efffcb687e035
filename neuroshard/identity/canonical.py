"""Canonical JSON, the byte form that is hashed and signed, and a strict reader for JSON from strangers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import isfinite
from typing import Any, NoReturn, cast

from neuroshard.types import JsonValue

MAX_JSON_DEPTH = 64


def canonical_json(value: JsonValue) -> bytes:
    """Sorted keys, no spaces, UTF-8, floats in shortest form: equal values give equal bytes.

    Raises ValueError for a number that is not finite and for text that is not valid Unicode.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def parse_json(data: bytes, max_bytes: int) -> JsonValue:
    """Read JSON that others wrote: at most max_bytes, no key twice, only finite numbers, only text that is Unicode.

    So whatever it gives can be written and signed again.

    Raises ValueError that says what is wrong.
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
    # what is written again must not meet the interpreter's recursion limit
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
