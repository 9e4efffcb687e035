"""OpenAI-compatible routes: talk to the model in training."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request
from starlette.responses import Response

from neuroshard.api.bodies.completions import CompletionBody, CompletionRequest, ModelCard, ModelsBody
from neuroshard.api.commanding import require_ready
from neuroshard.api.completion import CompletionSlots, CompletionWriter, Generation, model_names, require_model
from neuroshard.api.context import ApiContext
from neuroshard.api.rendering import JSON
from neuroshard.api.streaming import EVENT_STREAM, ClientGoneError, WatchedStream, unless_disconnected

CLIENT_CLOSED_REQUEST = 499  # nobody reads it


def completion_routes(context: ApiContext) -> APIRouter:
    """GET /v1/models and POST /v1/completions."""
    router = APIRouter(tags=["completions"])
    slots = CompletionSlots(context.limits.completions)

    @router.get("/v1/models")
    async def models() -> ModelsBody:
        """Names under which the model in training answers."""
        status = context.board.current()
        created, owner = int(status.started_at), status.wallet_id or "neuroshard"
        return ModelsBody(data=[ModelCard(id=name, created=created, owned_by=owner) for name in model_names(status)])

    @router.post("/v1/completions", response_model=CompletionBody, responses={200: {"content": {EVENT_STREAM: {}}}})
    async def complete(request: Request, body: CompletionRequest) -> Response:
        """Continue a prompt; with `stream`, as Server-Sent Events that end with `data: [DONE]`."""
        status = context.board.current()
        require_ready(status)
        require_model(body.model, status)
        slots.take()
        try:
            generation = Generation(context, body)
        except BaseException:
            slots.give_back()
            raise
        writer = CompletionWriter(f"cmpl-{secrets.token_hex(12)}", int(context.clock()), body)
        handed_over = False
        try:
            if not body.stream:
                whole = await unless_disconnected(request, writer.whole(generation))
                return Response(whole.model_dump_json(), media_type=JSON)
            # The first piece before the headers: what goes wrong until then gets a proper status.
            first = await unless_disconnected(request, generation.next_piece())
            handed_over = True
            return WatchedStream(writer.stream(generation, first), generation.cancel, lambda: _end(slots, generation))
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            if not handed_over:
                _end(slots, generation)

    return router


def _end(slots: CompletionSlots, generation: Generation) -> None:
    """Free the slot and make sure that the node works on it no more."""
    generation.cancel()
    slots.give_back()
