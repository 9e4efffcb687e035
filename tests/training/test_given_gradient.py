"""A backward pass that begins with a gradient from elsewhere gives what PyTorch's own gives, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from neuroshard.model.backward import backward_from_gradient


def leaves_and_output(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs, weights = (torch.randn(5, 5, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    return [inputs, weights], torch.nn.functional.silu(inputs @ weights) + inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradients_are_those_of_pytorch_and_add_up(dtype: torch.dtype) -> None:
    gradient = torch.randn(5, 5, generator=torch.Generator().manual_seed(4)).to(dtype)
    (ours, output), (theirs, expected) = leaves_and_output(dtype), leaves_and_output(dtype)
    torch.autograd.backward(expected, gradient)
    backward_from_gradient(output, gradient)
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(ours, theirs, strict=True))
    backward_from_gradient(torch.nn.functional.silu(ours[0] @ ours[1]) + ours[0], gradient)
    assert all(torch.equal(one.grad, 2 * other.grad) for one, other in zip(ours, theirs, strict=True))


def test_a_gradient_of_another_shape_is_refused() -> None:
    _, output = leaves_and_output(torch.float32)
    with pytest.raises(ValueError, match="a gradient of shape"):
        backward_from_gradient(output, torch.zeros(5, 4))
