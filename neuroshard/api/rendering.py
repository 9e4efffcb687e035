"""Answers as JSON: status values through their type adapters, and the bytes of a route, made once per snapshot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from math import isfinite
from typing import Annotated, Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter
from pydantic_core import PydanticSerializationError
from starlette.requests import Request
from starlette.responses import Response

from neuroshard.status.board import StatusBoard
from neuroshard.status.freshness import fresh, is_old
from neuroshard.status.snapshot import NodeStatus
from neuroshard.types import JsonValue as SharedJson


def encodable(text: str) -> str:
    """Text with `?` for what UTF-8 cannot encode, such as the undecodable bytes of a file name."""
    return text.encode("utf-8", "replace").decode()


def encodable_if_text(value: object) -> object:
    """Text made encodable, anything else as it is."""
    return encodable(value) if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(encodable_if_text)]


class ResponseBody(BaseModel):
    """Base of the answers that are not status values."""

    model_config = ConfigDict(from_attributes=True, frozen=True)


class RequestBody(BaseModel):
    """Base of what a client sends: exact types, no unknown members, no numbers beyond the finite ones."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def finite_json(value: SharedJson) -> SharedJson:
    """A JSON value with null for every number that JSON cannot represent, and encodable texts."""
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


@cache
def adapter_of(kind: type[Any]) -> TypeAdapter[Any]:
    """The type adapter of a status value; building one takes milliseconds."""
    return TypeAdapter(kind)


def as_python(value: object) -> SharedJson:
    """A status value as plain dictionaries and lists, as JSON shows it."""
    plain: Any = adapter_of(type(value)).dump_python(value, by_alias=True)
    return finite_json(cast("SharedJson", plain))


def as_json(value: object) -> bytes:
    """A status value as JSON. Numbers that are not finite are null."""
    try:
        return adapter_of(type(value)).dump_json(value, by_alias=True)
    except PydanticSerializationError:  # text that UTF-8 cannot encode: slower, and rare
        return json.dumps(as_python(value), ensure_ascii=False).encode()


@dataclass(frozen=True)
class Rendered:
    """A body and its entity tag."""

    body: bytes
    tag: str


Summary = Callable[[NodeStatus], object]


def whole_status(status: NodeStatus) -> NodeStatus:
    """Everything about this node except what has a route of its own."""
    return status


class RenderedViews:
    """JSON of summaries of the newest snapshot; used by one event loop only."""

    def __init__(self, board: StatusBoard) -> None:
        self._board = board
        self._key = (0, False)  # version of the snapshot, and whether it is old
        self._status = board.current()
        self._rendered: dict[Summary, Rendered] = {}
        self.rendered = 0  # number of serialisations

    def get(self, summary: Summary) -> Rendered:
        """The summary of the newest snapshot."""
        version, status = self._board.versioned()
        age = self._board.age()
        if (key := (version, is_old(age))) != self._key:
            self._key, self._status = key, fresh(status, age)
            self._rendered.clear()
        if summary not in self._rendered:
            self.rendered += 1
            body = as_json(summary(self._status))
            self._rendered[summary] = Rendered(body, f'"{sha256(body).hexdigest()[:24]}"')
        return self._rendered[summary]

    def respond(self, request: Request, summary: Summary) -> Response:
        """The summary as an answer; 304 for a client that has it already."""
        rendered = self.get(summary)
        headers = {"ETag": rendered.tag}
        if rendered.tag in [tag.strip() for tag in request.headers.get("If-None-Match", "").split(",")]:
            return Response(status_code=304, headers=headers)
        return Response(rendered.body, media_type=JSON, headers=headers)
