"""The report about a node that its owner can give to others."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import Response

from neuroshard.api.bodies.actions import NoMembers
from neuroshard.api.context import ApiContext
from neuroshard.api.diagnostics import archive_name, diagnostic_archive

ZIP = "application/zip"


def diagnostic_routes(context: ApiContext) -> APIRouter:
    """POST /api/diagnostics: a command, so that it needs the owner."""
    router = APIRouter(tags=["status"])

    @router.post("/api/diagnostics", response_class=Response, responses={200: {"content": {ZIP: {}}}})
    async def diagnostics(body: NoMembers | None = None) -> Response:
        """A zip file with versions, settings, status and log, without secrets, home folder and public addresses."""
        del body
        now = context.clock()
        content = await asyncio.to_thread(diagnostic_archive, context, now)
        headers = {"Content-Disposition": f'attachment; filename="{archive_name(now)}"'}
        return Response(content, headers=headers, media_type=ZIP)

    return router
