"""The codec that a run's parameters name, and the error feedback that goes with it.

Error feedback: the part that a codec loses of one contribution is added to the next (Karimireddy et al. 2019).
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from neuroshard.compression.codec import Bf16Codec, Codec, Fp32Codec
from neuroshard.compression.integers import Int4Codec, Int8Codec
from neuroshard.compression.sparse import TopKCodec
from neuroshard.config.run_parameters import CodecName


def make_codec(name: CodecName) -> Codec:
    """The codec that a run's parameters name."""
    match name:
        case "fp32":
            return Fp32Codec()
        case "bf16":
            return Bf16Codec()
        case "int8":
            return Int8Codec()
        case "int4":
            return Int4Codec()
        case "topk":
            return TopKCodec()
        case _:
            assert_never(name)


def is_sparse(codec: Codec) -> bool:
    """Whether a contribution contains only some of its numbers, and different ones each time."""
    return isinstance(codec, TopKCodec)


def with_residual(contribution: Tensor, residual: Tensor | None) -> Tensor:
    """The vector to encode: contribution + residual (d,), or the contribution itself without a residual."""
    return contribution if residual is None else torch.add(contribution, residual)


def next_residual(encoded: Tensor, decoded: Tensor | None, decay: float = 1.0) -> Tensor | None:
    """decay * (encoded - decode(encode(encoded))) (d,), the part that the others did not get; None if the codec is
    exact.

    It replaces the old residual when the round commits; an abort keeps the old one, and a refused contribution
    leaves none. Clipping and trimming do not count as losses: they are intended.
    """
    if decoded is None or decoded is encoded:
        return None
    lost = torch.sub(encoded, decoded)
    return lost if decay == 1.0 else lost.mul_(decay)
