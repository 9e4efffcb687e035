"""The part of a microbatch's activations that a few directions describe, apart from the rest. Pure.

Activations of one microbatch are far from spherical: their mean and their strongest directions have most of the energy
after some training. Those travel in int8, so that the four bits of the rest have a smaller step. The rest contains the
rounding errors of the common part.

The encoder finds directions with matrix products, whose last bits differ between machines. A decoder adds one direction
after the other, each operation one IEEE operation, so all machines decode the same bytes to the same numbers.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from neuroshard.pipeline.microbatch import RefusedTensorError

DIRECTIONS = 8
LEAST_TOKENS, LEAST_SIZE = 64, 64  # with fewer, the directions cost more bytes than they are worth
_ITERATIONS = 3
_LARGEST = 127
_CHUNK_VALUES = 1 << 16  # restored at a time, so that they stay in the processor's cache
_TINY = torch.finfo(torch.float32).tiny


def has_directions(sequences: int, tokens: int, size: int) -> bool:
    """Whether activations of this shape have a common part."""
    return sequences * tokens >= LEAST_TOKENS and size >= LEAST_SIZE


def without_common_part(activations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split activations (b, t, n) fp32 into the rest (b, t, n), amounts (b, t, r) int8 and rows (1 + r, n) bf16.

    The first row is the mean of all tokens, the others are the directions, each times the step of its amounts.
    """
    sequences, tokens, size = activations.shape
    values = activations.detach().to("cpu", torch.float32).reshape(-1, size)
    mean = values.mean(dim=0)
    centred = values - mean
    directions = _strongest(centred)
    found = centred @ directions.t()
    steps = found.abs().amax(dim=0).div_(_LARGEST)
    rows = torch.cat([mean[None], directions * steps[:, None]]).to(torch.bfloat16)
    amounts = torch.round(found / steps.clamp_min(_TINY)).clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    amounts = amounts.view(sequences, tokens, DIRECTIONS)
    return values.view(activations.shape) - common_part(amounts, rows), amounts, rows


def common_part(amounts: Tensor, rows: Tensor) -> Tensor:
    """Restore the common part (b, t, n) fp32 from amounts (b, t, r) int8 and rows (1 + r, n) bf16.

    Raises RefusedTensorError for rows that are not finite numbers.
    """
    if not bool(torch.isfinite(rows).all()):
        raise RefusedTensorError("The common directions of a tensor are not finite numbers.")
    mean, *directions = rows.float()
    factors = amounts.reshape(-1, len(directions))
    restored = torch.empty(len(factors), rows.shape[1])
    at_once = max(1, _CHUNK_VALUES // rows.shape[1])
    for start in range(0, len(factors), at_once):
        part, some = restored[start : start + at_once], factors[start : start + at_once]
        part.copy_(mean.expand_as(part))
        product = torch.empty_like(part)
        for place, direction in enumerate(directions):
            torch.mul(some[:, place, None].float(), direction, out=product)
            part.add_(product)
    return restored.view(*amounts.shape[:2], rows.shape[1])


def _strongest(centred: Tensor) -> Tensor:
    """Orthonormal directions (r, n) near those in which rows (m, n) differ most; zeros if a number is not finite.

    Subspace iteration (Halko, Martinsson, Tropp 2011, section 4.5) from rows at equal distances, so that equal
    activations have equal directions.
    """
    largest = centred.abs().amax()
    if not bool(largest.isfinite()) or largest == 0:
        return torch.zeros(DIRECTIONS, centred.shape[1])
    scaled = centred / largest
    places = torch.linspace(0, len(scaled) - 1, DIRECTIONS).to(torch.int64)
    found = scaled[places].t()
    for _ in range(_ITERATIONS):
        found, _ = cast("tuple[Tensor, Tensor]", torch.linalg.qr(scaled.t() @ (scaled @ found)))  # pyright: ignore[reportUnknownMemberType]
    return found.t()
