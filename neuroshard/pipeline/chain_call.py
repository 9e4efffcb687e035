"""A microbatch's call in which stages hand their results to each other, and the edges between stages that allow it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import anyio
import torch
from torch import Tensor

from neuroshard.pipeline.chain_protocol import (
    BACKWARD,
    FORWARD,
    LOSS,
    Neighbour,
    Passed,
    PassName,
    Receipt,
    wire_digest,
)
from neuroshard.pipeline.microbatch import (
    DisputedTensorError,
    LostGradientError,
    MicrobatchKey,
    NotHandedYetError,
    Retry,
    SpoiltMicrobatchError,
    StageBusyError,
    StageError,
)
from neuroshard.pipeline.microbatch_call import PATIENCE_SECONDS, RETRY_SECONDS, MicrobatchCall
from neuroshard.pipeline.routing import Routing
from neuroshard.pipeline.stage_client import MicrobatchResult, RemoteStageClient, StageClient
from neuroshard.pipeline.stage_protocol import COARSE, INPUTS, WirePrecision, to_wire
from neuroshard.pipeline.tensor_checks import LARGEST_ROUNDING
from neuroshard.status.pipeline import StarEdge
from neuroshard.types import NodeId

_LOG = logging.getLogger(__name__)

CHAIN_ATTEMPTS = 3  # of one microbatch, before the driver passes its tensors on
STAR_AFTER = 2  # tensors in a row that could not be handed on
STAR_SECONDS = 300.0  # the driver passes the tensors of such an edge on itself, then the stages try again
MOST_EDGES = 1024


class ChainEdges:
    """The pairs of neighbours that cannot hand tensors to each other now. The driver passes theirs on itself."""

    def __init__(self, precision: WirePrecision, clock: Callable[[], float] = anyio.current_time) -> None:
        """`precision` is that of activations on the wire."""
        self.precision = precision
        self._clock = clock
        self._failures: dict[tuple[NodeId, NodeId], int] = {}
        self._star_until: dict[tuple[NodeId, NodeId], float] = {}

    def is_chained(self, one: NodeId, other: NodeId) -> bool:
        """Whether these two nodes hand tensors to each other."""
        return self._star_until.get(_edge(one, other), 0.0) <= self._clock()

    def note(self, one: NodeId, other: NodeId, *, was_handed: bool) -> None:
        """Note whether a tensor was handed over."""
        edge = _edge(one, other)
        failures = 0 if was_handed else self._failures.get(edge, 0) + 1
        if failures >= STAR_AFTER:
            self.avoid(one, other)
            failures = 0
        self._failures[edge] = failures
        while len(self._failures) > MOST_EDGES:
            del self._failures[next(iter(self._failures))]

    def avoid(self, one: NodeId, other: NodeId) -> None:
        """Pass the tensors between these two on from now on, for STAR_SECONDS."""
        now = self._clock()
        self._star_until = {edge: until for edge, until in self._star_until.items() if until > now}
        self._star_until[_edge(one, other)] = now + STAR_SECONDS
        _LOG.info("Activations between %s and %s go through this node for a while.", one, other)

    def stars(self) -> tuple[StarEdge, ...]:
        """The pairs whose tensors this node passes on now."""
        now = self._clock()
        return tuple(StarEdge(*edge) for edge, until in sorted(self._star_until.items()) if until > now)


def _edge(one: NodeId, other: NodeId) -> tuple[NodeId, NodeId]:
    return min(one, other), max(one, other)


@dataclass(frozen=True)
class _Question:
    """One stage's part of a pass through several stages."""

    stage: int
    hop: RemoteStageClient
    name: PassName
    before: Neighbour | None
    after: Neighbour | None
    given: Tensor | None = None
    ids: Tensor | None = None  # of the tokens, with `given`
    labels: Tensor | None = None

    async def asked(self, key: MicrobatchKey) -> Passed:
        """Ask the stage. Raises StageError."""
        return await self.hop.pass_on(
            self.name, key, before=self.before, after=self.after, given=self.given, ids=self.ids, labels=self.labels
        )


class ChainedCall(MicrobatchCall):
    """Asks neighbouring remote stages at the same time, and each hands its result to the next one.

    Where that fails, the call gets the tensor from the stage that computed it and continues as MicrobatchCall does: the
    tests of its recovery apply to this one. Invariant: the chain gives the losses and gradients of the star.
    """

    def __init__(
        self,
        edges: ChainEdges,
        routing: Routing,
        key: MicrobatchKey,
        input_ids: Tensor,
        labels: Tensor,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        rounding: float = LARGEST_ROUNDING,
    ) -> None:
        super().__init__(routing, key, input_ids, labels, patience_seconds=patience_seconds, rounding=rounding)
        self._edges = edges
        self._given: dict[int, str] = {}  # digest of the output that the next stage took, by stage
        self._loss_sum: Tensor | None = None
        self._is_broken = False  # the last attempt lost a stage, which another replica may replace

    async def forward(self) -> MicrobatchResult:
        last, stage = self._routing.stage_count - 1, 0
        try:
            while self._loss_sum is None:
                stage = await self._through_chain(stage)
                if self._loss_sum is None and stage < last:
                    self._inputs[stage + 1] = await self._at(stage, partial(self._forward, stage))
                    stage += 1
                elif self._loss_sum is None:
                    self._loss_sum, self._gradient = await self._at(last, self._loss)
        except BaseException:
            self._leave_stages()
            raise
        self._finished(last)
        return MicrobatchResult(self._loss_sum, self.labels.numel())

    async def backward(self) -> None:
        stage = self._routing.stage_count - 2
        try:
            while stage >= 0:
                stage = await self._chain_backward(stage)
                if stage >= 0:
                    gradient = await self._held_gradient(stage)
                    self._gradient = await self._at(stage, partial(self._backward, stage, gradient))
                    self._finished(stage)
                    stage -= 1
        except BaseException:
            self._leave_stages()
            raise

    async def _through_chain(self, stage: int) -> int:
        """Pass the microbatch on from `stage` in the chain; the first stage that the chain has not done.

        When a stage is lost, the one before it hands its output again, to the replacement.
        """
        for _ in range(CHAIN_ATTEMPTS):
            is_handed_again = stage not in self._inputs
            stage = max(stage, await self._chain_forward(stage - is_handed_again))
            if not self._is_broken:
                break
        return stage

    async def _chain_forward(self, start: int) -> int:
        """Pass the microbatch through the stages from `start` that form a chain; the first stage not done by it."""
        self._is_broken = False
        last, hops = self._routing.stage_count - 1, list[RemoteStageClient]()
        for stage in range(start, last + 1):
            if not self._joins(hop := await self._hop(stage), hops):
                break
            hops.append(hop)
        if len(hops) < 2:
            return start
        links = [None, *[hop.neighbour for hop in hops], None]
        questions = [
            _Question(
                start + place,
                hop,
                LOSS if start + place == last else FORWARD,
                before=links[place],
                after=links[place + 2],
                given=None if place else self._inputs.get(start),
                ids=None if place else self.ids,
                labels=self.labels if start + place == last else None,
            )
            for place, hop in enumerate(hops)
        ]
        for question, passed in await self._passed(questions):
            if question.stage == last:
                self._gradient = passed.tensor
                self._loss_sum = _loss_of(passed.receipt)
            else:
                self._note_passed(question.stage, question.hop, passed.receipt)
                if passed.tensor is not None:
                    self._inputs[question.stage + 1] = passed.tensor
            start = question.stage + 1
        return start

    async def _chain_backward(self, start: int) -> int:
        """Pass the gradient down through the stages from `start` that form a chain; the first stage not done by it."""
        hops = list[RemoteStageClient]()
        for stage in range(start, -1, -1):
            hop = self.hops[stage]
            if hop is None or hop is not self._opened[stage] or not self._joins(hop, hops):
                break
            hops.append(hop)
        above = self.hops[start + 1] if self._gradient is None else None  # has handed the gradient to the first of them
        if len(hops) + (above is not None) < 2:
            return start
        links = [
            above.neighbour if isinstance(above, RemoteStageClient) else None,
            *[hop.neighbour for hop in hops],
            None,
        ]
        questions = [
            _Question(
                start - place,
                hop,
                BACKWARD,
                before=links[place + 2],
                after=links[place],
                given=None if place else self._gradient,
            )
            for place, hop in enumerate(hops)
        ]
        for question, passed in await self._passed(questions):
            self._gradient = passed.tensor
            self._finished(question.stage)
            start = question.stage - 1
        return start

    def _joins(self, hop: StageClient, hops: Sequence[RemoteStageClient]) -> TypeGuard[RemoteStageClient]:
        """Whether a stage can be the next one of these in a chain."""
        if not isinstance(hop, RemoteStageClient):
            return False
        return not hops or self._edges.is_chained(hops[-1].node_id, hop.node_id)

    async def _passed(self, questions: Sequence[_Question]) -> list[tuple[_Question, Passed]]:
        """Ask all stages at the same time; the answers up to the first stage that failed or kept its result.

        Raises StageError if this microbatch can never succeed.
        """
        found: list[Passed | StageError | None] = [None] * len(questions)
        answered_at: list[float | None] = [None] * len(questions)
        scopes = [anyio.CancelScope() for _ in questions]

        async def ask(place: int) -> None:
            with scopes[place]:
                fed_at = (lambda: began) if place == 0 else (lambda: answered_at[place - 1])
                found[place] = await self._answer(questions[place], fed_at)
                answered_at[place] = anyio.current_time()
            answer = found[place]
            if not (isinstance(answer, Passed) and answer.receipt.was_handed):
                for scope in scopes[place + 1 :]:
                    scope.cancel()
            if isinstance(answer, StageError) and place:
                scopes[place - 1].cancel()  # it may try for long to reach this stage, and is asked again

        began = anyio.current_time()
        async with anyio.create_task_group() as asking:
            for place in range(len(questions)):
                asking.start_soon(ask, place)
        for question, answer in zip(questions, found, strict=True):
            if isinstance(answer, StageError):
                self._lose(question, answer)
                break
        done = list[tuple[_Question, Passed]]()
        for place, (question, answer) in enumerate(zip(questions, found, strict=True)):
            if not isinstance(answer, Passed):
                break
            self._check_digests(done, question, answer)
            done.append((question, answer))
            if place + 1 < len(questions):
                self._edges.note(
                    question.hop.node_id, questions[place + 1].hop.node_id, was_handed=answer.receipt.was_handed
                )
            if not answer.receipt.was_handed:
                break
        return done

    async def _answer(self, question: _Question, fed_at: Callable[[], float | None]) -> Passed | StageError:
        """Ask one stage until it has answered; `fed_at` returns when the stage before it has, None if it has not.

        A busy stage is asked again. One that got no tensor although its neighbour has handed it over has failed.
        """
        waits_until = anyio.current_time() + self._patience_seconds
        while True:
            began, was_fed = anyio.current_time(), fed_at() is not None
            try:
                passed = await question.asked(self.key)
            except NotHandedYetError as error:
                if was_fed:
                    return error
                await anyio.sleep(RETRY_SECONDS)  # it answers at once if it has used a tensor and given the work up
            except StageBusyError as error:
                if error.retry is not Retry.HERE or anyio.current_time() >= waits_until:
                    return error
                self._routing.busy(question.stage, question.hop, error)
                await anyio.sleep(RETRY_SECONDS)
            except StageError as error:
                return error
            else:
                hop, seconds = self._at_work[question.stage]
                now, fed = anyio.current_time(), fed_at()
                # a stage that reports a longer wait than it had would seem faster than it is and attract work
                since_fed = 0.0 if fed is None else now - max(began, fed)
                self._at_work[question.stage] = (
                    hop,
                    seconds + max(now - began - passed.receipt.arrival_seconds, since_fed),
                )
                return passed

    def _lose(self, question: _Question, error: StageError) -> None:
        """Use another replica than the one that failed, in the forward pass. Raises errors that end the microbatch.

        A disputed tensor needs a second opinion, which `_at` gets.
        """
        if error.retry is Retry.NEVER:
            raise error
        if error.retry is Retry.HERE or isinstance(error, DisputedTensorError) or question.name == BACKWARD:
            return
        _LOG.debug("Stage %d: trying another node: %s", question.stage + 1, error)
        self._routing.failed(question.stage, question.hop, error)
        self.hops[question.stage], self._is_broken = None, True
        self.failures += 1
        del self._at_work[question.stage]

    def _check_digests(self, done: Sequence[tuple[_Question, Passed]], question: _Question, passed: Passed) -> None:
        """Raise SpoiltMicrobatchError if a stage took something other than its neighbour gave.

        One of the two lies. It cannot be found out which one, so neither is avoided: a liar could drive others out.
        """
        if not (done and passed.receipt.taken and done[-1][1].receipt.given != passed.receipt.taken):
            return
        self._edges.avoid(done[-1][0].hop.node_id, question.hop.node_id)
        raise SpoiltMicrobatchError("Two neighbours report different digests of one tensor of this microbatch.")

    def _note_passed(self, stage: int, hop: StageClient, receipt: Receipt) -> None:
        """Record who did the forward pass, and whether a replacement is exact, as `_note_opened` does."""
        self._opened[stage], before = hop, self._first[stage]
        if before is None:
            self._first[stage], self._roots[stage], self._given[stage] = hop, receipt.root, receipt.given
        elif before.node_id != hop.node_id or receipt.given != self._given[stage]:
            self._note_replacement(stage, before, hop, is_alike=receipt.given == self._given[stage])

    def _note_opened(self, stage: int, hop: StageClient, output: Tensor) -> None:
        """Record a forward pass whose output came here. It is compared by digest, if the first one did not come."""
        if self._first[stage] is None or stage + 1 in self._inputs:
            super()._note_opened(stage, hop, output)
            return
        self._opened[stage], before = hop, self._first[stage]
        precision, given = self._edges.precision, self._given.get(stage)
        is_alike = precision not in COARSE and wire_digest(to_wire(INPUTS, output, precision)) == given
        if before is not None and (before.node_id != hop.node_id or not is_alike):
            self._note_replacement(stage, before, hop, is_alike=is_alike)

    async def _fetch(self, stage: int) -> None:
        """Get the inputs of a stage from the node that computed them, or have them computed again."""
        hop = self.hops[stage - 1]
        if isinstance(hop, RemoteStageClient) and self._opened[stage - 1] is hop:
            try:
                tensor = (await hop.pass_on(FORWARD, self.key)).tensor
            except StageError as error:
                _LOG.debug("Stage %d cannot give its output again: %s", stage, error)
                tensor, self._opened[stage - 1] = None, None
            if tensor is not None:
                self._inputs[stage] = tensor
                return
        self._inputs[stage] = await self._at(stage - 1, partial(self._forward, stage - 1))

    async def _held_gradient(self, stage: int) -> Tensor:
        """The gradient of a stage's output, from the stage after it if need be.

        Raises LostGradientError if that node is gone.
        """
        gradient, after = self._gradient, self.hops[stage + 1]
        if gradient is None and isinstance(after, RemoteStageClient):
            is_last = stage + 2 == self._routing.stage_count
            try:
                gradient = (await after.pass_on(LOSS if is_last else BACKWARD, self.key)).tensor
            except StageError as error:
                raise LostGradientError(f"The gradient for stage {stage + 1} is lost. {error.message}") from error
        if gradient is None:
            raise ValueError("only the first stage of a run has no gradient to send back")
        return gradient


def _loss_of(receipt: Receipt) -> Tensor:
    if receipt.loss_sum is None:
        raise ValueError("a receipt without a loss passed its checks")
    return torch.tensor(receipt.loss_sum)
