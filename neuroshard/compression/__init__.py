"""Codecs that encode contributions for the network. They use no sockets and keep no state."""

from neuroshard.compression.codec import EXCERPT, Bf16Codec, Codec, Fp32Codec, MalformedVectorError, checked_vector
from neuroshard.compression.integers import BLOCK, INT4_BLOCK, Int4Codec, Int8Codec
from neuroshard.compression.named import is_sparse, make_codec, next_residual, with_residual
from neuroshard.compression.sparse import SparseCodec

__all__ = [
    "BLOCK",
    "EXCERPT",
    "INT4_BLOCK",
    "Bf16Codec",
    "Codec",
    "Fp32Codec",
    "Int4Codec",
    "Int8Codec",
    "MalformedVectorError",
    "SparseCodec",
    "checked_vector",
    "is_sparse",
    "make_codec",
    "next_residual",
    "with_residual",
]
