"""Codecs for contributions: how pseudo-gradients travel. No sockets, no state."""

from neuroshard.compression.codec import Codec, Fp32Codec, MalformedVectorError, checked_vector, make_codec

__all__ = ["Codec", "Fp32Codec", "MalformedVectorError", "checked_vector", "make_codec"]
