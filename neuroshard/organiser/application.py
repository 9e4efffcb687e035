"""The organiser's web application: join, poll, refresh and leave, and what the public may read about the run.

Bodies of signed claims are the bytes that a node signs. One worker thread calls the desk, so there is one writer.
Errors are RFC 9457 problem documents with `code`, `action` and `server_time`.
"""

from __future__ import annotations

import json
import logging
import math
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final, TypeVar

from anyio import CapacityLimiter, fail_after
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from msgspec import Meta, Struct
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response

from neuroshard import __version__
from neuroshard.decoders import read_json
from neuroshard.identity.admissions import MAX_JOIN_BYTES
from neuroshard.organiser.desk import AdmissionDesk, Admitted, Queued, RunPlan, WaitingState
from neuroshard.organiser.monitor import RunMonitor
from neuroshard.organiser.port_check import PortChecks
from neuroshard.organiser.public import SECURITY_HEADERS, NewestRun, PublicFacts, public_routes
from neuroshard.organiser.rates import JoinRate
from neuroshard.organiser.refusals import PROBLEM_TYPE, OrganiserError, problem_document
from neuroshard.organiser.seeds import SeedBook
from neuroshard.types import is_loopback

_LOG = logging.getLogger(__name__)

BODY_SECONDS = 10.0
MAX_POLL_BYTES = 1024
RETRY_SECONDS = 30
MEDIA: Final = "application/vnd.msgpack"
# of proxies; Uvicorn takes the client's address from the first one, if the proxy is on this computer
FORWARDED_HEADERS: Final = frozenset(("x-forwarded-for", "x-forwarded-proto", "x-real-ip", "forwarded", "via"))
_PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"description": words, "content": {PROBLEM_TYPE: {}}}
    for status, words in {
        400: "The body cannot be read, or is for another run",
        401: "The signature, the date or the session is not valid",
        403: "The node or its wallet may not join",
        404: "The node has no place, or the request is unknown",
        409: "The name is taken",
        413: "The body is too large",
        429: "Too many joins from one network",
        503: "The database cannot be written",
    }.items()
}
_CLAIM: Final = {"requestBody": {"required": True, "content": {MEDIA: {"schema": {"type": "string"}}}}}
_POLL: Final = {"requestBody": {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}}
T = TypeVar("T")


class PollRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The question of a waiting node. The statement about its download is checked, and not used."""

    request_id: Annotated[str, Meta(max_length=64)]
    session_token: Annotated[str, Meta(max_length=64)]
    download_eta_seconds: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    download_finished: bool = False


@dataclass
class OrganiserContext:
    """Everything that the routes may use."""

    plan: RunPlan
    desk: AdmissionDesk
    now: Callable[[], float]
    monotonic: Callable[[], float]
    warning: str = ""  # about the database at the start
    monitor: RunMonitor | None = None
    joins: JoinRate = field(default_factory=JoinRate)
    seeds: SeedBook = field(default_factory=SeedBook)
    checks: PortChecks | None = None  # None: no node is checked from outside
    newest: NewestRun | None = None  # None: the run of the plan has no later version
    trusts_proxy: bool = False  # the proxy in front writes the sender's address into X-Forwarded-For by itself
    offload: Callable[[Callable[[], Any]], Awaitable[Any]] | None = None  # None: in a worker thread
    _writer: CapacityLimiter | None = field(default=None, init=False)

    async def ask(self, act: Callable[[], T]) -> T:
        """Call the desk in the worker thread, one call at a time. A client that leaves does not end the call."""
        writer = self._writer = self._writer or CapacityLimiter(1)
        return await run_sync(act, limiter=writer) if self.offload is None else await self.offload(act)

    async def met(self, answer: Admitted | Queued, sender: str | None) -> None:
        """Remember the addresses of a node that joins, and check its ports from outside."""
        self.seeds.note_join(answer.node, answer.addresses)
        if self.checks is not None:
            reached = await self.checks.reached(answer.node, sender, answer.addresses)
            if reached is not None:
                self.seeds.note_check(answer.node, reached)

    def sender_of(self, request: Request) -> str | None:
        """The IP address that sent a request; None if a proxy sent it that is not trusted to name the sender."""
        host = None if request.client is None else request.client.host
        is_forwarded = not FORWARDED_HEADERS.isdisjoint(request.headers)
        if is_forwarded and (not self.trusts_proxy or host is None or is_loopback(host)):
            return None
        return host

    def completed(self, answer: Admitted, sender: str | None) -> Admitted:
        """An answer with the addresses of other members, and with the result of the check from outside."""
        seen, now = () if self.monitor is None else self.monitor.addresses, self.monotonic()
        self.seeds.note_admission(answer.node, now)
        seeds = self.seeds.seeds_for(answer.node, sender, now, seen)
        return answer.model_copy(update={"seeds": seeds, "reachable": self.seeds.reachable(answer.node)})

    def completed_waiting(self, answer: Queued, sender: str | None) -> Queued:
        """An answer to a waiting node whose turn is soon, with addresses of members and the state of its stage."""
        if answer.is_waitlisted:
            return answer
        names = [stage.name for stage in self.plan.stages if stage.layers is not None]
        seen: tuple[str, ...] = ()
        state: WaitingState | None = None
        if self.monitor is not None:
            seen = self.monitor.addresses
            newest = self.monitor.newest(names.index(answer.stage)) if answer.stage in names else None
            state = None if newest is None else WaitingState(outer_step=newest.outer_step, certified_at=newest.at)
        seeds = self.seeds.seeds_for(answer.node, sender, self.monotonic(), seen)
        return answer.model_copy(update={"seeds": seeds, "state": state})


def create_organiser_app(context: OrganiserContext) -> FastAPI:
    """Make the application of one run's organiser."""
    app = FastAPI(
        title="NeuroShard organiser",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=_PROBLEMS,
        telemetry={"auto_configure": False, "tracing": False, "metrics": False, "logs": False},
    )
    app.add_middleware(GZipMiddleware, minimum_size=1024)
    _add_places(app, context)
    _add_public(app, context)
    _answer_errors(app, context.now)
    return app


def _add_places(app: FastAPI, context: OrganiserContext) -> None:
    desk = context.desk

    def placed(answer: Admitted | Queued, request: Request) -> Response:
        sender = context.sender_of(request)
        if isinstance(answer, Admitted):
            answer, status = context.completed(answer, sender), 200
        else:
            answer, status = context.completed_waiting(answer, sender), 202
        return Response(answer.model_dump_json(), status, _headers("no-store"), "application/json")

    @app.put("/api/join", openapi_extra=_CLAIM, response_model=Admitted, responses={202: {"model": Queued}})
    async def join(request: Request) -> Response:
        """Take a signed claim of the kind "join"; 200 with an admission, or 202 with a place in the queue."""
        host = "" if request.client is None else request.client.host
        is_forwarded = not FORWARDED_HEADERS.isdisjoint(request.headers)
        if (wait := context.joins.wait(host, context.monotonic(), is_forwarded=is_forwarded)) > 0:
            words = "Too many nodes of this network joined within a minute."
            raise OrganiserError(429, "too_many_joins", words, "Try again later.", math.ceil(wait))
        answer = await context.ask(partial(desk.join, await _body(request, MAX_JOIN_BYTES)))
        await context.met(answer, context.sender_of(request))
        return placed(answer, request)

    @app.put(
        "/api/authorization_status", openapi_extra=_POLL, response_model=Admitted, responses={202: {"model": Queued}}
    )
    async def authorization_status(request: Request) -> Response:
        """Ask how the place in the queue stands, within three times `next_poll_seconds`; answered like a join."""
        data = await _body(request, MAX_POLL_BYTES)
        try:
            poll = read_json(data, PollRequest, MAX_POLL_BYTES)
        except ValueError as error:
            words = f"The question cannot be read: {error}."
            raise OrganiserError(400, "bad_request", words, "Update NeuroShard.") from None
        return placed(await context.ask(partial(desk.poll, poll.request_id, poll.session_token)), request)

    @app.post("/api/refresh", openapi_extra=_CLAIM, response_model=Admitted)
    async def refresh(request: Request) -> Response:
        """Take a signed claim of the kind "refresh"; a new admission for the same place."""
        return placed(await context.ask(partial(desk.refresh, await _body(request, MAX_JOIN_BYTES))), request)

    @app.post("/api/leave", openapi_extra=_CLAIM, status_code=204)
    async def leave(request: Request) -> Response:
        """Take a signed claim of the kind "leave", and free the place of its node."""
        context.seeds.forget(await context.ask(partial(desk.leave, await _body(request, MAX_JOIN_BYTES))))
        return Response(status_code=204)


def _add_public(app: FastAPI, context: OrganiserContext) -> None:
    facts = PublicFacts(
        context.plan, context.desk, context.monitor, context.now, context.warning, newest=context.newest
    )
    app.include_router(public_routes(context.ask, facts))

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Liveness: the database answers."""
        await context.ask(context.desk.free_places)
        return {"status": "ok"}


async def _body(request: Request, most: int) -> bytes:
    """Read a body of at most `most` bytes. Raises OrganiserError."""
    body = bytearray()
    try:
        with fail_after(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise OrganiserError(413, "too_large", "The body is too large.", f"Send at most {most:,} bytes.")
    except TimeoutError:
        words = f"The body did not arrive within {BODY_SECONDS:g} s."
        raise OrganiserError(408, "too_slow", words, "Try again.") from None
    return bytes(body)


def _headers(cache: str) -> dict[str, str]:
    return {"Cache-Control": cache, **SECURITY_HEADERS}


def _answer_errors(app: FastAPI, now: Callable[[], float]) -> None:
    async def respond(request: Request, error: Exception) -> Response:
        match error:
            case OrganiserError():
                refused = error
            case sqlite3.Error():
                _LOG.error("The database cannot be used: %s", error)
                words = "The organiser cannot use its database at present."
                refused = OrganiserError(503, "no_database", words, "Try again later.", RETRY_SECONDS)
            case HTTPException():
                refused = OrganiserError(error.status_code, "no_route", str(error.detail), "See docs/RUNS.md.")
            case _:
                words = "The organiser met an unexpected error."
                refused = OrganiserError(500, "defect", words, "The log of the organiser has more information.")
        headers = _headers("no-store")
        if refused.retry_after_seconds:
            headers["Retry-After"] = str(refused.retry_after_seconds)
        if refused.status in {408, 413}:
            headers["Connection"] = "close"  # the rest of the body is not read
        document = json.dumps(problem_document(refused, request.url.path, now()))
        return Response(document, refused.status, headers, PROBLEM_TYPE)

    for kind in (OrganiserError, sqlite3.Error, HTTPException, Exception):
        app.add_exception_handler(kind, respond)
