"""Codecs for contributions: how pseudo-gradients travel. No sockets, no state."""

from neuroshard.compression.bf16 import Bf16Codec
from neuroshard.compression.codec import Codec, MalformedVectorError, checked_vector
from neuroshard.compression.error_feedback import next_residual, with_residual
from neuroshard.compression.fp32 import Fp32Codec
from neuroshard.compression.int4 import INT4_BLOCK, Int4Codec
from neuroshard.compression.int8 import BLOCK, Int8Codec
from neuroshard.compression.named import aggregate_codec, has_outer_momentum, is_sparse, make_codec, residual_decay

__all__ = [
    "BLOCK",
    "INT4_BLOCK",
    "Bf16Codec",
    "Codec",
    "Fp32Codec",
    "Int4Codec",
    "Int8Codec",
    "MalformedVectorError",
    "aggregate_codec",
    "checked_vector",
    "has_outer_momentum",
    "is_sparse",
    "make_codec",
    "next_residual",
    "residual_decay",
    "with_residual",
]
