"""Refusals of the organiser: one error with a stable code, and its RFC 9457 problem document. Pure."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from neuroshard.errors import NeuroShardError

PROBLEM_TYPE = "application/problem+json"


class OrganiserError(NeuroShardError):
    """A request that the organiser does not fulfil: status, stable code, what happened, and the action to take."""

    def __init__(self, status: int, code: str, message: str, action: str, retry_after_seconds: int = 0) -> None:
        super().__init__(message, action)
        self.status = status
        self.code = code
        self.retry_after_seconds = retry_after_seconds


def problem_document(refused: OrganiserError, path: str, now: float) -> dict[str, Any]:
    """Return the problem document of a refusal, with the time of the server in seconds since 1970."""
    return {
        "type": f"urn:neuroshard:organiser:{refused.code}",
        "title": HTTPStatus(refused.status).phrase,
        "status": refused.status,
        "detail": refused.message,
        "instance": path,
        "code": refused.code,
        "action": refused.action,
        "server_time": now,
    }
