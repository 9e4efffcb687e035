"""Puts the wizard's application together: the dashboard's files and protections, and the wizard's routes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from fastapi import FastAPI

from neuroshard import __version__
from neuroshard.api.access import AccessPolicy
from neuroshard.api.context import ApiLimits
from neuroshard.api.dashboard import dashboard_files, dashboard_routes
from neuroshard.api.guard import Guard
from neuroshard.api.openapi import PROBLEM_RESPONSES
from neuroshard.api.problems import answer_errors
from neuroshard.api.routes.session import session_routes
from neuroshard.api.setup.desk import SetupDesk
from neuroshard.api.setup.entry import EntryKeys
from neuroshard.api.setup.routes import setup_routes

DESCRIPTION = "A node that waits to be set up. Every call needs the API secret or a session, reading ones too."


@dataclass(frozen=True)
class SetupContext:
    """Everything the wizard may touch."""

    desk: SetupDesk
    secret: str
    host: str  # loopback, always
    port: int
    stop: Callable[[str], object]
    clock: Callable[[], float] = time.time  # seconds since the epoch


def create_setup_app(context: SetupContext) -> FastAPI:
    """The application of a node without a token."""
    static = dashboard_files()
    policy = AccessPolicy.for_server(context.host, context.port, context.secret, static)
    # other users of this computer reach loopback, too: they must not read the words of a new wallet
    access = replace(policy, secret_for_everything=True, public_paths=policy.public_paths | {"/health"})
    app = FastAPI(
        title="NeuroShard node, not set up yet",
        version=__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=PROBLEM_RESPONSES,
        telemetry={"auto_configure": False, "tracing": False, "metrics": False, "logs": False},
    )
    app.include_router(session_routes(access, context.clock, EntryKeys(access.sessions)))
    app.include_router(setup_routes(context.desk, context.stop))
    app.router.routes.extend(dashboard_routes(static))
    answer_errors(app)
    app.add_middleware(Guard, access=access, limits=ApiLimits(), clock=context.clock)
    return app
