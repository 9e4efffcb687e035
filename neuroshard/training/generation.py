"""Text from the model in training: a few tokens at a time between microbatches, with a key/value cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import anyio
import torch
from torch import Tensor

from neuroshard.data.tokenizer.encoder import Tokenizer
from neuroshard.data.tokenizer.table import EOS, FIRST_BYTE_ID
from neuroshard.errors import NotReadyError
from neuroshard.model.sampling import sample_next
from neuroshard.status.commands import Generate, GeneratedText, GenerationSummary
from neuroshard.training.compute import ComputeThread, Priority
from neuroshard.training.model_chain import ChainCaches, ModelChain
from neuroshard.training.stop_sequences import StopSequences

_LOG = logging.getLogger(__name__)

SLICE_SECONDS = 0.1  # generated in one job; a microbatch may run before the next one, so both make progress


class TextGenerator:
    """Continues prompts with all layers of a model; one completion at a time, so that memory stays bounded."""

    def __init__(
        self,
        compute: ComputeThread,
        chain: ModelChain,
        tokenizer: Tokenizer,
        slice_seconds: float = SLICE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compute = compute
        self._chain = chain
        self._tokenizer = tokenizer
        self._slice_seconds = slice_seconds
        self._clock = clock
        self._turn = anyio.Lock()

    async def generate(self, request: Generate) -> GenerationSummary:
        """Run one request; its pieces go to the request's sink from the compute thread.

        A prompt longer than the context loses its beginning, which the summary counts. Raises NotReadyError when
        this node does not hold the whole model.
        """
        if not self._chain.is_whole:
            raise NotReadyError("This node holds only a part of the model.", "Ask a node that holds all layers.")
        async with self._turn:
            completion = Completion(self._chain, self._tokenizer, request)
            if completion.truncated_tokens:
                _LOG.info(
                    "The first %d tokens of the prompt are beyond the context of %d and were left out.",
                    completion.truncated_tokens,
                    self._chain.architecture.sequence_length,
                )
            while not completion.is_finished:
                await self._compute.run(lambda: self._advance(completion), Priority.SMALL)
            return completion.summary()

    def _advance(self, completion: Completion) -> None:
        """At least one token, and more until the slice of time is used up."""
        until = self._clock() + self._slice_seconds
        while not completion.is_finished:
            completion.next_token()
            if self._compute.cancelled.is_set():
                completion.cancel()
            if self._clock() >= until:
                return


class Completion:
    """The state of one completion; runs on the compute thread."""

    def __init__(self, chain: ModelChain, tokenizer: Tokenizer, request: Generate) -> None:
        self._chain = chain
        self._request = request
        prompt: list[int] = tokenizer.encode(request.prompt, bos=True).tolist()
        self._context = context = chain.architecture.sequence_length
        self.truncated_tokens = max(0, len(prompt) - context)
        self._prompt_tokens = len(prompt) - self.truncated_tokens
        self._ids: list[int] = prompt[-context:]
        self._unread: list[int] = []
        self._caches: ChainCaches | None = None
        self._stops = StopSequences(request.stop)
        self._decoder = tokenizer.decoder()
        self._allowed = allowed_ids(tokenizer.size, chain.architecture.vocabulary_size)
        self._random = torch.Generator()
        if request.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(request.seed)
        self._count = 0
        self._finish_reason: str | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the last piece went out."""
        return self._finish_reason is not None

    def summary(self) -> GenerationSummary:
        """Usage in real tokens; those of the prompt include the one that begins a text."""
        reason = self._finish_reason or "length"
        return GenerationSummary(self._prompt_tokens, self._count, reason, self.truncated_tokens)

    def cancel(self) -> None:
        """End here; the last piece says so."""
        if not self.is_finished:
            self._finish("stop")

    def next_token(self) -> None:
        """Generate one token and hand on the text that became certain."""
        if self._request.cancelled.is_set():
            self.cancel()
            return
        if self._count >= self._request.max_tokens:
            self._finish("length")
            return
        token = self._sample()
        self._count += 1
        if token == EOS:
            self._finish("stop")
            return
        text = self._stops.feed(self._decoder.feed(token))
        if self._stops.reached:
            self._finish("stop", text)
        elif self._count >= self._request.max_tokens:
            self._finish("length", text)
        elif text:
            self._request.sink(GeneratedText(text, self._count))

    def _sample(self) -> int:
        if self._caches is None or not self._chain.fits(self._caches):  # a pause moves the model
            self._unread = self._ids[-self._context :]
            self._caches = self._chain.caches()
        logits = self._chain.next_logits(self._unread, self._caches)
        allowed = self._allowed.to(logits.device)
        token = sample_next(
            torch.where(allowed, logits, -torch.inf), self._request.temperature, self._request.top_p, self._random
        )
        self._unread = [token]
        self._ids.append(token)
        return token

    def _finish(self, reason: str, text: str = "") -> None:
        self._finish_reason = reason
        self._caches = None
        if not self._stops.reached:
            text += self._stops.feed(self._decoder.finish()) + self._stops.finish()
        self._request.sink(GeneratedText(text, self._count, reason))


def allowed_ids(tokenizer_size: int, vocabulary_size: int) -> Tensor:
    """Mask (vocabulary,) of ids that may be generated: those that stand for bytes, and the end of a text."""
    ids = torch.arange(vocabulary_size)
    return ((ids >= FIRST_BYTE_ID) & (ids < tokenizer_size)) | (ids == EOS)
