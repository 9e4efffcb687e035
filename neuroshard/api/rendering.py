"""Answers as JSON: finite numbers, encodable text, and the bytes of a view, made once per version of the snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict
from starlette.responses import Response

from neuroshard.status.board import StatusBoard
from neuroshard.status.snapshot import NodeStatus
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


class ResponseBody(BaseModel):
    """Base of what the API answers; it can be read from the frozen value of the same shape."""

    model_config = ConfigDict(from_attributes=True, frozen=True)


class Layers(ResponseBody):
    """Layers start, start + 1, ... stop - 1."""

    start: int
    stop: int


class RequestBody(BaseModel):
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


JSON = "application/json"
View = Callable[[NodeStatus], ResponseBody]


class RenderedViews:
    """Bytes of views of the newest snapshot; used by one event loop only."""

    def __init__(self, board: StatusBoard) -> None:
        self._board = board
        self._version = 0
        self._bytes: dict[View, bytes] = {}
        self.rendered = 0  # how often a view was really serialised

    def get(self, view: View) -> bytes:
        """JSON of the view of the newest snapshot."""
        version, status = self._board.versioned()
        if version != self._version:
            self._version = version
            self._bytes.clear()
        if view not in self._bytes:
            self.rendered += 1
            self._bytes[view] = view(status).model_dump_json().encode()
        return self._bytes[view]

    def respond(self, view: View) -> Response:
        """The view as an answer."""
        return Response(self.get(view), media_type=JSON)
