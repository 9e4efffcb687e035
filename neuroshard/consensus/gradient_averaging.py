"""Gradient averaging: replicas average the vector of the AdamW step and make the same step. Pure.

The gradient goes through PowerSGD, whose two phases are two outer steps: the first ends with a basis that all
replicas have, the second with the gradient. A member's contribution counts only in the second step, including its
plain numbers: if the first step fails, no work of the member is lost with it. If no matrix is worth compressing,
there is no first phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import isfinite, sqrt

import torch
from torch import Tensor

from neuroshard.aggregation.slices import dot_product
from neuroshard.compression import next_residual, with_residual
from neuroshard.compression.power_sgd import (
    FactorPlan,
    first_right,
    left_factors,
    next_right,
    orthonormal_basis,
    projection,
    restored_vector,
)
from neuroshard.config.run_parameters import InnerOptimization, OuterOptimization
from neuroshard.model.weights import TensorSchema
from neuroshard.optim.adamw import AdamWState, replicated_adamw_step
from neuroshard.optim.outer import PLAIN_MEAN, Nesterov, OuterState
from neuroshard.optim.schedule import learning_rate_at

FIRST_MOMENT, SECOND_MOMENT, RIGHT, BASIS = "first moment", "second moment", "right", "basis"


@dataclass(frozen=True)
class AveragingPhase:
    """The vector that one outer step exchanges."""

    plan: FactorPlan
    makes_basis: bool  # whether this is the first of two phases

    @classmethod
    def at(cls, plan: FactorPlan, outer_step: int) -> AveragingPhase:
        """The phase of an outer step."""
        return cls(plan, makes_basis=bool(plan.matrices) and outer_step % 2 == 0)

    @property
    def is_second(self) -> bool:
        """Whether a first phase preceded this one for the same step of the weights."""
        return bool(self.plan.matrices) and not self.makes_basis

    @property
    def length(self) -> int:
        """Length of a contribution and of the aggregate."""
        return self.plan.left_length if self.makes_basis else self.plan.projection_length

    @property
    def words(self) -> str:
        """A description of the phase for people."""
        if not self.plan.matrices:
            return "gradient"
        return f"gradient, phase {1 if self.makes_basis else 2} of 2"

    @property
    def terms(self) -> str:
        """The phase as a part of the step's name."""
        if not self.plan.matrices:
            return "gradient"
        return f"gradient's {'basis' if self.makes_basis else 'projection'} of rank {self.plan.rank}"


def factor_plan(outer: OuterOptimization, schema: TensorSchema) -> FactorPlan:
    """The matrices of a stage's gradient that are factorised; none without a rank."""
    if outer.rank:
        return FactorPlan.of(schema.shapes, outer.rank)
    return FactorPlan(schema.total_size, 0, ())


@dataclass(frozen=True)
class GradientAveraging:
    """Gradient averaging of one stage. Its outer state has the moments, PowerSGD's Q and the basis instead of a
    velocity.

    All of it is replicated, in one vector: first moment (d,), second moment (d,), Q and, where there is a first
    phase, its basis. A member's own state is its accumulated gradient and the compression error.
    """

    plan: FactorPlan
    inner: InnerOptimization
    max_norm: float  # clipping norm of the averaged gradient
    decayed: tuple[tuple[int, int], ...]  # ranges of the vector with weight decay: the matrices

    @classmethod
    def of(
        cls, schema: TensorSchema, outer: OuterOptimization, inner: InnerOptimization, max_norm: float
    ) -> GradientAveraging:
        """Gradient averaging for a stage with these tensors."""
        ends = accumulate(schema.sizes)
        stretches = zip(schema.shapes, schema.sizes, ends, strict=True)
        decayed = tuple((end - size, end) for shape, size, end in stretches if len(shape) > 1)
        return cls(factor_plan(outer, schema), inner, max_norm, decayed)

    @property
    def phases(self) -> int:
        """Number of outer steps for one step of the weights."""
        return 2 if self.plan.matrices else 1

    def phase(self, outer_step: int) -> AveragingPhase:
        """The phase of an outer step."""
        return AveragingPhase.at(self.plan, outer_step)

    def contribution(self, state: OuterState, gradient: Tensor, residual: Tensor | None) -> Tensor:
        """The contribution, from the mean gradient per token (d,) and the compression error so far (d,).

        Raises ValueError if a number is not finite.
        """
        offered, parts = with_residual(gradient, residual), self.parts(state)
        if self.phase(state.outer_step).makes_basis:
            return left_factors(self.plan, offered, parts[RIGHT])
        return projection(self.plan, offered, parts[BASIS])

    def next_residual(
        self, state: OuterState, gradient: Tensor, residual: Tensor | None, sent: Tensor | None
    ) -> Tensor | None:
        """The compression error (d,) of a gradient (d,) after the second phase from `state`.

        `sent` is this node's projection as the other members decoded it; None if the contribution was refused.
        """
        if sent is None:
            return None
        lost = next_residual(with_residual(gradient, residual), self.gradient(state, sent))
        return lost if lost is not None and bool(lost.any()) else None

    def next_state(self, state: OuterState, aggregate: Tensor) -> OuterState:
        """The state that an aggregate leads to: the same bytes on every replica."""
        parts = self.parts(state)
        if self.phase(state.outer_step).makes_basis:
            found = {**parts, BASIS: orthonormal_basis(self.plan, aggregate)}
            return replace(state, velocity=_joined(found), outer_step=state.outer_step + 1)
        right = next_right(self.plan, aggregate, 0, state.outer_step // self.phases + 1)
        return self._stepped(state, self.gradient(state, aggregate), right)

    def lone_state(self, state: OuterState, gradient: Tensor) -> OuterState:
        """The state after the step of a node without peers: its gradient (d,) needs no factors and no second phase."""
        after = self._stepped(state, gradient, self.parts(state)[RIGHT])
        makes_basis = self.phase(state.outer_step).makes_basis
        return replace(after, outer_step=after.outer_step + 1) if makes_basis else after

    def gradient(self, state: OuterState, projected: Tensor) -> Tensor:
        """The gradient (d,) that a projection represents in the second phase from `state`."""
        return restored_vector(self.plan, projected, self.parts(state)[BASIS])

    def learning_rate(self, steps: int) -> float:
        """Learning rate after this number of steps, in 7 digits: the cosines of two machines may differ in the last
        bit.
        """
        return float(f"{learning_rate_at(steps, self.inner):.6e}")

    def parts(self, state: OuterState) -> Mapping[str, Tensor]:
        """Views of the parts of a state without the weights. Raises ValueError for the state of another strategy."""
        sizes = _sizes(self.plan)
        if state.velocity.shape != (averaging_kept_length(self.plan),):
            raise ValueError(f"gradient averaging keeps {averaging_kept_length(self.plan)} numbers and the weights")
        bounds = zip(sizes.items(), accumulate(sizes.values()), strict=True)
        return {name: state.velocity[end - size : end] for (name, size), end in bounds}

    def _stepped(self, state: OuterState, gradient: Tensor, right: Tensor) -> OuterState:
        parts, steps = self.parts(state), state.outer_step // self.phases
        before = AdamWState(state.anchor, parts[FIRST_MOMENT], parts[SECOND_MOMENT], steps)
        rate, scale = self.learning_rate(steps), self._scale(gradient)
        after = replicated_adamw_step(before, gradient, self.inner, rate, decayed=self.decayed, scale=scale)
        found = {**parts, FIRST_MOMENT: after.first_moment, SECOND_MOMENT: after.second_moment, RIGHT: right}
        return replace(state, anchor=after.weights, velocity=_joined(found), outer_step=state.outer_step + 1)

    def _scale(self, gradient: Tensor) -> float:
        norm = sqrt(dot_product(gradient, gradient))
        return min(1.0, self.max_norm / norm) if isfinite(norm) and norm > 0 else 1.0


@dataclass(frozen=True)
class AveragingStep:
    """One outer step of gradient averaging."""

    averaging: GradientAveraging
    outer_step: int

    @property
    def length(self) -> int:
        return self.averaging.phase(self.outer_step).length

    @property
    def terms(self) -> str:
        return self.averaging.phase(self.outer_step).terms

    @property
    def candidates(self) -> Sequence[Nesterov]:
        return (PLAIN_MEAN,)

    def next_state(self, state: OuterState, aggregate: Tensor, choice: int) -> OuterState:
        """The state after the step, which has no other candidate."""
        return self.averaging.next_state(state, aggregate)

    @property
    def makes_weights_equal(self) -> bool:
        return True

    def next_weights(self, local: Tensor, before: OuterState, after: OuterState, included: Tensor | None) -> Tensor:
        """The anchor, because nothing is trained apart from it."""
        return after.anchor

    def mean(self, state: OuterState, aggregate: Tensor) -> Tensor:
        """The weights after the step itself: a gradient has no other meaning as weights."""
        return self.averaging.next_state(state, aggregate).anchor


def first_state(
    plan: FactorPlan, anchor: Tensor, moments: tuple[Tensor, Tensor] | None = None, steps: int = 0
) -> OuterState:
    """The state before the first averaged step: weights (d,), AdamW's moments (d,) if any, steps so far."""
    parts = {name: torch.zeros(size) for name, size in _sizes(plan).items()}
    if moments is not None:
        parts[FIRST_MOMENT], parts[SECOND_MOMENT] = moments
    parts[RIGHT] = first_right(plan, 0)
    return OuterState(anchor, _joined(parts), steps * (2 if plan.matrices else 1))


def averaging_kept_length(plan: FactorPlan) -> int:
    """Number of values that a state keeps in addition to the weights."""
    return sum(_sizes(plan).values())


def _sizes(plan: FactorPlan) -> Mapping[str, int]:
    moments = {FIRST_MOMENT: plan.length, SECOND_MOMENT: plan.length}
    return {**moments, RIGHT: plan.right_length, BASIS: plan.left_length}


def _joined(parts: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([parts[name] for name in (FIRST_MOMENT, SECOND_MOMENT, RIGHT, BASIS)])
