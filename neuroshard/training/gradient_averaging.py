"""Gradient averaging: replicas average what they would step on, and all make the same AdamW step (DESIGN 4.7). Pure.

The gradient goes through PowerSGD, whose two phases are two outer steps: the first ends with a basis that all hold, the
second with the gradient. What a member contributes counts in the second one alone, plain numbers included: whatever
becomes of the first, nothing of a member's work is in it. Where no matrix is worth compressing there is no first phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite, sqrt

import torch
from torch import Tensor

from neuroshard.aggregation.sums import dot_product
from neuroshard.compression import next_residual, with_residual
from neuroshard.compression.power_sgd import (
    FactorPlan,
    first_right,
    left_factors,
    next_right,
    orthonormal_basis,
    projection,
    restored,
)
from neuroshard.config.run_parameters import InnerOptimization
from neuroshard.model.tensor_schema import TensorSchema
from neuroshard.optim.outer import OuterState
from neuroshard.optim.replicated_adamw import AdamWState, replicated_adamw_step
from neuroshard.optim.schedule import learning_rate_at

FIRST_MOMENT, SECOND_MOMENT, RIGHT, BASIS = "first moment", "second moment", "right", "basis"


@dataclass(frozen=True)
class GradientAveraging:
    """Of one stage. Its outer state has the moments, PowerSGD's Q and the basis in place of a velocity.

    All of it is replicated, in one vector: first moment (d,), second moment (d,), Q and, where there is a first phase,
    its basis. A member's own is the gradient that it has gathered, and what compression lost of it.
    """

    plan: FactorPlan
    inner: InnerOptimization
    max_norm: float  # that the averaged gradient is clipped to
    decayed: tuple[tuple[int, int], ...]  # parts of the vector with weight decay: matrices

    @classmethod
    def of(cls, schema: TensorSchema, rank: int, inner: InnerOptimization, max_norm: float) -> GradientAveraging:
        """For a stage with these tensors."""
        ends = accumulate(schema.sizes)
        stretches = zip(schema.shapes, schema.sizes, ends, strict=True)
        decayed = tuple((end - size, end) for shape, size, end in stretches if len(shape) > 1)
        return cls(FactorPlan.of(schema.shapes, rank), inner, max_norm, decayed)

    @property
    def phases(self) -> int:
        """Outer steps to a step of the weights."""
        return 2 if self.plan.matrices else 1

    def makes_basis(self, outer_step: int) -> bool:
        """Whether this outer step is a first phase, which ends with a basis and leaves the weights."""
        return self.phases == 2 and outer_step % 2 == 0

    def length(self, outer_step: int) -> int:
        """Numbers of a contribution and of the aggregate."""
        return self.plan.left_length if self.makes_basis(outer_step) else self.plan.projection_length

    def terms(self, outer_step: int) -> str:
        """What is exchanged, as a part of the step's name."""
        return f"gradients {'basis' if self.makes_basis(outer_step) else 'projection'} of rank {self.plan.rank}"

    def first_state(self, anchor: Tensor, moments: tuple[Tensor, Tensor] | None = None, steps: int = 0) -> OuterState:
        """The state before the first averaged step: weights (d,), AdamW's moments (d,) if any, and its steps so far."""
        parts = {name: torch.zeros(size) for name, size in self._sizes.items()}
        if moments is not None:
            parts[FIRST_MOMENT], parts[SECOND_MOMENT] = moments
        parts[RIGHT] = first_right(self.plan, 0)
        return OuterState(anchor, _joined(parts), steps * self.phases)

    def contribution(self, state: OuterState, gradient: Tensor, residual: Tensor | None) -> Tensor:
        """What to send, from the mean gradient (d,) of a token and what was lost (d,).

        Raises ValueError when numbers are not finite.
        """
        offered, parts = with_residual(gradient, residual), self.parts(state)
        if self.makes_basis(state.outer_step):
            return left_factors(self.plan, offered, parts[RIGHT])
        return projection(self.plan, offered, parts[BASIS])

    def next_residual(
        self, state: OuterState, gradient: Tensor, residual: Tensor | None, sent: Tensor | None
    ) -> Tensor | None:
        """What is lost (d,) of a gradient (d,) once the second phase from `state` has agreed on it with others.

        `sent` is the own projection as the others decoded it; None when the contribution was refused.
        """
        if sent is None:
            return None
        offered = with_residual(gradient, residual)
        return next_residual(offered, self.gradient(state, sent))

    def next_state(self, state: OuterState, aggregate: Tensor) -> OuterState:
        """The state that an aggregate leads to: the same bytes on every replica."""
        parts = self.parts(state)
        if self.makes_basis(state.outer_step):
            found = {**parts, BASIS: orthonormal_basis(self.plan, aggregate)}
            return OuterState(state.anchor, _joined(found), state.outer_step + 1)
        gradient = self.gradient(state, aggregate)
        steps = state.outer_step // self.phases
        before = AdamWState(state.anchor, parts[FIRST_MOMENT], parts[SECOND_MOMENT], steps)
        after = replicated_adamw_step(
            before, gradient, self.inner, self.learning_rate(steps), decayed=self.decayed, scale=self._scale(gradient)
        )
        right = next_right(self.plan, aggregate, 0, steps + 1)
        found = {**parts, FIRST_MOMENT: after.first_moment, SECOND_MOMENT: after.second_moment, RIGHT: right}
        return OuterState(after.weights, _joined(found), state.outer_step + 1)

    def gradient(self, state: OuterState, projected: Tensor) -> Tensor:
        """The gradient (d,) that a projection stands for in the second phase from `state`."""
        return restored(self.plan, projected, self.parts(state)[BASIS])

    def learning_rate(self, steps: int) -> float:
        """Of the step after so many, in 7 digits: one machine's cosine may differ from another's in its last bit."""
        return float(f"{learning_rate_at(steps, self.inner):.6e}")

    def parts(self, state: OuterState) -> Mapping[str, Tensor]:
        """What a state keeps beside the weights, sharing its memory. Raises ValueError for another strategy's state."""
        sizes = self._sizes
        if state.velocity.shape != (sum(sizes.values()),):
            raise ValueError(f"gradient averaging keeps {sum(sizes.values())} numbers beside the weights")
        bounds = zip(sizes.items(), accumulate(sizes.values()), strict=True)
        return {name: state.velocity[end - size : end] for (name, size), end in bounds}

    @property
    def _sizes(self) -> Mapping[str, int]:
        plan = self.plan
        moments = {FIRST_MOMENT: plan.length, SECOND_MOMENT: plan.length}
        return {**moments, RIGHT: plan.right_length, BASIS: plan.left_length}

    def _scale(self, gradient: Tensor) -> float:
        norm = sqrt(dot_product(gradient, gradient))
        return min(1.0, self.max_norm / norm) if isfinite(norm) and norm > 0 else 1.0


def _joined(parts: Mapping[str, Tensor]) -> Tensor:
    ordered: Sequence[Tensor] = [parts[name] for name in (FIRST_MOMENT, SECOND_MOMENT, RIGHT, BASIS)]
    return torch.cat(list(ordered))
