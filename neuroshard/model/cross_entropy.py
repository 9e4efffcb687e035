"""Head and cross-entropy in row chunks: the whole matrix of logits, the largest item of a step, never exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

IGNORED_LABEL = -100
CHUNK_BYTES = 16 << 20  # of fp32 logits: small enough to stay near the cache, large enough for full matmul speed


def chunk_rows(vocabulary_size: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Rows of logits computed at once: as many fp32 rows as fit chunk_bytes, but at least 16."""
    return max(16, chunk_bytes // (4 * vocabulary_size))


def cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_bytes: int = CHUNK_BYTES) -> Tensor:
    """Sum of -log softmax(hidden W^T)[label] over rows whose label is not -100.

    hidden (n, d), weight (vocabulary, d), labels (n,) int64 -> scalar fp32. The gradients are computed chunk by
    chunk in the forward pass, while the logits are at hand; the result can be back-propagated once.
    """
    rows = chunk_rows(weight.shape[0], chunk_bytes)
    apply = cast("Callable[..., Tensor]", _ChunkedCrossEntropy.apply)  # pyright: ignore[reportUnknownMemberType]
    return apply(hidden, weight, labels, rows)


def _loss_and_logit_gradient(logits: Tensor, labels: Tensor, wants_gradient: bool) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk, and softmax(logits) - onehot(labels) with ignored rows zero, (rows, vocabulary) fp32."""
    kept = labels != IGNORED_LABEL
    target = labels.where(kept, 0)[:, None]
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    loss = -(log_probabilities.gather(1, target)[:, 0] * kept).sum()
    if not wants_gradient:
        return loss, log_probabilities
    gradient = log_probabilities.exp_()
    gradient.scatter_add_(1, target, torch.full_like(target, -1, dtype=torch.float32))
    if not bool(kept.all()):
        gradient.mul_(kept[:, None])
    return loss, gradient


class _ChunkedCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, rows: int) -> Tensor:
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        wants_hidden, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        with torch.autocast(device, enabled=False):
            low_weight = weight.to(dtype)
            loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
            hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
            weight_gradient = torch.zeros_like(weight) if wants_weight else None
            for start in range(0, hidden.shape[0], rows):
                part = hidden[start : start + rows].to(dtype)
                part_loss, gradient = _loss_and_logit_gradient(
                    part @ low_weight.t(), labels[start : start + rows], wants_hidden or wants_weight
                )
                loss += part_loss
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
