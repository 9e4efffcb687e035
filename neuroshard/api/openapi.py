"""What the OpenAPI document says about every route."""

from __future__ import annotations

from typing import Any, Final

from neuroshard.api.problems import MEDIA_TYPE, ProblemBody

DESCRIPTION: Final = (
    "Read-only routes answer from an immutable snapshot of the node. Routes that change something need "
    "`Authorization: Bearer SECRET` with the secret from the file `api-secret` in the node's data folder. "
    "Numbers that are not finite are null. Errors are RFC 9457 problem documents."
)

WORDS: Final[dict[int, str]] = {
    400: "The request cannot be read",
    401: "The API secret is missing or wrong",
    403: "The request comes from a foreign page or names another host",
    404: "There is no such thing",
    405: "The route has no such method",
    408: "The body came too slowly",
    413: "The body is too large",
    422: "The request does not say what is needed",
    429: "Too much at once",
    431: "The headers are too long",
    500: "The node met an error",
    503: "The node is not ready",
    504: "The node did not answer in time",
    507: "The disk is full",
}
PROBLEM_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"description": words, "model": ProblemBody, "content": {MEDIA_TYPE: {}}} for status, words in WORDS.items()
}
