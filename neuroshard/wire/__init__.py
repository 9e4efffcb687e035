"""Frames: what two nodes say to each other, as bytes. Pure: no sockets, no clocks, and nothing is ever unpickled.

Torch tensors become parts of a frame in `neuroshard.wire.tensors`, which is not imported here.
"""

from neuroshard.wire.chunks import ChunkAssembly, ChunkCheck
from neuroshard.wire.decoding import FrameDecoder, decode
from neuroshard.wire.encoding import EncodedFrame, check_limits, encode
from neuroshard.wire.frame import (
    MAX_HEADER_BYTES,
    DamagedChunkError,
    DType,
    Frame,
    FrameLimits,
    FrameTooLargeError,
    MalformedFrameError,
    TensorPart,
    TensorSpec,
    UnexpectedTensorError,
    WireError,
    WireValue,
)
from neuroshard.wire.head import CHUNK_BYTES, PREFIX_BYTES, FrameHead

__all__ = [
    "CHUNK_BYTES",
    "MAX_HEADER_BYTES",
    "PREFIX_BYTES",
    "ChunkAssembly",
    "ChunkCheck",
    "DType",
    "DamagedChunkError",
    "EncodedFrame",
    "Frame",
    "FrameDecoder",
    "FrameHead",
    "FrameLimits",
    "FrameTooLargeError",
    "MalformedFrameError",
    "TensorPart",
    "TensorSpec",
    "UnexpectedTensorError",
    "WireError",
    "WireValue",
    "check_limits",
    "decode",
    "encode",
]
