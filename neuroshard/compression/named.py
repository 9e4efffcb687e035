"""Codecs by the name that a run's parameters give them."""

from __future__ import annotations

from typing import assert_never

from neuroshard.compression.bf16 import Bf16Codec
from neuroshard.compression.codec import Codec
from neuroshard.compression.fp32 import Fp32Codec
from neuroshard.compression.int4 import Int4Codec
from neuroshard.compression.int8 import Int8Codec
from neuroshard.compression.sparse import SparseCodec
from neuroshard.compression.top_k import TopKCodec
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
