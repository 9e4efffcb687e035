"""Responses as JSON: status values through their type adapters, and the bytes of a route, made once per snapshot."""

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
    """Replace by `?` what UTF-8 cannot encode, such as the undecodable bytes of a file name."""
    return text.encode("utf-8", "replace").decode()


def encodable_if_text(value: object) -> object:
    """Apply `encodable` to a text; return any other value unchanged."""
    return encodable(value) if isinstance(value, str) else value


EncodableText = Annotated[str, BeforeValidator(encodable_if_text)]


class ResponseBody(BaseModel):
    """Base class of response bodies that are not status values."""

    model_config = ConfigDict(from_attributes=True, frozen=True)


class RequestBody(BaseModel):
    """Base class of request bodies: exact types, no unknown members, only finite numbers."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def finite_json(value: SharedJson) -> SharedJson:
    """Replace every number that is not finite by null, and make every text encodable."""
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
    """The type adapter of a status value. It is cached, because building one takes milliseconds."""
    return TypeAdapter(kind)


def as_python(value: object) -> SharedJson:
    """Convert a status value to the dictionaries and lists of its JSON form."""
    plain: Any = adapter_of(type(value)).dump_python(value, by_alias=True)
    return finite_json(cast("SharedJson", plain))


def as_json(value: object) -> bytes:
    """Encode a status value as JSON. Numbers that are not finite become null."""
    try:
        return adapter_of(type(value)).dump_json(value, by_alias=True)
    except PydanticSerializationError:  # a text that UTF-8 cannot encode; this path is slower, and rare
        return json.dumps(as_python(value), ensure_ascii=False).encode()


@dataclass(frozen=True)
class Rendered:
    """A response body and its entity tag."""

    body: bytes
    tag: str


Summary = Callable[[NodeStatus], object]


def whole_status(status: NodeStatus) -> NodeStatus:
    """Everything about this node except the parts that have a route of their own."""
    return status


class RenderedViews:
    """Caches the JSON of the newest snapshot's summaries. Only one event loop may use it.

    The cache belongs to one version of the snapshot, and is emptied when that snapshot becomes too old: its stale
    values are then hidden, although its version stays the same.
    """

    def __init__(self, board: StatusBoard) -> None:
        self._board = board
        self._key = (0, False)  # version of the snapshot, and whether it is old
        self._status = board.current()
        self._rendered: dict[Summary, Rendered] = {}
        self.rendered = 0  # number of serialisations

    def get(self, summary: Summary) -> Rendered:
        """Return the JSON of a summary of the newest snapshot, from the cache if possible."""
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
        """Make the response with the summary; 304 if the client already has it, by its If-None-Match header."""
        rendered = self.get(summary)
        headers = {"ETag": rendered.tag}
        if rendered.tag in [tag.strip() for tag in request.headers.get("If-None-Match", "").split(",")]:
            return Response(status_code=304, headers=headers)
        return Response(rendered.body, media_type=JSON, headers=headers)
