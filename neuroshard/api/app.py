"""Puts the application together: routes by subject, problem documents, and the guard around everything."""

from __future__ import annotations

from fastapi import FastAPI

from neuroshard.api.access import AccessPolicy
from neuroshard.api.broadcast import Broadcaster
from neuroshard.api.context import ApiContext, ApiLimits
from neuroshard.api.dashboard import dashboard_files, dashboard_routes
from neuroshard.api.guard import Guard
from neuroshard.api.openapi import DESCRIPTION, PROBLEM_RESPONSES
from neuroshard.api.problems import answer_errors
from neuroshard.api.rendering import RenderedViews
from neuroshard.api.routes.actions import action_routes
from neuroshard.api.routes.completions import completion_routes
from neuroshard.api.routes.diagnostics import diagnostic_routes
from neuroshard.api.routes.reading import live_routes, snapshot_routes
from neuroshard.api.routes.session import session_routes
from neuroshard.api.routes.streams import stream_routes

__all__ = ["ApiContext", "ApiLimits", "create_app"]


def create_app(context: ApiContext) -> FastAPI:
    """The API of one node. `app.state.views` and `app.state.broadcaster` are for the server and for tests."""
    static = dashboard_files()
    access = AccessPolicy.for_server(context.host, context.port, context.secret, static)
    views = RenderedViews(context.board)
    broadcaster = Broadcaster(context, views)
    app = FastAPI(
        title="NeuroShard node",
        version=context.board.current().version,
        description=DESCRIPTION,
        docs_url=None,  # they load scripts from elsewhere
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
    ):
        app.include_router(router)
    app.router.routes.extend(dashboard_routes(static))
    answer_errors(app)
    app.add_middleware(Guard, access=access, limits=context.limits, clock=context.clock)
    return app
