"""The codec that a run's parameters name, and the error feedback that goes with it.

Error feedback: the part that a codec loses of one contribution is added to the next (Karimireddy et al. 2019)."""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from neuroshard.compression.codec import Bf16Codec, Codec, Fp32Codec
from neuroshard.compression.integers import Int4Codec, Int8Codec
from neuroshard.compression.sparse import SparseCodec, TopKCodec
from neuroshard.config.run_parameters import CodecName

TOP_K_DECAY = 0.95  # a round (DESIGN 4.5)


def make_codec(name: CodecName) -> Codec:
    """The codec a run's parameters name."""
    match name:
        case "fp32" | "powersgd":  # of which the strategy makes factors, and these travel as they are
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
    """Whether a contribution in it has only some of its numbers, and others than the next one."""
    return isinstance(codec, TopKCodec)


def aggregate_codec(codec: Codec) -> Codec:
    """How the aggregate of contributions in this codec travels: in the same, but for what several sparse add up to."""
    return SparseCodec() if is_sparse(codec) else codec


def residual_decay(name: CodecName) -> float:
    """What is left of what a codec lost when it comes to the next contribution.

    Top-k loses most of a contribution: what did not get its turn for long is from weights that are no more.
    """
    return TOP_K_DECAY if is_sparse(make_codec(name)) else 1.0


def has_outer_momentum(name: CodecName) -> bool:
    """Whether the outer step has its momentum: what top-k holds back would be in the velocity and the residual."""
    return not is_sparse(make_codec(name))


def with_residual(contribution: Tensor, residual: Tensor | None) -> Tensor:
    """What to encode: contribution + residual (d,); without a residual the contribution itself."""
    return contribution if residual is None else torch.add(contribution, residual)


def next_residual(encoded: Tensor, decoded: Tensor | None, decay: float = 1.0) -> Tensor | None:
    """decay * (encoded - decode(encode(encoded))) (d,): what the others did not get; None when nothing was lost.

    It is kept when the round commits; an abort keeps the old one, and a contribution that was refused leaves none. What
    clipping or trimming took away is no part of it: that was taken on purpose.
    """
    if decoded is None or decoded is encoded:
        return None
    lost = torch.sub(encoded, decoded)
    return lost if decay == 1.0 else lost.mul_(decay)
