"""The arithmetic of a stage on the ranks of a site: each microbatch on one rank, each step on all of them.

Rank 0 has the weights and moments of the node, and a whole `StageExecutor`. The other ranks have copies of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from weakref import finalize

import msgspec
import torch
from torch import Tensor

from neuroshard.config.run_parameters import RunParameters
from neuroshard.identity.run_parameters import run_parameters_to_json
from neuroshard.model.transformer import KeyValueCache, StageModel
from neuroshard.optim.outer import OuterState
from neuroshard.pipeline.executor import OpenMicrobatch, PassResult, Precision, StageExecutor, StepResult
from neuroshard.pipeline.microbatch import SiteFailedError
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.training.site.commands import (
    AddGradients,
    ApplyGradients,
    BuildStage,
    Done,
    Movement,
    MoveTensors,
    PassKind,
    TakeWeights,
    to_message,
)
from neuroshard.training.site.process_group import ProcessGroup, form_of
from neuroshard.training.site.site import PassPart, Site, WaveKind
from neuroshard.training.site.stage_sums import add_gradients, gradient_mask, held_tensors, joined_masks


@dataclass(frozen=True, eq=False)
class RankMicrobatch(OpenMicrobatch):
    """A microbatch between its two passes, which are both computed by one rank. Rank 0 also has its tensors."""

    rank: int = 0
    number: int = 0


class SiteExecutor:
    """An `Executor` whose microbatches are computed by all ranks of a site.

    The other ranks take over weights that have changed since their last pass. Gradients are added once, before a step.
    """

    def __init__(self, own: StageExecutor, site: Site, parameters: RunParameters) -> None:
        """`own` is the stage on rank 0."""
        self._own = own
        self._site = site
        self._parameters = parameters
        self.stage = next(site.numbers)
        self._complete_in = site.incarnation  # start of the ranks since which no gradients were lost
        self._built_in = 0  # start of the ranks in which the stage was built
        self._shared: tuple[object, ...] | None = None  # token of the weights that the ranks have
        self._shared_moments: tuple[object, ...] | None = None
        finalize(self, site.forgotten_stages.append, self.stage)

    @property
    def is_sharded(self) -> bool:
        return self._own.is_sharded

    @property
    def width(self) -> int:
        return self._site.width

    @property
    def model(self) -> StageModel:
        return self._own.model

    @property
    def precision(self) -> Precision:
        return self._own.precision

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self._own.precision = precision

    @property
    def is_suspended(self) -> bool:
        return self._own.is_suspended

    @property
    def is_dropped(self) -> bool:
        return self._own.is_dropped

    @property
    def weights(self) -> tuple[object, ...]:
        return self._own.weights

    # Passes

    def forward_pass(
        self, shapes: StageShapes, inputs: Tensor, *, keeps_graph: bool, ids: Tensor | None = None
    ) -> Future[PassResult]:
        shapes.check_values(inputs, ids=ids)
        here = partial(self._own.forward_pass, shapes, inputs, keeps_graph=keeps_graph, ids=ids)
        return self._add(PassKind.FORWARD, (inputs, None, ids), here, keeps_graph=keeps_graph)

    def loss_pass(
        self, shapes: StageShapes, inputs: Tensor, labels: Tensor, ids: Tensor | None = None
    ) -> Future[PassResult]:
        shapes.check_values(inputs, labels, ids)
        here = partial(self._own.loss_pass, shapes, inputs, labels, ids)
        return self._add(PassKind.LOSS, (inputs, labels, ids), here)

    def backward_pass(self, opened: OpenMicrobatch, gradient: Tensor) -> Future[PassResult]:
        here = partial(self._own.backward_pass, opened, gradient)
        rank, number = (opened.rank, opened.number) if isinstance(opened, RankMicrobatch) else (0, 0)
        return self._add(PassKind.BACKWARD, (gradient,), here, rank=rank, number=number)

    def _add(
        self,
        operation: PassKind,
        tensors: tuple[Tensor | None, ...],
        here: partial[PassResult],
        *,
        keeps_graph: bool = True,
        rank: int | None = None,
        number: int = 0,
    ) -> Future[PassResult]:
        self._check_complete()
        kind = WaveKind(self.stage, operation, self._own.precision, keeps_graph, tuple(map(form_of, tensors)))
        return self._site.add(self, PassPart(kind, tensors, number or next(self._site.numbers), here), rank)

    def prepare(self) -> None:
        """Give the other ranks the stage, and the weights and moments that have changed since their last pass."""
        site = self._site
        if self._build_on_ranks():
            self._shared = None
        moments = self._moments
        if self._shared != self.weights or self._shared_moments != moments:
            with_moments = self._shared is None or self._shared_moments != moments
            site.command(TakeWeights(self.stage, with_moments), is_answered=False)
            held = held_tensors(self._own, with_moments=with_moments)
            site.transfer(lambda group: group.share(held))
            site.answers()
            self._note_shared()

    def _build_on_ranks(self) -> bool:
        """Build the stage on the other ranks; return whether they had none since their present start."""
        site = self._site
        if self._built_in == site.incarnation:
            return False
        json = msgspec.json.encode(run_parameters_to_json(self._parameters))
        layers = (self.model.layer_range.start, self.model.layer_range.stop)
        site.command(BuildStage(self.stage, json, layers, site.compilation, self.is_sharded))
        self._built_in = site.incarnation
        return True

    def compute(self, operation: PassKind, part: PassPart | None) -> None:
        """Compute rank 0's pass. Its errors belong to its microbatch; the other ranks answer all the same."""
        if part is None:
            return
        try:
            result = part.here()
        except BaseException as error:  # noqa: BLE001 - not handled here: the future carries it to the caller
            part.result.set_exception(error)
        else:
            part.result.set_result(result)

    @property
    def _moments(self) -> tuple[object, ...]:
        """Token that compares equal while nothing but an optimizer step has changed the moments."""
        tensors = [tensor for state in self._own.optimizer.state.values() for tensor in state.values()]
        return tuple(tensor._version for tensor in tensors)

    def _note_shared(self) -> None:
        self._shared, self._shared_moments = self.weights, self._moments

    def take(self, part: PassPart, rank: int, done: Done, tensors: Sequence[Tensor | None]) -> PassResult:
        """Make the result of a pass that another rank has run, and keep its loss for the step."""
        output, gradient = tensors
        seconds, spoilt, loss = done.values
        opened = loss_sum = None
        if part.kind.operation is PassKind.FORWARD and output is not None:
            empty = torch.empty(0)
            opened = RankMicrobatch(empty, empty, part.kind.keeps_graph, rank=rank, number=part.number)
            finalize(opened, self._site.forgotten.append, part.number)
        if part.kind.operation is PassKind.LOSS:
            loss_sum = torch.tensor(loss)
            if self.model.is_first or gradient is not None:
                self._own.note_loss(loss_sum)
        return PassResult(opened, output, loss_sum, gradient, is_spoilt=bool(spoilt), seconds=seconds)

    def infer(self, inputs: Tensor, labels: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        return self._own.infer(inputs, labels, ids)

    def empty_cache(self) -> KeyValueCache:
        return self._own.empty_cache()

    def read(
        self, inputs: Tensor, cache: KeyValueCache, *, every_position: bool = False, ids: Tensor | None = None
    ) -> Tensor:
        return self._own.read(inputs, cache, every_position=every_position, ids=ids)

    # Steps

    def step(self, learning_rate: float, max_norm: float, token_count: int) -> StepResult:
        self._gather()
        applied = ApplyGradients(is_step=False)
        try:
            result = self._own.step(learning_rate, max_norm, token_count)
            if result.finite:
                applied = ApplyGradients(True, learning_rate, max_norm, token_count, result.grad_norm)
        finally:  # the other ranks wait for it
            self._let_apply(applied)
        self._note_shared()
        return result

    def take_gradient(self, token_count: int) -> tuple[StepResult, Tensor | None]:
        self._gather()
        try:
            return self._own.take_gradient(token_count)
        finally:
            self._let_apply(ApplyGradients(is_step=False))

    def _gather(self) -> None:
        """Add the gradients of all ranks on rank 0. Raises SiteFailedError if some were lost."""
        self._site.run()
        self._check_complete()
        if self._built_in != self._site.incarnation:
            return  # no pass has begun, so there are no gradients on any rank
        answers = self._site.command(AddGradients(self.stage))
        mask = joined_masks([gradient_mask(self.model), *(answer.present for answer in answers)])

        def add(group: ProcessGroup) -> None:
            group.send_all(mask)
            add_gradients(group, self.model, mask)

        self._site.transfer(add)

    def _let_apply(self, applied: ApplyGradients) -> None:
        """Let the other ranks make the step that rank 0 has made. It stays made if they have failed meanwhile."""
        if self._built_in != self._site.incarnation:
            return
        try:
            self._site.transfer(lambda group: group.send_all(to_message(applied)))
        except SiteFailedError:
            return  # the next pass raises it

    def zero(self) -> None:
        self._own.zero()
        self._move(Movement.ZERO)

    def _check_complete(self) -> None:
        if self._site.failure or self._complete_in != self._site.incarnation:
            raise SiteFailedError(self._site.failure or "a rank has ended, and all ranks were started again")

    def recover(self) -> str:
        obstacle = self._site.restart()
        self._own.zero()
        self._complete_in = self._site.incarnation if not obstacle else 0
        return obstacle

    # The tensors: those of rank 0, which the others take over before their next pass

    def vector(self, out: Tensor | None = None) -> Tensor:
        return self._own.vector(out)

    def load_vector(self, vector: Tensor) -> None:
        self._own.load_vector(vector)

    def other_weights(self, vector: Tensor) -> AbstractContextManager[None]:
        return self._own.other_weights(vector)

    def tensors(self, outer: OuterState) -> Mapping[str, Tensor]:
        return self._own.tensors(outer)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._own.load_tensors(tensors)

    def suspend(self) -> None:
        self._own.suspend()
        self._move(Movement.SUSPEND)

    def resume(self) -> None:
        self._own.resume()
        self._move(Movement.RESUME)

    def drop_tensors(self) -> None:
        self._own.drop_tensors()
        self._move(Movement.DROP)

    def allocate_tensors(self) -> None:
        self._own.allocate_tensors()
        self._move(Movement.ALLOCATE)

    def _move(self, movement: Movement) -> None:
        """Do the same on the other ranks. If they have failed, their tensors are gone anyway."""
        self._site.run()
        if self._site.failure or self._built_in != self._site.incarnation:
            return
        try:
            self._site.command(MoveTensors(self.stage, movement))
        except SiteFailedError:
            return  # the next pass raises it
