"""The outermost layer of the application: access, body limits, security headers and the last error handler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neuroshard.api.access import AccessPolicy, RequestFacts
from neuroshard.api.context import ApiLimits
from neuroshard.api.problems import BodyTooLargeError, HeadersTooLargeError, RequestTooSlowError, problem_of, render
from neuroshard.errors import NeuroShardError

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-security-policy", CONTENT_SECURITY_POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
NO_STORE = (b"cache-control", b"no-store")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Guard:
    """ASGI middleware that checks every request before any route, and answers errors that no route has handled."""

    app: ASGIApp
    access: AccessPolicy
    limits: ApiLimits
    clock: Callable[[], float]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # the API has no WebSockets
            return
        response = GuardedResponse(send)
        facts = RequestFacts.of(scope)
        try:
            refuse_long_headers(facts, self.limits)
            has_key = self.access.check(facts, self.clock())
            scope.setdefault("state", {})["has_key"] = has_key  # `request.state.has_key` in the routes
            bounded = await bounded_body(facts, receive, self.limits)
            await self.app(scope, bounded, response.send)
        except Exception as error:
            if not isinstance(error, NeuroShardError):
                logger.exception("unexpected error in the API", extra={"path": scope["path"]})
            if response.started:
                return  # too late for an answer; the server closes the connection
            problem = render(problem_of(error), scope["path"])
            if has_body(facts):
                problem.headers["connection"] = "close"  # the rest of the body will not be read
            await problem(scope, receive, response.send)


class GuardedResponse:
    """Adds the security headers to a response and remembers whether it has started."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def send(self, message: Message) -> None:
        """Forward a message of the response, with the security headers added to its start."""
        if message["type"] == "http.response.start":
            self.started = True
            headers: list[tuple[bytes, bytes]] = [*message.get("headers", ()), *SECURITY_HEADERS]
            if not any(name.lower() == b"cache-control" for name, _ in headers):
                headers.append(NO_STORE)
            message = {**message, "headers": headers}
        await self._send(message)


def refuse_long_headers(facts: RequestFacts, limits: ApiLimits) -> None:
    """Raise HeadersTooLargeError if all headers together are longer than `limits.header_bytes`."""
    if sum(len(name) + len(value) for name, value in facts.headers) > limits.header_bytes:
        raise HeadersTooLargeError(f"The headers are longer than {limits.header_bytes:,} bytes.")


def has_body(facts: RequestFacts) -> bool:
    """Whether the request announces a body."""
    return bool(facts.all("transfer-encoding")) or (facts.one("content-length") or "0") != "0"


async def bounded_body(facts: RequestFacts, receive: Receive, limits: ApiLimits) -> Receive:
    """Read the body, at most `limits.body_bytes` within `limits.body_seconds`, and return a receive that replays it.

    Raises BodyTooLargeError, without reading if the announced length is too large, and RequestTooSlowError.
    """
    if not has_body(facts):
        return receive
    length = facts.one("content-length") or "0"
    if not (length.isascii() and length.isdigit()) or int(length) > limits.body_bytes:
        raise BodyTooLargeError(f"The body is larger than {limits.body_bytes:,} bytes.")
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            more = True
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    return replayed(message, receive)
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > limits.body_bytes:
                    raise BodyTooLargeError(f"The body is larger than {limits.body_bytes:,} bytes.")
    except TimeoutError as error:
        raise RequestTooSlowError(f"The body did not arrive within {limits.body_seconds:g} s.") from error
    return replayed({"type": "http.request", "body": bytes(body), "more_body": False}, receive)


def replayed(first: Message, receive: Receive) -> Receive:
    """Make a receive that returns `first` once and then continues with the real one."""
    waiting = [first]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_again
