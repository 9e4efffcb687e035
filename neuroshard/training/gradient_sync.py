"""Gradient averaging in a node: gradients accumulate until the group has enough, then all make the same step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from weakref import ref

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from neuroshard.compression import with_residual
from neuroshard.config.run_parameters import RunParameters
from neuroshard.consensus.gradient_averaging import AveragingStep, GradientAveraging
from neuroshard.consensus.sync_strategies import Abandoned, Agreed, RunRound
from neuroshard.model.weights import TensorSchema
from neuroshard.optim.outer import CertifiedWork, LineProgress, OuterState
from neuroshard.optim.schedule import stage_clip_norm
from neuroshard.pipeline.arithmetic import Executor
from neuroshard.pipeline.executor import ComputeThread, StepResult
from neuroshard.state.outer_state import OuterProgress
from neuroshard.status.snapshot import DilocoStatus
from neuroshard.training.outer_sync import OuterSync
from neuroshard.training.stage_checkpoint import Stage


@dataclass(frozen=True)
class Gathered:
    """Accumulated gradients that wait for a step of the group."""

    total: Tensor  # (d,), gradients of summed losses
    tokens: int

    @property
    def mean(self) -> Tensor:
        """Mean gradient (d,) per token."""
        return self.total / self.tokens

    def plus(self, other: Gathered | None) -> Gathered:
        """Add other accumulated gradients."""
        return self if other is None else Gathered(self.total + other.total, self.tokens + other.tokens)

    def without(self, earlier: Gathered | None) -> Gathered | None:
        """Remove the gradients that were accumulated earlier; None if nothing remains."""
        if earlier is None:
            return self
        tokens = self.tokens - earlier.tokens
        return Gathered(self.total - earlier.total, tokens) if tokens > 0 else None


@dataclass(frozen=True)
class _Offer:
    """Sources of one contribution."""

    contribution: ref[Tensor]
    gathered: Gathered | None
    gradient: Tensor  # (d,)
    residual: Tensor | None  # (d,), residual that the contribution included


class GradientSync(OuterSync):
    """Outer state of a stage whose replicas average their gradients: no inner step moves the weights.

    Accumulated gradients are not part of a checkpoint. A restarted node starts without any.
    """

    def __init__(
        self,
        *,
        compute: ComputeThread,
        executor: Executor,
        versions: Callable[[int], RunParameters],
        state: OuterState,
        averaging: Callable[[int], GradientAveraging],
        residual: Tensor | None = None,
        progress: OuterProgress | None = None,
    ) -> None:
        """`averaging` returns the gradient averaging of an outer step. The other parameters are those of OuterSync."""
        progress = replace(progress or OuterProgress(), inner_steps=0, sequences=0)
        super().__init__(
            compute=compute,
            executor=executor,
            versions=versions,
            state=state,
            residual=residual,
            progress=progress,
        )
        self._averaging = averaging
        self.gathered: Gathered | None = None
        self._offered = list[_Offer]()  # any of these offers may be used by a round that ends late

    @property
    def strategy(self) -> AveragingStep:
        step = self.state.outer_step
        return AveragingStep(self._averaging(step), step)

    @property
    def steps_with_the_group(self) -> bool:
        return True

    async def inner_step(self, executor: Executor, learning_rate: float, max_norm: float, tokens: int) -> StepResult:
        """Accumulate the gradients for the group's step, which has its own learning rate and clipping norm."""
        gathered = self.gathered

        def gather() -> tuple[StepResult, Gathered | None]:
            result, gradient = executor.take_gradient(tokens)
            return result, gathered if gradient is None else Gathered(gradient, tokens).plus(gathered)

        result, self.gathered = await self._compute.run(gather)
        return result

    def learning_rate(self) -> float:
        """Learning rate of the group's next step."""
        averaging = self.strategy.averaging
        return averaging.learning_rate(self.state.outer_step // averaging.phases)

    async def run_round(self, exchange: RunRound, now: float) -> bool:
        """Run one phase of the averaging as a round of OuterSync."""
        before, step = self.state, self.strategy
        offer, contribution = await anyio.to_thread.run_sync(self._offer, before, step.averaging)
        # rounds hold the contributions that may still end late; a released contribution can never count
        self._offered = [*(one for one in self._offered if one.contribution() is not None), offer]
        agreed = await exchange(contribution, before.outer_step)
        if isinstance(agreed, Abandoned):
            self.note_abandoned(agreed)
        if not isinstance(agreed, Agreed):  # or it is under way
            return False
        with anyio.CancelScope(shield=True):  # the other members have committed, so this node must too
            await self._take(agreed, before, step.averaging, offer, now)
        return True

    def drop_tensors(self) -> None:
        """Drop the accumulated gradients as well: no checkpoint contains them."""
        super().drop_tensors()
        self.gathered = None
        self._offered.clear()

    def restore(self, state: OuterState, residual: Tensor | None, progress: OuterProgress) -> None:
        """Replace the state by that of a checkpoint and drop gradients of other weights."""
        super().restore(state, residual, replace(progress, inner_steps=0, sequences=0))
        self.gathered = None
        self._offered.clear()

    def exact_root(self) -> str:
        """Root of the present weights, which change only with the group; "" when alone."""
        return self.progress.state_root if self.progress.members > 1 else ""

    def status(self) -> DilocoStatus:
        """Status of the outer steps. Here, an inner step is one accumulation of gradients."""
        status, members = super().status(), max(1, self.progress.members)
        gathered_at_a_time = self.parameters.sequences_per_step * members
        total = max(1, ceil(self.parameters.outer.averaged_sequences / gathered_at_a_time))
        alone = "Alone: a step follows on this node's own gradients."
        return replace(status, inner_steps_total=total, explanation=alone if members == 1 else status.explanation)

    def _line_after(self, work: CertifiedWork) -> LineProgress:
        """The line's progress after a round: a phase that only makes the basis counts no work."""
        step = self.strategy
        makes_basis = step.averaging.phase(step.outer_step).makes_basis
        return self.state.line if makes_basis else super()._line_after(work)

    def _offer(self, before: OuterState, averaging: GradientAveraging) -> tuple[_Offer, Tensor]:
        """Build the contribution. A node without gradients contributes zeros; it has no work that could be judged."""
        gathered, residual = self.gathered, self.residual
        gradient = torch.zeros_like(before.anchor) if gathered is None else gathered.mean
        contribution = averaging.contribution(before, gradient, residual)
        return _Offer(ref(contribution), gathered, gradient, residual), contribution

    async def _take(
        self, agreed: Agreed, before: OuterState, averaging: GradientAveraging, offer: _Offer, now: float
    ) -> None:
        if agreed.late_for is not None:
            found = [one for one in self._offered if one.contribution() is agreed.late_for]
            if not found:  # from before a restore: its gradients are no longer here
                agreed = replace(agreed, is_without_own=True)
            offer = found[-1] if found else offer
        if agreed.members == 1:
            after = await anyio.to_thread.run_sync(_after_alone, averaging, before, offer)
            residual = None
        elif averaging.phase(before.outer_step).makes_basis:
            after = await anyio.to_thread.run_sync(averaging.next_state, before, agreed.aggregate)
            self._commit_basis(after, agreed, now)
            return
        else:
            after = await anyio.to_thread.run_sync(averaging.next_state, before, agreed.aggregate)
            residual = self.residual
            if not agreed.is_without_own:
                residual = await anyio.to_thread.run_sync(
                    averaging.next_residual, before, offer.gradient, offer.residual, agreed.sent
                )
        gathered = self.gathered
        if not agreed.is_without_own and gathered is not None:
            gathered = await anyio.to_thread.run_sync(gathered.without, offer.gathered)
        await self._commit(after.anchor, after, residual, agreed, now)
        self.gathered = gathered
        self._offered.clear()

    def _commit_basis(self, after: OuterState, agreed: Agreed, now: float) -> None:
        """Commit a phase that only makes the basis: weights and gradients stay, and count in the second phase."""
        self.replace_state(after)
        self._offered.clear()
        self.progress = replace(
            self.progress,
            successful=self.progress.successful + 1,
            members=agreed.members,
            last_sync=now,
            state_root="",  # the root belonged to the previous state
        )


def _after_alone(averaging: GradientAveraging, before: OuterState, offer: _Offer) -> OuterState:
    return averaging.lone_state(before, with_residual(offer.gradient, offer.residual))


def make_outer_sync(
    compute: ComputeThread, stage: Stage, versions: Callable[[int], RunParameters], index: int
) -> OuterSync:
    """Create the outer synchronisation of stage `index`; `versions` returns the parameters at an outer step."""
    executor, state = stage.executor, stage.outer_state
    schema = TensorSchema.of(executor.model)

    def averaging_at(outer_step: int) -> GradientAveraging:
        parameters = versions(outer_step)
        max_norm = stage_clip_norm(index, parameters.stage_count, parameters.inner.max_grad_norm)
        return GradientAveraging.of(schema, parameters.outer, parameters.inner, max_norm)

    if versions(state.outer_step).outer.strategy == "averaging":
        return GradientSync(
            compute=compute,
            executor=executor,
            versions=versions,
            state=state,
            averaging=averaging_at,
            residual=stage.residual,
            progress=stage.outer_progress,
        )
    branch = versions(state.outer_step).branch
    return OuterSync(
        compute=compute,
        executor=executor,
        versions=versions,
        state=state,
        residual=stage.residual,
        progress=stage.outer_progress,
        branched_at=None if branch is None or not branch.sequences else branch.sequences[index],
    )
