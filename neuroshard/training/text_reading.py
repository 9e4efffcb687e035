"""The two ways to read a text with all stages: those of this node in slices of time, those of a swarm one by one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import anyio
import torch
from torch import Tensor

from neuroshard.errors import NotReadyError
from neuroshard.training.beside import beside
from neuroshard.training.completion import Completion
from neuroshard.training.compute import ComputeThread, Priority
from neuroshard.training.microbatch import (
    Retry,
    SpoiltMicrobatchError,
    StageBusyError,
    StageError,
    UnreadTextError,
)
from neuroshard.training.pipeline import Hop
from neuroshard.training.routing import Dispute, Routing
from neuroshard.training.stage_texts import StageTexts, Text
from neuroshard.types import NodeId

_LOG = logging.getLogger(__name__)

SLICE_SECONDS = 0.1  # generated in one job; a microbatch may run before the next one, so both make progress
PATIENCE_SECONDS = 20.0  # with a stage that nobody answers for, and after the first failure of a token
RETRY_SECONDS = 0.25
OWN_TEXT = 0  # session of the only text that this node reads with its own stages alone


class LocalReading:
    """See Reading: this node holds every stage, so many tokens fit in one job of the compute thread."""

    def __init__(
        self,
        compute: ComputeThread,
        stages: Sequence[StageTexts],
        node_id: NodeId,
        slice_seconds: float = SLICE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stages` are all of the model in the order of their layers."""
        self._compute = compute
        self._stages = tuple(stages)
        self._node_id = node_id
        self._slice_seconds = slice_seconds
        self._clock = clock

    async def advance(self, completion: Completion) -> None:
        """See Reading; the pieces go to the sink from the compute thread."""
        try:
            texts = [stage.text(self._node_id, OWN_TEXT) for stage in self._stages]
            await self._compute.run(lambda: self._slice(completion, texts), Priority.TEXT)
        except StageError as error:
            raise _not_ready(error) from error

    async def end(self) -> None:
        """See Reading."""
        for stage in self._stages:
            stage.forget(self._node_id, OWN_TEXT)

    def _slice(self, completion: Completion, texts: Sequence[Text]) -> None:
        """At least one token, and more until the slice of time is used up."""
        until = self._clock() + self._slice_seconds
        while completion.wants_token():
            completion.take(self._logits(completion, texts))
            if self._compute.cancelled.is_set():
                completion.cancel()
            if self._clock() >= until:
                return

    def _logits(self, completion: Completion, texts: Sequence[Text]) -> Tensor:
        try:
            return self._through(completion, texts)
        except UnreadTextError:  # the weights have changed since the last slice
            completion.read_again()
            return self._through(completion, texts)

    def _through(self, completion: Completion, texts: Sequence[Text]) -> Tensor:
        values = torch.tensor([completion.unread])
        for stage, text in zip(self._stages, texts, strict=True):
            values = stage.advance(text, completion.position, values)
        return values


class SwarmReading:
    """See Reading: each stage is read with at a node that holds it, for as long as that works.

    Whatever goes wrong at a stage (its weights have changed, it is gone, it has forgotten the text), the text is read
    again from its beginning by all, and by somebody else where somebody was lost.
    """

    def __init__(
        self,
        routing: Routing,
        session: int,
        missing: Callable[[], str] = lambda: "",
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """`session` is a number that no other text of this node has; `missing` says which layers nobody holds."""
        self._routing = routing
        self._session = session
        self._missing = missing
        self._patience_seconds = patience_seconds
        self._hops: dict[int, Hop] = {}
        self._refusals: dict[int, str] = {}  # the last of each stage
        self._disputes: dict[int, Dispute] = {}  # by stage, about what it has not read yet
        self.read_again = 0  # how often the text had to be read from its beginning

    async def advance(self, completion: Completion) -> None:
        """See Reading."""
        gives_up_at: float | None = None
        while True:
            try:
                logits = await self._through(completion)
                break
            except StageError as error:
                if gives_up_at is None:
                    gives_up_at = anyio.current_time() + self._patience_seconds
                if error.retry is Retry.NEVER or anyio.current_time() >= gives_up_at:
                    raise _not_ready(error) from error
                if not isinstance(error, UnreadTextError):
                    _LOG.info("A text is read again: %s", error)
                    await anyio.sleep(RETRY_SECONDS)
                self.read_again += 1
                completion.read_again()
        await beside(lambda: completion.take(logits), logits)

    async def end(self) -> None:
        """See Reading."""
        async with anyio.create_task_group() as tasks:
            for stage, hop in self._hops.items():
                tasks.start_soon(self._forget, stage, hop)

    async def _through(self, completion: Completion) -> Tensor:
        values = torch.tensor([completion.unread])
        for stage in range(self._routing.stage_count):
            hop = self._hops.get(stage) or await self._found(stage)
            try:
                values = await hop.read(self._session, completion.position, values)
            except StageError as error:
                self._disputes.setdefault(stage, Dispute(self._routing, stage)).note(hop, error)
                if error.retry is Retry.ELSEWHERE or isinstance(error, StageBusyError):
                    del self._hops[stage]
                    self._refusals[stage] = error.message
                    self._routing.failed(stage, hop, error)
                raise
            self._disputes.pop(stage, None)
        return values

    async def _found(self, stage: int) -> Hop:
        with anyio.move_on_after(self._patience_seconds):
            hop = self._hops[stage] = await self._routing.hop(stage)
            return hop
        reason = self._missing() or self._refusals.get(stage)
        reason = reason or f"Nobody answers for stage {stage + 1} of {self._routing.stage_count}."
        raise NotReadyError(f"The text cannot be continued now. {reason}", "Try again a little later.")

    async def _forget(self, stage: int, hop: Hop) -> None:
        self._routing.left(stage, hop)
        try:
            await hop.forget(self._session)
        except StageError as error:
            _LOG.debug("A stage was not told that a text is done: %s", error)


def _not_ready(error: StageError) -> NotReadyError:
    if isinstance(error, SpoiltMicrobatchError):
        return NotReadyError("The model's values are not numbers now.", "Try again after the next good steps.")
    return NotReadyError(f"The text cannot be continued now. {error.message}", "Try again a little later.")
