"""Routes that send a command to the node."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import JsonValue

from neuroshard.api.bodies.actions import CommandBody, ConfigChanges, NoMembers, PauseRequest
from neuroshard.api.bodies.base import finite_json
from neuroshard.api.commanding import carry_out, shut_down
from neuroshard.api.context import ApiContext
from neuroshard.status.commands import CommandResult, Pause, Resume, SaveCheckpoint, UpdateSettings


def action_routes(context: ApiContext) -> APIRouter:
    """Pause, resume, checkpoint, shutdown and configuration; each answers 202 with the resulting state."""
    router = APIRouter(tags=["actions"])

    @router.post("/api/training/pause", status_code=202)
    async def pause(body: PauseRequest | None = None) -> CommandBody:
        """Pause training, for a while or until it is resumed. Nothing is lost; accelerator memory is freed."""
        return body_of(await carry_out(context, Pause(body.duration_seconds if body else None)))

    @router.post("/api/training/resume", status_code=202)
    async def resume(body: NoMembers | None = None) -> CommandBody:
        """Go on training."""
        del body
        return body_of(await carry_out(context, Resume()))

    @router.post("/api/checkpoints", status_code=202)
    async def save_checkpoint(body: NoMembers | None = None) -> CommandBody:
        """Write a checkpoint now."""
        del body
        return body_of(await carry_out(context, SaveCheckpoint()))

    @router.post("/api/shutdown", status_code=202)
    async def shutdown(body: NoMembers | None = None) -> CommandBody:
        """Save a final checkpoint and end the node."""
        del body
        return body_of(await shut_down(context, "asked through the API"))

    @router.patch("/api/config", status_code=202)
    async def change_config(body: ConfigChanges) -> CommandBody:
        """Change settings of this node; `details` holds what was really stored."""
        return body_of(await carry_out(context, UpdateSettings(body.root)))

    return router


def body_of(result: CommandResult) -> CommandBody:
    """The result of a command as an answer."""
    details: dict[str, JsonValue] | None = None
    if result.details is not None:
        details = CommandBody.model_validate(
            {"state": "", "message": "", "details": finite_json(result.details)}
        ).details
    return CommandBody(state=result.state, message=result.message, details=details)
