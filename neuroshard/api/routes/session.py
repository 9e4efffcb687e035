"""The dashboard's session."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request
from starlette.responses import Response

from neuroshard.api.access import AccessPolicy, RequestFacts
from neuroshard.api.bodies.actions import SessionBody, SessionRequest
from neuroshard.api.hosts import origin_of
from neuroshard.api.problems import MissingSecretError
from neuroshard.api.rendering import JSON
from neuroshard.api.setup.entry import EntryKeys


def session_routes(access: AccessPolicy, clock: Callable[[], float], entries: EntryKeys | None = None) -> APIRouter:
    """Opening a session; its Host and Origin were checked before. With `entries` it is the wizard's."""
    router = APIRouter(tags=["session"])

    @router.get("/api/session", response_model=SessionBody)
    async def read_session(request: Request) -> Response:
        """Open or renew the session; with --host only for one that was opened with the API secret."""
        facts = RequestFacts.of(request.method, request.url.path, request.headers.raw)
        known = access.is_authenticated(facts, clock())
        if access.secret_for_everything and not known:
            return _respond(_body(authenticated=False, csrf_token=None))
        return _open(facts)

    @router.post("/api/session", response_model=SessionBody)
    async def open_session(request: Request, body: SessionRequest) -> Response:
        """Open a session with the API secret."""
        enters = entries is not None and entries.admit(body.secret, clock())
        if not (enters or access.sessions.is_secret(body.secret)):
            raise MissingSecretError("The API secret is wrong.", "It is in the file api-secret in the data folder.")
        return _open(RequestFacts.of(request.method, request.url.path, request.headers.raw))

    def _open(facts: RequestFacts) -> Response:
        """Keep a valid cookie, so that the pages of several tabs share one, or give a new one."""
        now, origin = clock(), origin_of(facts.one("host") or "")
        known = facts.cookie(access.sessions.cookie_name)
        cookie = known if known and access.sessions.accepts(known, origin, now) else None
        value = cookie or access.sessions.new_cookie(origin, now)
        token = access.sessions.csrf_token(value)
        response = _respond(_body(authenticated=True, csrf_token=token))
        if cookie is None:
            response.set_cookie(access.sessions.cookie_name, value, path="/", httponly=True, samesite="strict")
        return response

    def _body(*, authenticated: bool, csrf_token: str | None) -> SessionBody:
        return SessionBody(
            authenticated=authenticated,
            secret_required=access.secret_for_everything,
            csrf_token=csrf_token,
            setup=entries is not None,
        )

    return router


def _respond(body: SessionBody) -> Response:
    return Response(body.model_dump_json(), media_type=JSON)
