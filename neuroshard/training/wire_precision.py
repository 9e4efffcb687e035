"""How activations and their gradients travel: fp32, bf16 or int8 in blocks. Pure; token ids travel as integers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from math import ceil
from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional

from neuroshard.training.microbatch import RefusedTensorError
from neuroshard.wire import TensorPart, TensorSpec
from neuroshard.wire.tensors import part_of, tensor_of

BLOCK = 64  # int8 values that share a scale
_SCALES = "/scales"


class WirePrecision(StrEnum):
    """What one value of an activation is on the wire."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"  # with an fp32 scale for each block: 1.06 bytes a value


def wire_specs(name: str, shape: tuple[int, int, int], precision: WirePrecision) -> tuple[TensorSpec, ...]:
    """The tensors as which activations (b, t, d) travel."""
    match precision:
        case WirePrecision.FP32:
            return (TensorSpec(name, "float32", shape),)
        case WirePrecision.BF16:
            return (TensorSpec(name, "bfloat16", shape),)
        case WirePrecision.INT8:
            scales = (*shape[:2], ceil(shape[2] / BLOCK))
            return (TensorSpec(name, "int8", shape), TensorSpec(name + _SCALES, "float32", scales))
        case _:
            assert_never(precision)


def wire_bytes(tokens: int, hidden_size: int, precision: WirePrecision = WirePrecision.FP32) -> int:
    """Bytes of the activations of so many tokens."""
    return sum(spec.byte_count for spec in wire_specs("", (1, tokens, hidden_size), precision))


def to_wire(name: str, activations: Tensor, precision: WirePrecision) -> tuple[TensorPart, ...]:
    """Activations (b, t, d) fp32 as parts of a frame."""
    match precision:
        case WirePrecision.FP32:
            return (part_of(name, activations),)
        case WirePrecision.BF16:
            return (part_of(name, activations.to(torch.bfloat16)),)
        case WirePrecision.INT8:
            values, scales = quantised(activations)
            return (part_of(name, values), part_of(name + _SCALES, scales))
        case _:
            assert_never(precision)


def from_wire(name: str, parts: Mapping[str, TensorPart], precision: WirePrecision) -> Tensor:
    """The activations (b, t, d) fp32 that `to_wire` made parts of. Raises RefusedTensorError for other parts."""
    part = parts.get(name)
    if part is None or len(part.spec.shape) != 3:
        raise RefusedTensorError(f"The tensor {name!r} is missing, or has not three dimensions.")
    sequences, tokens, size = part.spec.shape
    found = tuple(parts[spec].spec for spec in (name, name + _SCALES) if spec in parts)
    if found != wire_specs(name, (sequences, tokens, size), precision):
        raise RefusedTensorError(f"The tensor {name!r} is not what {precision.value} activations are.")
    values = tensor_of(part)
    if precision is WirePrecision.INT8:
        return restored(values, tensor_of(parts[name + _SCALES]))
    return values.to(torch.float32)


def quantised(activations: Tensor) -> tuple[Tensor, Tensor]:
    """(b, t, d) fp32 -> int8 values (b, t, d) and fp32 scales (b, t, ceil(d / block)).

    value = round(x / scale) with scale = largest |x| of the block / 127, so the error is at most scale / 2.
    """
    size = activations.shape[2]
    padded = functional.pad(activations, (0, -size % BLOCK))
    blocks = padded.view(*padded.shape[:2], -1, BLOCK)  # (b, t, blocks, block)
    scales = blocks.abs().amax(dim=3) / 127
    values = torch.round(blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None])
    return values.flatten(2)[..., :size].to(torch.int8), scales


def restored(values: Tensor, scales: Tensor) -> Tensor:
    """The activations (b, t, d) fp32 that `quantised` made values and scales of, within half a scale."""
    return values.to(torch.float32) * scales.repeat_interleave(BLOCK, dim=2)[..., : values.shape[2]]
