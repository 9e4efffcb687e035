"""Texts that a stage continues: a bounded table with the keys and values of each text's tokens.

A cache belongs to one state of the weights. Once the weights have changed, the text is read again from its
beginning, so that every token comes from the present weights."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import anyio
import torch
from torch import Tensor

from neuroshard.model.memory_need import CACHED_TEXTS
from neuroshard.model.transformer import KeyValueCache
from neuroshard.pipeline.arithmetic import Executor
from neuroshard.pipeline.executor import ComputeThread, Priority
from neuroshard.pipeline.microbatch import SpoiltMicrobatchError, StageBusyError, UnreadTextError
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.types import NodeId


@dataclass(frozen=True)
class TextLimits:
    """Limits of the texts that a stage remembers."""

    texts: int = CACHED_TEXTS
    of_requester: int = 2
    idle_seconds: float = 30.0  # a text is forgotten when it was not used for this time
    most_seconds: float = 900.0  # a text is forgotten at this age, even if it is in use


@dataclass(eq=False)
class Text:
    """One text at this stage. The compute thread writes `cache` and `weights`, the event loop the other fields."""

    began: float
    last_used: float
    cache: KeyValueCache | None = None  # None: no token was read with valid weights
    weights: tuple[object, ...] = ()  # the weights with which the cache was computed


class StageTexts:
    """Table of texts. Its methods belong to the event loop's thread, except `advance`."""

    def __init__(
        self,
        compute: ComputeThread,
        executor: Executor,
        shapes: StageShapes,
        limits: TextLimits | None = None,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._compute = compute
        self._executor = executor
        self._shapes = shapes
        self._limits = limits or TextLimits()
        self._clock = clock
        self._texts: dict[tuple[NodeId, int], Text] = {}

    @property
    def count(self) -> int:
        """Number of remembered texts."""
        return len(self._texts)

    async def read(
        self, requester: NodeId, session: int, position: int, inputs: Tensor, ids: Tensor | None = None
    ) -> Tensor:
        """Read the next tokens: ids (1, t) or activations (1, t, d). `position` is that of the first one in the text.

        Coefficients (1, t, k) come with the `ids` (1, t) of their tokens.

        Position 0 starts the text again. Returns activations (1, t, d), or in the last stage the logits (vocabulary,)
        of the next token. Between two jobs of texts, a waiting microbatch is processed.

        Raises StageError: UnreadTextError if the tokens before these were not read with the present weights,
        StageBusyError without room, RefusedTensorError, SpoiltMicrobatchError.
        """
        self._shapes.check_text(inputs, ids)
        text = self.text(requester, session)
        output = await self._compute.run(lambda: self.advance(text, position, inputs, ids=ids).cpu(), Priority.TEXT)
        text.last_used = self._clock()
        return output

    def text(self, requester: NodeId, session: int) -> Text:
        """Return a known text or add a new one. Raises StageBusyError without room for another."""
        now = self._clock()
        self.expire()
        text = self._texts.get((requester, session))
        if text is None:
            self._check_room(requester)
            text = self._texts[requester, session] = Text(now, now)
        text.last_used = now
        return text

    def advance(
        self, text: Text, position: int, inputs: Tensor, *, every_position: bool = False, ids: Tensor | None = None
    ) -> Tensor:
        """Read tokens on the compute thread as `read` does. The result stays on the device.

        With `every_position` the last stage returns the logits (t, vocabulary) of all tokens that it reads. The `ids`
        (1, t) are used where the inputs are coefficients.
        """
        ids = ids if self._shapes.needs_ids else None
        self._shapes.check_values(inputs, ids=ids)
        weights = self._executor.weights
        if position == 0:
            text.cache, text.weights = self._executor.empty_cache(), weights
        cache, text.cache = text.cache, None  # if reading fails half-way, the text stays unread
        if cache is None or cache.position != position or text.weights != weights:
            raise UnreadTextError("The weights have changed or the text is not known: read it from its beginning.")
        output = self._executor.read(inputs, cache, every_position=every_position, ids=ids)
        if not bool(torch.isfinite(output).all()):
            raise SpoiltMicrobatchError("The activations of this text contain values that are not numbers.")
        text.cache = cache
        return output

    def forget(self, requester: NodeId, session: int) -> None:
        """Free the memory of a text."""
        self._texts.pop((requester, session), None)

    def keep_only(self, requesters: Container[NodeId]) -> None:
        """Forget the texts of all nodes that are not in `requesters`."""
        self._texts = {name: text for name, text in self._texts.items() if name[0] in requesters}

    def expire(self) -> None:
        """Forget texts that are too old or were idle for too long."""
        now, limits = self._clock(), self._limits
        self._texts = {
            name: text
            for name, text in self._texts.items()
            if now - text.last_used <= limits.idle_seconds and now - text.began <= limits.most_seconds
        }

    def clear(self) -> None:
        """Forget all texts."""
        self._texts.clear()

    def _check_room(self, requester: NodeId) -> None:
        limits = self._limits
        if sum(name == requester for name, _ in self._texts) >= limits.of_requester:
            raise StageBusyError(
                f"{limits.of_requester} texts of this node are kept here already.", "Forget one first."
            )
        if len(self._texts) >= limits.texts:
            raise StageBusyError(f"{limits.texts} texts are kept here already.", "Try again a little later.")
