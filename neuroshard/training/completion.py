"""One completion as whoever asked for it sees it: what is read next, which token follows, which text is certain."""

from __future__ import annotations

import torch
from torch import Tensor

from neuroshard.data.tokenizer.encoder import Tokenizer
from neuroshard.data.tokenizer.table import EOS, FIRST_BYTE_ID
from neuroshard.model.sampling import sample_next
from neuroshard.status.commands import Generate, GeneratedText, GenerationSummary
from neuroshard.training.stop_sequences import StopSequences
from neuroshard.types import Architecture


class Completion:
    """Knows the text and no model. One thread at a time."""

    def __init__(self, architecture: Architecture, tokenizer: Tokenizer, request: Generate) -> None:
        self._request = request
        prompt: list[int] = tokenizer.encode(request.prompt, bos=True).tolist()
        self._context = context = architecture.sequence_length
        self.truncated_tokens = max(0, len(prompt) - context)
        self._prompt_tokens = len(prompt) - self.truncated_tokens
        self._ids: list[int] = prompt[-context:]
        self.position = 0  # tokens that the stages have read
        self.unread = list(self._ids)  # what they read next
        self._stops = StopSequences(request.stop)
        self._decoder = tokenizer.decoder()
        self._allowed = allowed_ids(tokenizer.size, architecture.vocabulary_size)
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

    def wants_token(self) -> bool:
        """Whether another token is wanted; a completion that was cancelled or wants none ends here."""
        if self.is_finished:
            return False
        if self._request.cancelled.is_set():
            self.cancel()
        elif self._count >= self._request.max_tokens:
            self._finish("length")
        return not self.is_finished

    def read_again(self) -> None:
        """The stages must read the text anew: all of it, or its end where it is longer than the context."""
        self.position = 0
        self.unread = self._ids[-self._context :]

    def take(self, logits: Tensor) -> None:
        """Add the token that the logits (vocabulary,) of what follows give, and hand on the text that became certain.

        Raises ValueError for logits that are not finite.
        """
        token = self._sample(logits)
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

    def _sample(self, logits: Tensor) -> int:
        masked = torch.where(self._allowed, logits.cpu(), -torch.inf)
        token = sample_next(masked, self._request.temperature, self._request.top_p, self._random)
        self.position += len(self.unread)
        self.unread = [token]
        self._ids.append(token)
        self._count += 1
        return token

    def _finish(self, reason: str, text: str = "") -> None:
        self._finish_reason = reason
        if not self._stops.reached:
            text += self._stops.feed(self._decoder.finish()) + self._stops.finish()
        self._request.sink(GeneratedText(text, self._count, reason))


def allowed_ids(tokenizer_size: int, vocabulary_size: int) -> Tensor:
    """Mask (vocabulary,) of ids that may be generated: those that stand for bytes, and the end of a text."""
    ids = torch.arange(vocabulary_size)
    return ((ids >= FIRST_BYTE_ID) & (ids < tokenizer_size)) | (ids == EOS)
