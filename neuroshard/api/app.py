"""Assemble the two applications: the node's API, and the set-up wizard of a node without a token."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI
from pydantic import TypeAdapter
from starlette.responses import HTMLResponse

from neuroshard import __version__
from neuroshard.api.access import AccessPolicy
from neuroshard.api.completions import completion_routes
from neuroshard.api.context import ApiContext, ApiLimits
from neuroshard.api.dashboard import dashboard_files, dashboard_routes
from neuroshard.api.diagnostics import diagnostic_routes
from neuroshard.api.docs_page import docs_page
from neuroshard.api.events import Broadcaster, stream_routes
from neuroshard.api.machines import machine_routes
from neuroshard.api.members import member_routes
from neuroshard.api.middleware import Guard
from neuroshard.api.model_tokens import model_token_routes
from neuroshard.api.presets import preset_routes
from neuroshard.api.problems import MEDIA_TYPE, ProblemBody, answer_errors
from neuroshard.api.rendering import RenderedViews
from neuroshard.api.routes import (
    action_routes,
    describe_snapshot_routes,
    live_routes,
    session_routes,
    snapshot_routes,
)
from neuroshard.api.setup import SetupDraft, setup_routes

DESCRIPTION: Final = (
    "Read-only routes answer from an immutable snapshot of the node. Every call needs `Authorization: Bearer SECRET` "
    "with the secret from the file `api-secret` in the node's data folder, or a session of the dashboard; read-only "
    "calls also accept the token that `neuroshard token read` prints, and calls below `/v1` a token of "
    "`neuroshard token model NAME`. Public are `/health` and, from this computer, "
    "`/api/training/verify` and the totals of `/api/training/global`. "
    "Numbers that are not finite are null. Errors are RFC 9457 problem documents."
)

WORDS: Final[dict[int, str]] = {
    400: "The request cannot be read",
    401: "The key is missing, wrong, expired or removed",
    403: "The request comes from a foreign page or names another host",
    404: "Not found",
    405: "The route does not support this method",
    408: "The body arrived too slowly",
    409: "The node is in a state that does not allow this",
    413: "The body is too large",
    422: "The request is not valid",
    429: "Too many requests at once",
    431: "The headers are too long",
    500: "The node met an error",
    503: "The node is not ready",
    504: "The node did not answer in time",
    507: "The disk is full",
}
SCHEMAS = "#/components/schemas/"
# A model here would be analysed once for each route and status at the first request, which takes longer than a start.
PROBLEM_CONTENT = {MEDIA_TYPE: {}, "application/json": {"schema": {"$ref": f"{SCHEMAS}ProblemBody"}}}
PROBLEM_RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"description": words, "content": PROBLEM_CONTENT} for status, words in WORDS.items()
}


__all__ = ["ApiContext", "ApiLimits", "create_app"]


class ProblemApi(FastAPI):
    """An application whose routes answer with problem documents."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, which is made when it is first asked for."""
        if self.openapi_schema is None:
            problem = TypeAdapter(ProblemBody).json_schema(mode="serialization", ref_template=SCHEMAS + "{model}")
            parts = problem.pop("$defs")
            made = super().openapi()
            made.setdefault("components", {}).setdefault("schemas", {}).update(parts, ProblemBody=problem)
        return super().openapi()


class NodeApi(ProblemApi):
    """The API of a node."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, which is made when it is first asked for."""
        if self.openapi_schema is None:
            describe_snapshot_routes(super().openapi())
        return super().openapi()


def create_app(context: ApiContext) -> FastAPI:
    """Make the API of one node. The server and tests use `app.state.views` and `app.state.broadcaster`."""
    static = dashboard_files()
    access = AccessPolicy.for_server(
        context.host, context.port, context.secret, static, is_model_token=context.model_tokens.accepts
    )
    views = RenderedViews(context.board)
    broadcaster = Broadcaster(context, views)
    app = NodeApi(
        title="NeuroShard node",
        version=context.board.current().version,
        description=DESCRIPTION,
        docs_url=None,  # FastAPI's pages load scripts from other hosts; `docs_page` makes one without
        redoc_url=None,
        redirect_slashes=False,
        responses=PROBLEM_RESPONSES,
        telemetry={"auto_configure": False, "tracing": False, "metrics": False, "logs": False},
    )
    app.state.views = views
    app.state.broadcaster = broadcaster
    for router in (
        snapshot_routes(views),
        live_routes(context),
        action_routes(context),
        diagnostic_routes(context),
        session_routes(access, context.clock),
        stream_routes(broadcaster),
        completion_routes(context),
        member_routes(context),
        machine_routes(context),
        preset_routes(context),
        model_token_routes(context.model_tokens, lambda: context.board.current().state, context.clock),
    ):
        app.include_router(router)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))

    app.router.routes.extend(dashboard_routes(static))
    answer_errors(app)
    app.add_middleware(Guard, access=access, limits=context.limits, clock=context.clock)
    return app


SETUP_DESCRIPTION = "A node that waits for its setup. Every call but `/health` needs the API secret or a session."


@dataclass(frozen=True)
class SetupContext:
    """Everything that the wizard's application may use."""

    desk: SetupDraft
    secret: str
    host: str  # always a loopback address
    port: int
    stop: Callable[[str], object]
    clock: Callable[[], float] = time.time  # seconds since the epoch


def create_setup_app(context: SetupContext) -> FastAPI:
    """Make the application of a node without a token: the set-up wizard, its session and the dashboard's files."""
    static = dashboard_files()
    access = AccessPolicy.for_server(context.host, context.port, context.secret, static, is_setup=True)
    app = ProblemApi(
        title="NeuroShard node, not set up yet",
        version=__version__,
        description=SETUP_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=PROBLEM_RESPONSES,
        telemetry={"auto_configure": False, "tracing": False, "metrics": False, "logs": False},
    )
    app.include_router(session_routes(access, context.clock))
    app.include_router(setup_routes(context.desk, context.stop, context.clock))
    app.router.routes.extend(dashboard_routes(static))
    answer_errors(app)
    app.add_middleware(Guard, access=access, limits=ApiLimits(), clock=context.clock)
    return app
