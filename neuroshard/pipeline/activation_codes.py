"""Codes of activations and their gradients on the wire: int8 and int4. Pure.

A token is a row of values, and a row never depends on another one. Each block of 64 values of a row has its own scale;
the last block has the remaining values. For int4 each block is rotated by a Hadamard matrix first: one large value then
spreads over its block instead of setting the step of the other 63. Every operation is one IEEE operation in a fixed
order, so the bytes of a row are the same on every machine and with every number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from neuroshard.pipeline.microbatch import RefusedTensorError

BLOCK = 64  # values that share a scale
LARGEST_INT4 = 7
_CHUNK = 1024  # blocks that are coded at a time, so that they stay in the processor's cache
_TINY = torch.finfo(torch.float32).tiny  # also of bf16


def quantised(activations: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise (b, t, n) fp32 to int8 values (b, t, n) and fp32 scales (b, t, ceil(n / block)).

    value = round(x / scale) with scale = largest |x| of the block / 127, so the error is at most scale / 2.
    """
    size = activations.shape[2]
    padded = functional.pad(activations, (0, -size % BLOCK))
    blocks = padded.view(*padded.shape[:2], -1, BLOCK)  # (b, t, blocks, block)
    scales = blocks.abs().amax(dim=3) / 127
    values = torch.round(blocks / scales.clamp_min(_TINY)[..., None])
    return values.flatten(2)[..., :size].to(torch.int8), scales


def restored_activations(values: Tensor, scales: Tensor) -> Tensor:
    """Restore activations (b, t, n) fp32 from the output of `quantised`, with an error of at most scale / 2."""
    return values.to(torch.float32) * scales.repeat_interleave(BLOCK, dim=2)[..., : values.shape[2]]


def quantised_to_int4(activations: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise (b, t, n) fp32 to codes, two per byte (b, t, ceil(n / 2)), and bf16 scales (b, t, ceil(n / block)).

    code = round(y / scale) of the rotated block y, with scale = largest |y| / 7 rounded up to bf16. The earlier code of
    a byte is in its low half; a last half without a value is 0. The norm of a block's error is at most
    sqrt(values) scale / 2.
    """
    sequences, tokens, size = activations.shape
    rows = activations.detach().to("cpu", torch.float32).reshape(-1, size)
    halves = torch.zeros(len(rows), ceil(size / 2), dtype=torch.uint8)
    scales = torch.empty(len(rows), ceil(size / BLOCK), dtype=torch.bfloat16)
    for blocks, codes, block_scales in _pieces(rows, halves, scales):
        columns = blocks.flatten(0, 1).t().clone(memory_format=torch.contiguous_format)
        rotated = _rotated(columns)  # (length, m): all steps work on whole rows
        of_blocks = _scales_of(rotated)
        block_scales.copy_(of_blocks.view_as(block_scales))
        rotated.div_(of_blocks.float().masked_fill_(of_blocks == 0, 1)).round_()
        # the scale of values that are not finite says so
        packed = rotated.clamp_(-LARGEST_INT4, LARGEST_INT4).to(torch.int8).view(torch.uint8).bitwise_and_(0x0F)
        pairs = packed[0::2]
        pairs[: len(packed) // 2] |= packed[1::2] << 4
        codes.copy_(pairs.t().reshape(codes.shape))
    return halves.view(sequences, tokens, -1), scales.view(sequences, tokens, -1)


def restored_from_int4(halves: Tensor, scales: Tensor, size: int) -> Tensor:
    """Restore activations (b, t, size) fp32 from the output of `quantised_to_int4`.

    Raises RefusedTensorError for a code -8, a code after the last value, and a scale that is negative, subnormal or not
    a finite number.
    """
    if bool(((halves & 0x0F) == 0x08).any()) or bool(((halves & 0xF0) == 0x80).any()):
        raise RefusedTensorError("An int4 tensor contains the code -8, which is not used.")
    if size % 2 and bool((halves[..., -1] & 0xF0).any()):
        raise RefusedTensorError("An int4 tensor has a code after the last value of a row.")
    is_zero = scales.view(torch.int16) == 0  # not -0
    if not bool((is_zero | ((scales >= _TINY) & (scales < torch.inf))).all()):
        raise RefusedTensorError("An int4 tensor has a scale that is negative, subnormal or not a finite number.")
    rows = torch.empty(scales.shape[0] * scales.shape[1], size)
    of_rows = halves.reshape(len(rows), -1), scales.reshape(len(rows), -1)
    for blocks, codes, block_scales in _pieces(rows, *of_rows):
        columns = codes.flatten(0, 1).t().contiguous().view(torch.int8)
        values = torch.empty(blocks.shape[2], columns.shape[1])
        values[0::2] = (columns << 4) >> 4  # arithmetic shifts extend the sign
        values[1::2] = (columns >> 4)[: len(values) // 2]
        values = _rotated(values.mul_(block_scales.flatten().float()))
        blocks.copy_(values.t().reshape(blocks.shape))
    return rows.view(*scales.shape[:2], size)


def _pieces(rows: Tensor, halves: Tensor, scales: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views of blocks of equal length: values (r, k, length), bytes of their codes and scales (r, k)."""
    whole = rows.shape[1] // BLOCK
    most = max(1, _CHUNK // max(1, whole))
    for start in range(0, len(rows), most):
        part = slice(start, start + most)
        if whole:
            yield (
                rows[part, : BLOCK * whole].unflatten(1, (whole, BLOCK)),
                halves[part, : BLOCK // 2 * whole].unflatten(1, (whole, BLOCK // 2)),
                scales[part, :whole],
            )
        if rows.shape[1] % BLOCK:
            yield rows[part, None, BLOCK * whole :], halves[part, None, BLOCK // 2 * whole :], scales[part, whole:]


def _rotated(columns: Tensor) -> Tensor:
    """Rotate blocks (length, m) by the orthonormal Hadamard matrix of the largest power of two that divides length.

    The rotation is its own inverse. It takes log2 steps of additions and subtractions (the fast Walsh-Hadamard
    transform), then one product. Changes `columns`.
    """
    length, count = columns.shape
    group, stride, other = length & -length, 1, torch.empty_like(columns)
    while stride < group:
        first, second = columns.view(-1, 2, stride, count).unbind(1)
        total, difference = other.view(-1, 2, stride, count).unbind(1)
        torch.add(first, second, out=total)
        torch.sub(first, second, out=difference)
        columns, other, stride = other, columns, 2 * stride
    return columns if group == 1 else columns.mul_(float(np.float32(group**-0.5)))


def _scales_of(rotated: Tensor) -> Tensor:
    """Scales (m,) of rotated blocks (length, m), in bf16: the largest magnitude / 7, rounded up; 0 if subnormal."""
    exact = rotated.abs().amax(dim=0).div_(LARGEST_INT4)
    bits = exact.view(torch.int32)
    upper = ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
    upper = torch.where(exact.isfinite(), upper, exact.to(torch.bfloat16))
    return torch.where(exact < _TINY, 0, upper)
