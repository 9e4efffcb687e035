"""OpenAI-compatible completions from the model in training.

`Generation` is the bridge from the node's thread to the event loop of the API."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator
from concurrent.futures import Future
from contextlib import suppress
from threading import Event

from fastapi import APIRouter, Request
from starlette.responses import Response

from neuroshard.api.context import ApiContext, require_ready
from neuroshard.api.problems import (
    CommandTimeoutError,
    TooManyRequestsError,
    UnknownModelError,
    openai_error,
    problem_of,
)
from neuroshard.api.rendering import JSON
from neuroshard.api.requests import (
    CompletionBody,
    CompletionChoice,
    CompletionRequest,
    ModelCard,
    ModelsBody,
    Usage,
)
from neuroshard.api.streaming import EVENT_STREAM, ClientGoneError, WatchedStream, unless_disconnected
from neuroshard.errors import NeuroShardError
from neuroshard.status.board import CommandAnswer, Generate, GeneratedText, GenerationSummary
from neuroshard.status.snapshot import NodeStatus

MODEL_NAME = "neuroshard"


def model_names(status: NodeStatus) -> tuple[str, ...]:
    """Names that clients can use for the model in training; none before there is one."""
    if status.model is None:
        return ()
    return (MODEL_NAME, f"{MODEL_NAME}-{status.run.run_id[:12]}") if status.run else (MODEL_NAME,)


def require_model(name: str, status: NodeStatus) -> None:
    """Raise UnknownModelError if this node has no model with this name."""
    names = model_names(status)
    if name not in names:
        raise UnknownModelError(f"There is no model {name!r} here.", f"Models: {', '.join(names) or 'none yet'}.")


class CompletionSlots:
    """Counts the completions that run at once, up to a limit. Only one event loop may use it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.taken = 0

    def take(self) -> None:
        """Take a slot. Raises TooManyRequestsError if all slots are taken."""
        if self.taken >= self._limit:
            raise TooManyRequestsError(f"{self._limit} completions are running already.", "Try again in a moment.")
        self.taken += 1

    def give_back(self) -> None:
        """Free a slot that was taken."""
        self.taken -= 1


class Generation:
    """One running Generate command. Only the event loop that made this object may read it.

    The node delivers pieces on threads of its own; `_put` moves them to the event loop. None in the queue marks the
    end: the command's future is done, or the generation was cancelled.
    """

    def __init__(self, context: ApiContext, request: CompletionRequest) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[GeneratedText | None] = asyncio.Queue()  # bounded: at most one per token
        self._deadline = self._loop.time() + context.limits.completion_seconds
        self._cancelled = Event()
        command = Generate(
            prompt=request.prompt_text,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            stop=request.stop_sequences,
            seed=request.seed,
            sink=self._receive,
            cancelled=self._cancelled,
        )
        self._answer = context.commands.send(command)
        self._answer.add_done_callback(self._finish)

    def cancel(self) -> None:
        """Stop the node's work on this completion, and end `next_piece` with None."""
        self._cancelled.set()
        self._put(None)

    @property
    def was_cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    async def next_piece(self) -> GeneratedText | None:
        """Wait for the next piece; None after the last one.

        Raises CommandTimeoutError at the deadline, and the error of the node if the command failed.
        """
        try:
            async with asyncio.timeout_at(self._deadline):
                piece = await self._pieces.get()
        except TimeoutError as error:
            self.cancel()
            raise CommandTimeoutError("The completion took too long.", "Ask for fewer tokens.") from error
        if piece is None and self._answer.done():
            self._answer.result()  # raises the error of a command that failed
        return piece

    def summary(self) -> GenerationSummary:
        """Usage counts. Call it after `next_piece` has returned None without a cancellation."""
        answer = self._answer.result(timeout=0)
        if not isinstance(answer, GenerationSummary):
            raise NeuroShardError("The node answered something else than was asked.")
        return answer

    def _receive(self, piece: GeneratedText) -> None:  # on a thread of the node
        self._put(piece)

    def _finish(self, _: Future[CommandAnswer]) -> None:  # on a thread of the node
        self._put(None)

    def _put(self, piece: GeneratedText | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server stopped, so no client waits
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)


class CompletionWriter:
    """Builds the response to one completion request in the format of OpenAI's API."""

    def __init__(self, identity: str, created: int, request: CompletionRequest) -> None:
        self._identity = identity
        self._created = created
        self._request = request

    async def whole(self, generation: Generation) -> CompletionBody:
        """Wait for the end of the generation and return the whole completion."""
        texts = [self._request.prompt_text] if self._request.echo else []
        while (piece := await generation.next_piece()) is not None:
            texts.append(piece.text)
        summary = generation.summary()
        return self._body("".join(texts), summary.finish_reason, usage_of(summary))

    async def stream(self, generation: Generation, first: GeneratedText | None) -> AsyncGenerator[bytes]:
        """Yield the completion as Server-Sent Events, starting with the piece `first`, which was already read.

        An error after the first piece is sent as OpenAI's error object, because the status line was already sent.
        """
        try:
            async for body in self._bodies(generation, first):
                yield _data(body.model_dump_json().encode())
        except NeuroShardError as error:
            yield _data(json.dumps({"error": openai_error(problem_of(error))}).encode())
        yield b"data: [DONE]\n\n"

    async def _bodies(self, generation: Generation, first: GeneratedText | None) -> AsyncGenerator[CompletionBody]:
        if self._request.echo:
            yield self._body(self._request.prompt_text, None)
        piece, finished = first, False
        while piece is not None:
            finished = piece.finish_reason is not None
            yield self._body(piece.text, piece.finish_reason)
            piece = await generation.next_piece()
        if generation.was_cancelled:
            return
        summary = generation.summary()
        if not finished:
            yield self._body("", summary.finish_reason)
        if self._request.stream_options is not None and self._request.stream_options.include_usage:
            body = self._body("", None, usage_of(summary))
            yield body.model_copy(update={"choices": []})

    def _body(self, text: str, finish_reason: str | None, usage: Usage | None = None) -> CompletionBody:
        return CompletionBody(
            id=self._identity,
            created=self._created,
            model=self._request.model,
            choices=[CompletionChoice(text=text, finish_reason=finish_reason)],
            usage=usage,
        )


def usage_of(summary: GenerationSummary) -> Usage:
    """Convert the usage counts to the format of OpenAI's API."""
    return Usage(
        prompt_tokens=summary.prompt_tokens,
        completion_tokens=summary.completion_tokens,
        total_tokens=summary.prompt_tokens + summary.completion_tokens,
    )


def _data(json_bytes: bytes) -> bytes:
    return b"data: " + json_bytes + b"\n\n"


CLIENT_CLOSED_REQUEST = 499  # the client is gone: it never receives this status


def completion_routes(context: ApiContext) -> APIRouter:
    """Make the routes GET /v1/models and POST /v1/completions."""
    router = APIRouter(tags=["completions"])
    slots = CompletionSlots(context.limits.completions)

    @router.get("/v1/models")
    async def models() -> ModelsBody:
        """List the names that can be used for the model in training."""
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
            # Wait for the first piece before the headers are sent: an error until then still gets its own status.
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
    """Free the slot, and cancel the generation so that the node stops working on it."""
    generation.cancel()
    slots.give_back()
