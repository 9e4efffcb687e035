"""How large an activation gradient may be: three times the running median of its edge. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite, sqrt
from statistics import median

from torch import Tensor

from neuroshard.aggregation.sums import dot_product
from neuroshard.training.microbatch import RefusedTensorError

MEDIANS = 3.0  # what is longer is clipped to this many medians
WINDOW = 64  # gradients the median is taken of
FEWEST = 8  # nothing is clipped before so many were seen


@dataclass(frozen=True)
class GradientLimit:
    """Norms of the gradients that came over one edge, a square root of a token each, newest last.

    Gradients are of summed losses, so the norm of n tokens grows like sqrt(n). Clipped ones count with their clipped
    norm: whoever sends nothing but huge gradients moves the limit slowly.
    """

    norms: tuple[float, ...] = ()
    clipped: int = 0  # since the start

    @property
    def largest(self) -> float:
        """The largest norm a square root of a token that passes unclipped."""
        return MEDIANS * median(self.norms) if len(self.norms) >= FEWEST else float("inf")

    def limited(self, gradient: Tensor) -> tuple[Tensor, GradientLimit]:
        """The gradient (b, t, d), clipped when it is too long, and the limit after it.

        Raises RefusedTensorError when it holds values that are not finite.
        """
        values = gradient.flatten()
        norm = sqrt(dot_product(values, values) / gradient[..., 0].numel())  # in fp32 the squares could overflow
        if not isfinite(norm):
            raise RefusedTensorError("A gradient with values that are not numbers was refused.")
        largest = self.largest
        kept = replace(self, norms=(*self.norms, min(norm, largest))[-WINDOW:])
        if norm <= largest:
            return gradient, kept
        return gradient * (largest / norm), replace(kept, clipped=self.clipped + 1)
