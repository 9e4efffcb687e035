"""OpenAI-compatible completions and chats with the model in training.

`Generation` is the bridge from the node's thread to the event loop of the API. `PromptQueue` continues the prompts of
one request, one after the other. The two formats turn the pieces into bodies."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event
from typing import Protocol

from fastapi import APIRouter, Request
from starlette.responses import Response

from neuroshard.api.context import ApiContext, require_ready
from neuroshard.api.openai import (
    ChatBody,
    ChatChoice,
    ChatRequest,
    CompletionBody,
    CompletionChoice,
    CompletionRequest,
    ModelCard,
    ModelsBody,
    PromptInput,
    ReplyDelta,
    ReplyMessage,
    Usage,
    chat_logprobs,
    completion_logprobs,
)
from neuroshard.api.problems import (
    CommandTimeoutError,
    TooManyRequestsError,
    UnknownModelError,
    openai_error,
    problem_of,
)
from neuroshard.api.rendering import JSON, ResponseBody
from neuroshard.api.streaming import EVENT_STREAM, ClientGoneError, WatchedStream, unless_disconnected
from neuroshard.errors import NeuroShardError
from neuroshard.status.board import GeneratedText, GenerationSummary, ScoredToken
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

    def __init__(
        self, context: ApiContext, request: CompletionRequest | ChatRequest, prompt: PromptInput, deadline: float
    ) -> None:
        """`deadline` is a time of the event loop."""
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[GeneratedText | None] = asyncio.Queue()  # bounded: at most one per token
        self._deadline = deadline
        self._cancelled = Event()
        self._answer = context.commands.send(request.command(prompt, self._put, self._cancelled))
        self._answer.add_done_callback(lambda _: self._put(None))

    def cancel(self) -> None:
        """Stop the node's work on this completion, and end `next_piece` with None."""
        self._cancelled.set()
        self._put(None)

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
            raise NeuroShardError("The node's answer has the wrong type.")
        return answer

    def _put(self, piece: GeneratedText | None) -> None:  # also on threads of the node
        with suppress(RuntimeError):  # the loop is closed: the server stopped, so no client waits
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)


@dataclass(frozen=True)
class PromptPiece:
    """A piece of the continuation of one prompt."""

    prompt: int  # number of the prompt in the request
    text: str
    scores: tuple[ScoredToken, ...] = ()
    finish_reason: str | None = None


class PromptQueue:
    """The prompts of one request. The node continues them one after the other, before one deadline."""

    def __init__(self, context: ApiContext, request: CompletionRequest | ChatRequest) -> None:
        self._context = context
        self._request = request
        self._waiting = list(enumerate(request.prompts))
        self._deadline = asyncio.get_running_loop().time() + context.limits.completion_seconds
        self._number = 0
        self._running: Generation | None = None
        self._has_ended = True  # the last piece of the running generation had a finish reason
        self._tokens = Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0)
        self.was_cancelled = False

    @property
    def usage(self) -> Usage:
        """Tokens of the prompts that were continued to their end."""
        return self._tokens

    def cancel(self) -> None:
        """Stop the node's work on this request, and end `next_piece` with None."""
        self.was_cancelled = True
        if self._running is not None:
            self._running.cancel()

    async def next_piece(self) -> PromptPiece | None:
        """Wait for the next piece; None after the last one. Raises as Generation.next_piece does, and NotReadyError."""
        while not self.was_cancelled:
            if self._running is None:
                if not self._waiting:
                    return None
                self._number, prompt = self._waiting.pop(0)
                self._running = Generation(self._context, self._request, prompt, self._deadline)
                self._has_ended = False
            piece = await self._running.next_piece()
            if piece is not None:
                self._has_ended = piece.finish_reason is not None
                return PromptPiece(self._number, piece.text, piece.scores, piece.finish_reason)
            if not self.was_cancelled and (last := self._close(self._running)) is not None:
                return last
        return None

    def _close(self, generation: Generation) -> PromptPiece | None:
        """Add the usage of a generation that has ended. Returns the last piece if the node has sent none."""
        summary, self._running = generation.summary(), None
        prompt = self._tokens.prompt_tokens + summary.prompt_tokens
        written = self._tokens.completion_tokens + summary.completion_tokens
        self._tokens = Usage(prompt_tokens=prompt, completion_tokens=written, total_tokens=prompt + written)
        return None if self._has_ended else PromptPiece(self._number, "", (), summary.finish_reason)


@dataclass
class Continuation:
    """Everything that was written after one prompt."""

    texts: list[str] = field(default_factory=list[str])
    scores: list[ScoredToken] = field(default_factory=list[ScoredToken])
    finish_reason: str | None = None

    def add(self, piece: PromptPiece) -> None:
        """Append a piece."""
        self.texts.append(piece.text)
        self.scores += piece.scores
        self.finish_reason = piece.finish_reason or self.finish_reason

    def as_piece(self, prompt: int) -> PromptPiece:
        """All pieces as one."""
        return PromptPiece(prompt, "".join(self.texts), tuple(self.scores), self.finish_reason)


class Format(Protocol):
    """Turns pieces into bodies of one route."""

    def whole(self, pieces: list[PromptPiece], usage: Usage) -> ResponseBody:
        """Body with the whole continuations of all prompts."""
        ...

    def opening(self) -> ResponseBody | None:
        """First body of a stream, before any piece."""
        ...

    def part(self, piece: PromptPiece) -> ResponseBody:
        """Body of one streamed piece."""
        ...

    def closing(self, usage: Usage) -> ResponseBody:
        """Last body of a stream whose request asks for the usage."""
        ...


class CompletionFormat:
    """Bodies of /v1/completions."""

    def __init__(self, request: CompletionRequest, created: int) -> None:
        self._request = request
        self._empty = CompletionBody(
            id=f"cmpl-{secrets.token_hex(12)}", created=created, model=request.model, choices=[]
        )

    def whole(self, pieces: list[PromptPiece], usage: Usage) -> CompletionBody:
        return self._empty.model_copy(update={"choices": [self._choice(piece) for piece in pieces], "usage": usage})

    def opening(self) -> None:
        return None

    def part(self, piece: PromptPiece) -> CompletionBody:
        return self._empty.model_copy(update={"choices": [self._choice(piece)]})

    def closing(self, usage: Usage) -> CompletionBody:
        return self._empty.model_copy(update={"usage": usage})

    def _choice(self, piece: PromptPiece) -> CompletionChoice:
        return CompletionChoice(
            text=piece.text,
            index=piece.prompt,
            logprobs=completion_logprobs(piece.scores, self._request.logprobs),
            finish_reason=piece.finish_reason,
        )


class ChatFormat:
    """Bodies of /v1/chat/completions. White space before the reply, which the template does not contain, is dropped."""

    def __init__(self, request: ChatRequest, created: int) -> None:
        self._request = request
        self._empty = ChatBody(
            id=f"chatcmpl-{secrets.token_hex(12)}",
            object="chat.completion.chunk" if request.stream else "chat.completion",
            created=created,
            model=request.model,
            choices=[],
        )
        self._has_begun = False

    def whole(self, pieces: list[PromptPiece], usage: Usage) -> ChatBody:
        choices = [self._choice(piece, message=ReplyMessage(content=piece.text.strip())) for piece in pieces]
        return self._empty.model_copy(update={"choices": choices, "usage": usage})

    def opening(self) -> ChatBody:
        return self._empty.model_copy(update={"choices": [ChatChoice(delta=ReplyDelta(role="assistant"))]})

    def part(self, piece: PromptPiece) -> ChatBody:
        text = piece.text if self._has_begun else piece.text.lstrip()
        self._has_begun = self._has_begun or bool(text)
        return self._empty.model_copy(update={"choices": [self._choice(piece, delta=ReplyDelta(content=text))]})

    def closing(self, usage: Usage) -> ChatBody:
        return self._empty.model_copy(update={"usage": usage})

    def _choice(
        self, piece: PromptPiece, message: ReplyMessage | None = None, delta: ReplyDelta | None = None
    ) -> ChatChoice:
        return ChatChoice(
            message=message,
            delta=delta,
            logprobs=chat_logprobs(piece.scores, wanted=self._request.logprobs),
            finish_reason=piece.finish_reason,
        )


async def whole_body(queue: PromptQueue, form: Format) -> ResponseBody:
    """Wait for the end of all continuations and return them as one body."""
    found: dict[int, Continuation] = {}
    while (piece := await queue.next_piece()) is not None:
        found.setdefault(piece.prompt, Continuation()).add(piece)
    return form.whole([continuation.as_piece(prompt) for prompt, continuation in found.items()], queue.usage)


async def streamed(
    queue: PromptQueue, form: Format, first: PromptPiece | None, *, with_usage: bool
) -> AsyncGenerator[bytes]:
    """Yield the continuations as Server-Sent Events, starting with the piece `first`, which was already read.

    An error after the first piece is sent as OpenAI's error object, because the status line was already sent.
    """
    try:
        if (opening := form.opening()) is not None:
            yield _event(opening)
        piece = first
        while piece is not None:
            yield _event(form.part(piece))
            piece = await queue.next_piece()
        if with_usage and not queue.was_cancelled:
            yield _event(form.closing(queue.usage))
    except NeuroShardError as error:
        yield _data(json.dumps({"error": openai_error(problem_of(error))}).encode())
    yield b"data: [DONE]\n\n"


def body_json(body: ResponseBody) -> bytes:
    """Encode a body. A choice of a chat has either a message or a delta, never the other as null."""
    if isinstance(body, ChatBody):
        absent = {"choices": {"__all__": {"message" if body.object == "chat.completion.chunk" else "delta"}}}
        return body.model_dump_json(exclude=absent).encode()
    return body.model_dump_json().encode()


def _event(body: ResponseBody) -> bytes:
    return _data(body_json(body))


def _data(json_bytes: bytes) -> bytes:
    return b"data: " + json_bytes + b"\n\n"


CLIENT_CLOSED_REQUEST = 499  # the client is gone: it never receives this status


def model_cards(status: NodeStatus) -> list[ModelCard]:
    """All names of the model in training."""
    if status.model is None:
        return []
    context, owner = status.model.architecture.sequence_length, status.wallet_id or "neuroshard"
    created = int(status.started_at)
    return [ModelCard(id=name, created=created, owned_by=owner, max_model_len=context) for name in model_names(status)]


def completion_routes(context: ApiContext) -> APIRouter:
    """Make the routes below /v1."""
    router = APIRouter(tags=["completions"])
    slots = CompletionSlots(context.limits.completions)

    @router.get("/v1/models")
    async def models() -> ModelsBody:
        """List the names that can be used for the model in training."""
        return ModelsBody(data=model_cards(context.board.current()))

    @router.get("/v1/models/{model}")
    async def model_card(model: str) -> ModelCard:
        """Describe one name of the model in training."""
        status = context.board.current()
        require_model(model, status)
        return next(card for card in model_cards(status) if card.id == model)

    @router.post("/v1/completions", response_model=CompletionBody, responses={200: {"content": {EVENT_STREAM: {}}}})
    async def complete(request: Request, body: CompletionRequest) -> Response:
        """Continue prompts; with `stream`, as Server-Sent Events that end with `data: [DONE]`."""
        return await _answer(context, slots, request, body, CompletionFormat(body, int(context.clock())))

    @router.post("/v1/chat/completions", response_model=ChatBody, responses={200: {"content": {EVENT_STREAM: {}}}})
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Continue a conversation; with `stream`, as Server-Sent Events that end with `data: [DONE]`."""
        return await _answer(context, slots, request, body, ChatFormat(body, int(context.clock())))

    return router


async def _answer(
    context: ApiContext, slots: CompletionSlots, request: Request, body: CompletionRequest | ChatRequest, form: Format
) -> Response:
    """Run one request to its end, or hand it to a stream."""
    status = context.board.current()
    require_ready(status)
    require_model(body.model, status)
    slots.take()
    queue, handed_over = PromptQueue(context, body), False
    try:
        if not body.stream:
            whole = await unless_disconnected(request, whole_body(queue, form))
            return Response(body_json(whole), media_type=JSON)
        # Wait for the first piece before the headers are sent: an error until then still gets its own status.
        first = await unless_disconnected(request, queue.next_piece())
        handed_over = True
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        chunks = streamed(queue, form, first, with_usage=with_usage)
        return WatchedStream(chunks, queue.cancel, lambda: _end(slots, queue))
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        if not handed_over:
            _end(slots, queue)


def _end(slots: CompletionSlots, queue: PromptQueue) -> None:
    """Free the slot, and cancel the work so that the node stops."""
    queue.cancel()
    slots.give_back()
