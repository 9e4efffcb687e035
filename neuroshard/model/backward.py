"""Backward passes that begin with a gradient from another stage.

`torch.autograd.backward(output, gradient)` compares the two shapes by PyTorch's symbolic mathematics. Loading that
takes three seconds of one core and 100 MB at a stage's first microbatch, while the whole swarm waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor


def backward_from_gradient(output: Tensor, gradient: Tensor) -> None:
    """Add to all leaves what `torch.autograd.backward(output, gradient)` adds. Raises ValueError for another shape."""
    if output.shape != gradient.shape:
        raise ValueError(f"a gradient of shape {tuple(gradient.shape)} for an output of {tuple(output.shape)}")
    begin = cast("Callable[[Tensor, Tensor], Tensor]", _GivenGradient.apply)  # pyright: ignore[reportUnknownMemberType]
    torch.autograd.backward(begin(output, gradient))


class _GivenGradient(torch.autograd.Function):
    """A scalar without meaning, whose gradient with respect to `output` is given."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None
