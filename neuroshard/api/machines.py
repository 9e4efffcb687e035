"""Routes about the machines of the owner's wallet: list them, and pause or resume them together."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from neuroshard.api.context import ApiContext, carry_out_machine_command
from neuroshard.api.rendering import JSON, RequestBody, as_json
from neuroshard.status.board import ListMachines, MachineCommand, OrderMachines
from neuroshard.status.machines import MachineList
from neuroshard.types import MAX_NODE_ID_CHARACTERS, NodeId


class NamedMachine(RequestBody):
    """POST /api/machines/pause and /resume: one machine, or all of them without an id."""

    node_id: str | None = Field(
        default=None, min_length=1, max_length=MAX_NODE_ID_CHARACTERS, pattern=r"^[0-9A-Za-z]+$"
    )


def machine_routes(context: ApiContext) -> APIRouter:
    """Make the routes. The list needs the owner as well: see `OWNERS_READING` in access.py."""
    router = APIRouter(tags=["machines"])

    async def answer(command: MachineCommand, status: int) -> Response:
        return Response(as_json(await carry_out_machine_command(context, command)), status, media_type=JSON)

    @router.get("/api/machines", response_model=MachineList)
    async def machines() -> Response:
        """The nodes of this node's wallet that are known here, with their last reports."""
        return await answer(ListMachines(), 200)

    @router.post("/api/machines/pause", status_code=202, response_model=MachineList)
    async def pause(body: NamedMachine | None = None) -> Response:
        """Pause all machines of the wallet, or one, until they are resumed. A machine that is away is not paused."""
        return await answer(OrderMachines("pause", _named(body)), 202)

    @router.post("/api/machines/resume", status_code=202, response_model=MachineList)
    async def resume(body: NamedMachine | None = None) -> Response:
        """Resume all machines of the wallet, or one."""
        return await answer(OrderMachines("resume", _named(body)), 202)

    return router


def _named(body: NamedMachine | None) -> NodeId | None:
    return None if body is None or body.node_id is None else NodeId(body.node_id)
