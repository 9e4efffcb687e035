"""RunParameters as JSON and back: the form that is hashed, signed and sent.

A field that names the format it came with (`since` in its metadata) is left out while it has its default, so that runs
older than the field keep their id and their signature.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from neuroshard.config.run_parameters import GenesisPins, RunParameters
from neuroshard.errors import DataError
from neuroshard.identity.fields import flag_field, number_field, object_fields, text_field
from neuroshard.identity.run_checks import check_architecture, check_digests, check_parameters
from neuroshard.types import Architecture, JsonValue

MAX_TEXT_CHARACTERS = 256
MAX_LIST_ITEMS = 64
_MAX_INTEGER = 2**63 - 1
_Value = TypeVar("_Value")
_Field = dataclasses.Field[Any]


class RunParametersError(DataError):
    """Parameters of a run that are malformed; the message names the field."""


def run_parameters_to_json(parameters: RunParameters) -> Mapping[str, JsonValue]:
    """Every field by name; fields that are real numbers are written as such even when whole."""
    return _object_of(parameters)


def run_parameters_from_json(value: JsonValue) -> RunParameters:
    """Strict reading. Raises RunParametersError that names a missing, unknown or wrong field."""
    try:
        parameters = _read_object(RunParameters, value, "run parameters")
        check_parameters(parameters)
    except ValueError as error:
        raise RunParametersError(f"The parameters of the run cannot be used: {error}.") from None
    return parameters


def genesis_pins_from_json(value: JsonValue) -> GenesisPins:
    """Strict reading of the pins alone. Raises RunParametersError that names a missing, unknown or wrong field."""
    try:
        pins = _read_object(GenesisPins, value, "genesis")
        check_digests(pins)
    except ValueError as error:
        raise RunParametersError(f"The pinned data cannot be used: {error}.") from None
    return pins


def architecture_from_json(value: JsonValue) -> Architecture:
    """Strict reading of the architecture alone. Raises RunParametersError that names a missing or wrong size."""
    try:
        shape = _read_object(Architecture, value, "architecture")
        check_architecture(shape)
    except ValueError as error:
        raise RunParametersError(f"The architecture cannot be used: {error}.") from None
    return shape


def _object_of(value: Any) -> dict[str, JsonValue]:
    hints = _kinds_of(cast("type[Any]", type(value)))
    written: dict[str, JsonValue] = {}
    for item in dataclasses.fields(value):
        kind = hints[item.name]
        entry = _json_of(getattr(value, item.name), kind)
        if not (_came_later(item) and entry == _json_of(_default_of(item), kind)):
            written[item.name] = entry
    return written


@cache
def _kinds_of(kind: type[Any]) -> Mapping[str, Any]:
    """The types of a dataclass's fields; to find them means to compile their annotations."""
    return get_type_hints(kind)


def _json_of(value: Any, kind: Any) -> JsonValue:
    if dataclasses.is_dataclass(value):
        return _object_of(value)
    if isinstance(value, tuple):
        return list(cast("Sequence[JsonValue]", value))
    # 1 and 1.0 are equal parameters, so they must have equal bytes and one run id
    return float(value) if kind is float else value


def _came_later(item: _Field) -> bool:
    return "since" in item.metadata


def _default_of(item: _Field) -> Any:
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def _read_object(kind: type[_Value], value: JsonValue, where: str) -> _Value:
    hints = _kinds_of(kind)
    items = dataclasses.fields(cast("Any", kind))
    optional = {item.name for item in items if _came_later(item)}
    fields = object_fields(value, {item.name for item in items} - optional, optional, where)
    return kind(**{name: _read_value(hints[name], fields[name], name) for name in fields})


def _read_value(kind: Any, value: JsonValue, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _read_object(cast("type[Any]", kind), value, where)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{where} must be one of {', '.join(map(str, get_args(kind)))}")
        return value
    if get_origin(kind) in (Union, UnionType):
        (inner,) = (case for case in get_args(kind) if case is not NoneType)
        return None if value is None else _read_value(inner, value, where)
    if get_origin(kind) is tuple:
        return _read_list(get_args(kind)[0], value, where)
    return _read_plain(kind, value, where)


def _read_plain(kind: Any, value: JsonValue, where: str) -> bool | int | float | str:
    if kind is float:
        return number_field(value, where)
    if kind is str:
        return text_field(value, MAX_TEXT_CHARACTERS, where)
    if kind is bool:
        return flag_field(value, where)
    if kind is not int:
        raise TypeError(f"run parameters have no reader for {kind}")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_INTEGER:
        raise ValueError(f"{where} must be a whole number from 0 to {_MAX_INTEGER}")
    return value


def _read_list(kind: Any, value: JsonValue, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > MAX_LIST_ITEMS:
        raise ValueError(f"{where} must be a list of at most {MAX_LIST_ITEMS} items")
    return tuple(_read_value(kind, item, f"an item of {where}") for item in value)
