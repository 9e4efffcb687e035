"""Head and cross-entropy in row chunks: the whole matrix of logits, the largest item of a step, never exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from neuroshard.model.row_chunks import chunk_bytes_on, chunk_rows

IGNORED_LABEL = -100
SMALLEST_PROBABILITY = 2.0**-126  # of fp32 with all its digits: a token's loss is reported as 87.3 nats at most


def cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_bytes: int | None = None) -> Tensor:
    """Sum of -log softmax(hidden W^T)[label] over rows whose label is not -100.

    hidden (n, d), weight (vocabulary, d), labels (n,) int64 -> scalar fp32. The gradients are computed chunk by
    chunk in the forward pass, while the logits are at hand; the result can be back-propagated once. A token's loss
    counts as 87.3 nats at most (its gradient stays exact), so that the softmax is the only pass over the logits.
    """
    if chunk_bytes is None:
        chunk_bytes = chunk_bytes_on(hidden.device.type)
    rows = chunk_rows(weight.shape[0], chunk_bytes)
    apply = cast("Callable[..., Tensor]", _ChunkedCrossEntropy.apply)  # pyright: ignore[reportUnknownMemberType]
    return apply(hidden, weight, labels, rows)


def _loss_and_probabilities(logits: Tensor, target: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk, and softmax(logits) (rows, vocabulary) fp32, in the place of fp32 logits."""
    if logits.dtype == torch.float32:
        probabilities = torch.softmax(logits, dim=1, out=logits)
    else:
        probabilities = torch.softmax(logits, dim=1, dtype=torch.float32)
    losses = probabilities.gather(1, target).clamp_min(SMALLEST_PROBABILITY).log().neg()
    return losses.masked_fill_(~kept, 0.0).sum(), probabilities


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int) -> Tensor:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        # on an accelerator the question would wait for it, and one more pass costs little there
        some_ignored = device != "cpu" or bool((labels == IGNORED_LABEL).any())
        with torch.autocast(device, enabled=False):
            low_weight = weight.to(dtype)
            buffer = hidden.new_empty((min(rows, hidden.shape[0]), weight.shape[0]), dtype=dtype)
            loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
            for start in range(0, hidden.shape[0], rows):
                part = hidden[start : start + rows].to(dtype)
                logits = torch.mm(part, low_weight.t(), out=buffer[: part.shape[0]])
                kept = (labels[start : start + rows] != IGNORED_LABEL)[:, None]
                target = labels[start : start + rows, None].where(kept, 0)
                part_loss, gradient = _loss_and_probabilities(logits, target, kept)
                loss += part_loss
                if hidden_gradient is None and weight_gradient is None:
                    continue
                gradient.scatter_add_(1, target, gradient.new_full((1, 1), -1.0).expand_as(target))
                if some_ignored:
                    gradient.masked_fill_(~kept, 0.0)
                gradient = gradient.to(dtype)
                if hidden_gradient is not None:
                    hidden_gradient[start : start + rows] = gradient @ low_weight
                if weight_gradient is not None and weight_gradient.dtype == dtype:
                    weight_gradient.addmm_(gradient.t(), part)
                elif weight_gradient is not None:
                    weight_gradient += gradient.t() @ part
        ctx.gradients = (hidden_gradient, weight_gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_gradient, weight_gradient = ctx.gradients
        if hidden_gradient is None and weight_gradient is None:
            raise RuntimeError("the summed cross-entropy can be back-propagated only once")
        ctx.gradients = (None, None)  # scaled in place below, so they serve once
        scaled = [None if part is None else part.mul_(grad_outputs[0]) for part in (hidden_gradient, weight_gradient)]
        return scaled[0], scaled[1], None, None
