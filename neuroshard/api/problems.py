"""Errors as RFC 9457 problem documents. One table maps error classes to HTTP status codes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from neuroshard.errors import (
    CheckpointError,
    ConflictError,
    ContextLengthError,
    DataError,
    DataUnavailableError,
    DiskFullError,
    NetworkRefusedError,
    NeuroShardError,
    NotReadyError,
    StorageError,
    TokenError,
    UsageError,
)

MEDIA_TYPE = "application/problem+json"
NO_SUCH_PAGE = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>No such page - NeuroShard</title></head><body><main>
<h1>There is no such page</h1>
<p>This is a NeuroShard node, but it has nothing at this address.</p>
<p><a href="/">Open the dashboard</a>, or read <a href="/docs">all routes</a>.</p>
</main></body></html>
"""
MOST_DETAIL_CHARACTERS = 1_000
MOST_ERRORS = 32  # of one body, in the answer


class AccessDeniedError(NeuroShardError):
    """The request comes from a foreign page, or names a host that is not this node."""


class MissingSecretError(NeuroShardError):
    """The request has no API secret or session, or a wrong one."""


class BodyTooLargeError(NeuroShardError):
    """The request body is larger than the limit."""


class HeadersTooLargeError(NeuroShardError):
    """The request headers are longer than the limit."""


class RequestTooSlowError(NeuroShardError):
    """The request body did not arrive in time."""


class UnknownModelError(NeuroShardError):
    """A completion names a model that this node does not have."""


class TooManyRequestsError(NeuroShardError):
    """More completions are running at once than the limit allows."""


class WrongFieldsError(UsageError):
    """Some fields of a form have wrong values; `fields` contains (name, message) for each."""

    def __init__(self, *fields: tuple[str, str]) -> None:
        super().__init__(" ".join(message for _, message in fields))
        self.fields = fields


class CommandTimeoutError(NeuroShardError):
    """The node did not answer a command within its deadline. The command may still be carried out."""


# From special to general: the first class that matches decides.
STATUS_OF_ERROR: tuple[tuple[type[NeuroShardError], int], ...] = (
    (AccessDeniedError, 403),
    (MissingSecretError, 401),
    (BodyTooLargeError, 413),
    (HeadersTooLargeError, 431),
    (RequestTooSlowError, 408),
    (UnknownModelError, 404),
    (TooManyRequestsError, 429),
    (CommandTimeoutError, 504),
    (NotReadyError, 503),
    (DataUnavailableError, 503),
    (DiskFullError, 507),
    (ConflictError, 409),
    (ContextLengthError, 400),  # the status that clients of OpenAI's API look for
    (UsageError, 422),
    (TokenError, 422),
    (CheckpointError, 500),
    (StorageError, 500),
    (DataError, 500),
    (NetworkRefusedError, 502),
    (NeuroShardError, 500),
)
HEADERS_OF_STATUS: Mapping[int, Mapping[str, str]] = {
    401: {"WWW-Authenticate": 'Bearer realm="NeuroShard"'},
    408: {"Connection": "close"},
    413: {"Connection": "close"},
    431: {"Connection": "close"},
    429: {"Retry-After": "2"},
    503: {"Retry-After": "5"},
}


class ProblemError(BaseModel):
    """One wrong member of a request."""

    location: str
    message: str


class ProblemBody(BaseModel):
    """RFC 9457 problem document. `action` is what to do; `error` has OpenAI's format and exists only below /v1."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    action: str | None = None
    errors: list[ProblemError] | None = None
    error: dict[str, str | None] | None = None


@dataclass(frozen=True)
class Problem:
    """An error response before it is encoded."""

    status: int
    detail: str
    action: str = ""
    kind: str = "about:blank"
    errors: tuple[tuple[str, str], ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def problem_of(error: Exception) -> Problem:
    """Convert an error to a problem. Details of an unexpected error are not shown to the client."""
    match error:
        case NeuroShardError():
            status = next(status for kind, status in STATUS_OF_ERROR if isinstance(error, kind))
            fields = error.fields if isinstance(error, WrongFieldsError) else ()
            return Problem(status, error.message, error.action, kind=_kind(error), errors=fields)
        case HTTPException():
            return Problem(error.status_code, str(error.detail), headers=error.headers or {})
        case RequestValidationError():
            errors = tuple((_location(entry["loc"]), _fault(entry)) for entry in error.errors()[:MOST_ERRORS])
            return Problem(422, "; ".join(f"{where}: {what}" for where, what in errors), errors=errors)
        case _:
            return Problem(500, "The node met an unexpected error.", "The log has more information.")


def render(problem: Problem, path: str) -> Response:
    """Encode the problem document as the response to a request for `path`."""
    title = HTTPStatus(problem.status).phrase
    detail = problem.detail[:MOST_DETAIL_CHARACTERS]
    body: dict[str, object] = {
        "type": problem.kind,
        "title": title,
        "status": problem.status,
        "detail": detail,
        "instance": path,
    }
    if problem.action:
        body["action"] = problem.action
    if problem.errors:
        body["errors"] = [{"location": where, "message": what} for where, what in problem.errors[:32]]
    if path.startswith("/v1/"):  # clients of OpenAI's API read this member
        body["error"] = openai_error(problem)
    headers = {**HEADERS_OF_STATUS.get(problem.status, {}), **problem.headers}
    # ASCII escapes: any text of the client, even half a surrogate pair, can be sent back to it.
    return Response(json.dumps(body, ensure_ascii=True), problem.status, headers, MEDIA_TYPE)


def openai_error(problem: Problem) -> dict[str, str | None]:
    """Convert a problem to the error object of OpenAI's API."""
    kind = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    fallback = "invalid_request_error" if problem.status < 500 else "server_error"
    code, param = OPENAI_CODES.get(problem.kind.removeprefix(KIND_PREFIX), (None, None))
    if problem.errors:  # "body.prompt.str" is the member "prompt"
        param = problem.errors[0][0].removeprefix("body.").partition(".")[0]
    message = f"{problem.detail} {problem.action}".strip()[:MOST_DETAIL_CHARACTERS]
    return {"message": message, "type": kind.get(problem.status, fallback), "param": param, "code": code}


KIND_PREFIX = "urn:neuroshard:problem:"
# kind of the problem -> code and member in OpenAI's API
OPENAI_CODES: Mapping[str, tuple[str, str | None]] = {
    "unknown-model": ("model_not_found", "model"),
    "context-length": ("context_length_exceeded", "prompt"),
    "missing-secret": ("invalid_api_key", None),
    "too-many-requests": ("rate_limit_exceeded", None),
}


def answer_errors(app: FastAPI) -> None:
    """Register handlers that answer the errors of routes and of their validation with problem documents."""

    async def respond(request: Request, error: Exception) -> Response:
        problem, path = problem_of(error), request.url.path
        is_page = problem.status == 404 and not path.startswith(("/api/", "/v1/"))
        if is_page and "text/html" in request.headers.get("accept", ""):
            return Response(NO_SUCH_PAGE, problem.status, media_type="text/html; charset=utf-8")
        return render(problem, path)

    for kind in (NeuroShardError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, respond)


def _kind(error: NeuroShardError) -> str:
    """Stable URN of the error's class: UnknownModelError is urn:neuroshard:problem:unknown-model."""
    name = type(error).__name__.removesuffix("Error")
    words = "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name)
    return f"{KIND_PREFIX}{words.lstrip('-')}"


# type of a fault in pydantic -> sentence about it, with its limits
FAULTS: Mapping[str, str] = {
    "string_too_long": "Use at most {max_length} characters.",
    "string_too_short": "Use at least {min_length} characters.",
    "greater_than": "Use more than {gt:g}.",
    "greater_than_equal": "Use at least {ge:g}.",
    "less_than": "Use less than {lt:g}.",
    "less_than_equal": "Use at most {le:g}.",
    "int_type": "Use a whole number.",
    "int_parsing": "Use a whole number.",
    "int_from_float": "Use a whole number.",
    "float_type": "Use a number.",
    "float_parsing": "Use a number.",
    "finite_number": "Use a number.",
    "missing": "This member is missing.",
}


def _fault(entry: Mapping[str, Any]) -> str:
    """Describe the fault of one member of a request in words that the dashboard shows next to a field."""
    words = FAULTS.get(entry["type"])
    return str(entry["msg"]) if words is None else words.format_map(entry.get("ctx", {}))


def _location(parts: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in parts)
