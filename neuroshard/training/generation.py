"""Text from the model in training: the stages read it, wherever they are, and this node chooses its tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import anyio

from neuroshard.data.tokenizer.encoder import Tokenizer
from neuroshard.errors import NotReadyError
from neuroshard.status.commands import Generate, GenerationSummary
from neuroshard.training.completion import Completion
from neuroshard.types import Architecture

_LOG = logging.getLogger(__name__)

CANCEL_LOOK_SECONDS = 0.2
END_SECONDS = 5.0  # for telling the stages that a text is done; they forget it by themselves


class Reading(Protocol):
    """All stages of a model while they read one text.

    Law: the logits are those of the model in one piece, with the weights that the stages have at that moment.
    """

    async def advance(self, completion: Completion) -> None:
        """Add at least one token to a completion that is not finished. Raises NotReadyError when that cannot be."""
        ...

    async def end(self) -> None:
        """Let the stages forget the text."""
        ...


class TextGenerator:
    """Continues prompts; one completion at a time, so that memory stays bounded."""

    def __init__(self, architecture: Architecture, tokenizer: Tokenizer, begin: Callable[[], Reading]) -> None:
        self._architecture = architecture
        self._tokenizer = tokenizer
        self._begin = begin
        self._turn = anyio.Lock()

    async def generate(self, request: Generate) -> GenerationSummary:
        """Run one request; its pieces go to the request's sink from a thread of this node.

        A prompt longer than the context loses its beginning, which the summary counts. Raises NotReadyError when
        there is a stage that nobody reads the text with.
        """
        async with self._turn:
            completion = Completion(self._architecture, self._tokenizer, request)
            if completion.truncated_tokens:
                _LOG.info(
                    "The first %d tokens of the prompt are beyond the context of %d and were left out.",
                    completion.truncated_tokens,
                    self._architecture.sequence_length,
                )
            reading = self._begin()
            try:
                await _unless_cancelled(request, completion, reading)
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(END_SECONDS):
                    await reading.end()
            completion.cancel()
            return completion.summary()


async def _unless_cancelled(request: Generate, completion: Completion, reading: Reading) -> None:
    """To the end of the completion, or until nobody wants it any more."""
    failure: NotReadyError | None = None

    async def look() -> None:
        while not request.cancelled.is_set():
            await anyio.sleep(CANCEL_LOOK_SECONDS)
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look)
        try:
            while completion.wants_token():
                await reading.advance(completion)
        except NotReadyError as error:
            failure = error  # raised as itself, not in a group
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
