"""One microbatch on its way through all stages: it keeps what each stage took, so that a lost one can be replaced."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import anyio
import torch
from torch import Tensor

from neuroshard.training.held_out_claim import Measured
from neuroshard.training.microbatch import (
    DisputedTensorError,
    MicrobatchKey,
    Retry,
    StageError,
    UnknownMicrobatchError,
)
from neuroshard.training.pipeline import Hop, MicrobatchResult
from neuroshard.training.routing import Dispute, Routing
from neuroshard.training.value_bounds import are_alike

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

RETRY_SECONDS = 0.25
PATIENCE_SECONDS = 30.0  # with a stage that is there but busy, paused or behind; then another replica is tried


@dataclass(frozen=True)
class Replacement:
    """A stage whose work was done again in mid-microbatch, by another replica or by the same one after a step."""

    stage: int
    before: Hop
    after: Hop
    is_exact: bool  # both said that their weights are the same, and gave the same


class MicrobatchRun:
    """Forward through the stages and backward in reverse; gradients stay accumulated in the stages.

    A stage that fails is asked again, or replaced by another replica, which does that stage's work of this microbatch
    from what is kept here and nothing else's (DESIGN 4.2, point 5); a tensor that is refused twice ends it. Law: any
    split of the layers over the hops gives the same loss and gradients as one hop that holds them all.
    """

    def __init__(
        self,
        routing: Routing,
        key: MicrobatchKey,
        input_ids: Tensor,
        labels: Tensor,
        *,
        measured: Callable[[MicrobatchResult], None] = lambda _result: None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """`measured` is told the loss before the backward passes begin, after which stages may step."""
        stages = routing.stage_count
        self.key = key
        self.replacements: list[Replacement] = []
        self.failures = 0  # after which somebody else was asked
        self.waits_for: int | None = None  # the stage that somebody is looked for
        self.hops: list[Hop | None] = [None] * stages
        self.asked: dict[tuple[int, int], tuple[int, Hop]] = {}  # all that were asked for anything, to be told the end
        self._routing = routing
        self._labels = labels
        self._inputs: list[Tensor] = [input_ids]  # of each stage that was reached
        self._opened: list[Hop | None] = [None] * stages  # who did the forward pass and still knows of it
        self._first: list[Hop | None] = [None] * stages  # who did the one whose output the next stage has worked on
        self._roots: dict[int, str] = {}  # names the weights behind the output that the next stage got
        self._seconds: dict[int, float] = {}  # of the requests that were answered by those who are not done yet
        self._measured = measured
        self._patience_seconds = patience_seconds

    @property
    def tokens(self) -> int:
        """Of this microbatch."""
        return self._labels.numel()

    @property
    def has_left_first_stage(self) -> bool:
        """Whether the first stage has taken the data and another one works on what it made of them."""
        return len(self._inputs) > 1

    async def run(self) -> MicrobatchResult:
        """Until every stage has accumulated it. Raises StageError for a microbatch that can never succeed."""
        try:
            return await self._through()
        finally:
            for stage in self._seconds:
                self._routing.left(stage, _known(self.hops[stage]))

    async def _through(self) -> MicrobatchResult:
        last = self._routing.stage_count - 1
        for stage in range(last):
            self._inputs.append(await self._at(stage, partial(self._forward, stage)))
        loss_sum, gradient = await self._at(last, self._loss)
        result = MicrobatchResult(loss_sum, self._labels.numel())
        self._finished(last)
        self._measured(result)
        for stage in reversed(range(last)):
            if gradient is None:
                raise ValueError("only the first stage of a run has no gradient to send back")
            gradient = await self._at(stage, partial(self._backward, stage, gradient))
            self._finished(stage)
        return result

    def _finished(self, stage: int) -> None:
        self._routing.finished(stage, _known(self.hops[stage]), self._seconds.pop(stage))

    async def _forward(self, stage: int, hop: Hop) -> Tensor:
        output = await hop.forward(self.key, self._inputs[stage])
        self._note_opened(stage, hop, output)
        return output

    async def _loss(self, hop: Hop) -> tuple[Tensor, Tensor | None]:
        return await hop.loss(self.key, self._inputs[-1], self._labels)

    async def _backward(self, stage: int, gradient: Tensor, hop: Hop) -> Tensor | None:
        if self._opened[stage] is not hop:  # it does not know the forward pass
            await self._forward(stage, hop)
        try:
            return await hop.backward(self.key, gradient)
        except UnknownMicrobatchError:
            self._opened[stage] = None
            raise

    def _note_opened(self, stage: int, hop: Hop, output: Tensor) -> None:
        """A replacement is exact when its weights are those whose output the next stage has worked on.

        Who names those weights and gives something else has others, or whoever was replaced had: that is not exact.
        A node that remembers its answer, or gives it once more, replaces nobody, also over another connection.
        """
        self._opened[stage], before = hop, self._first[stage]
        if before is None:
            self._first[stage], self._roots[stage] = hop, hop.state_root
        elif before.node_id != hop.node_id or not torch.equal(output, self._inputs[stage + 1]):
            root = self._roots[stage]
            is_exact = bool(root) and hop.state_root == root and are_alike(output, self._inputs[stage + 1])
            self.replacements.append(Replacement(stage, before, hop, is_exact))

    async def _at(self, stage: int, work: Callable[[Hop], Awaitable[T]]) -> T:
        """The answer of whoever does this stage in the end."""
        waits_until = anyio.current_time() + self._patience_seconds
        last = self.hops[stage]  # who was asked
        dispute = Dispute(self._routing, stage)
        while True:
            hop = self.hops[stage]
            if hop is None:
                self.waits_for = stage
                hop = self.hops[stage] = await self._routing.hop(stage)
                self.waits_for = None
                self.failures += last is not None and last.node_id != hop.node_id
                last = hop
                self.asked[stage, id(hop)] = (stage, hop)
                self._seconds[stage] = 0.0
                waits_until = anyio.current_time() + self._patience_seconds
            began = anyio.current_time()
            try:
                answer = await work(hop)
            except StageError as error:
                if error.retry is Retry.NEVER:
                    raise
                dispute.note(hop, error)
                if error.retry is Retry.ELSEWHERE or anyio.current_time() >= waits_until:
                    _LOG.debug("Stage %d is asked elsewhere: %s", stage + 1, error)
                    self._routing.failed(stage, hop, error)
                    self.hops[stage] = None
                    del self._seconds[stage]
                else:
                    self._routing.busy(stage, hop, error)
                    await anyio.sleep(RETRY_SECONDS)
            else:
                self._seconds[stage] += anyio.current_time() - began
                return answer


def _known(hop: Hop | None) -> Hop:
    if hop is None:
        raise ValueError("a stage that was asked has a hop")
    return hop


async def measured_losses(routing: Routing, input_ids: Tensor, labels: Tensor) -> Measured:
    """The loss of each sequence, (b,) summed over its tokens, without touching gradients. Raises StageError."""
    *before, last = range(routing.stage_count)
    activations = input_ids
    for stage in before:
        activations = await _told(routing, stage, lambda hop, inputs=activations: hop.infer(inputs))
    return await _told(routing, last, lambda hop: hop.measure(activations, labels))


async def _told(routing: Routing, stage: int, ask: Callable[[Hop], Awaitable[T]]) -> T:
    dispute = Dispute(routing, stage)
    while True:
        hop = await routing.hop(stage)
        failure: StageError | None = None
        try:
            return await ask(hop)
        except StageError as error:
            dispute.note(hop, error)
            failure = error if error.retry is Retry.ELSEWHERE else None
            if not isinstance(error, DisputedTensorError):
                raise
        finally:
            if failure is None:
                routing.left(stage, hop)
            else:
                routing.failed(stage, hop, failure)
