"""What every body shares: finite numbers, encodable text, and strict reading of what a client sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict

from neuroshard.types import JsonValue as SharedJson


def finite_or_none(value: object) -> object:
    """The value itself, or None for NaN and the infinities, which JSON cannot say."""
    return None if isinstance(value, float) and not isfinite(value) else value


def encodable(text: str) -> str:
    """Text with `?` for what UTF-8 cannot encode, such as the undecodable bytes of a file name."""
    return text.encode("utf-8", "replace").decode()


def encodable_if_text(value: object) -> object:
    """Text made encodable, anything else as it is."""
    return encodable(value) if isinstance(value, str) else value


Number = Annotated[float | None, BeforeValidator(finite_or_none)]
Text = Annotated[str, BeforeValidator(encodable_if_text)]


class Answer(BaseModel):
    """Base of what the API answers; it can be read from the frozen value of the same shape."""

    model_config = ConfigDict(from_attributes=True, frozen=True)


class Layers(Answer):
    """Layers start, start + 1, ... stop - 1."""

    start: int
    stop: int


class Question(BaseModel):
    """Base of what a client sends: exact types, no unknown members, no numbers beyond the finite ones."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def finite_json(value: SharedJson) -> SharedJson:
    """A JSON value with null for every number that JSON cannot say, and encodable texts."""
    match value:
        case str():
            return encodable(value)
        case float():
            return value if isfinite(value) else None
        case Mapping():
            return {encodable(key): finite_json(item) for key, item in value.items()}
        case Sequence():
            return [finite_json(item) for item in value]
        case _:
            return value
