"""Frames: the messages between two nodes as bytes. Pure: no sockets, no clocks, no pickle.

`neuroshard.messages.tensors` converts Torch tensors to parts of a frame. It is not imported here.
"""

from neuroshard.messages.codec import (
    ChunkAssembly,
    ChunkCheck,
    EncodedFrame,
    FrameDecoder,
    as_received,
    decode,
    encode,
)
from neuroshard.messages.frame import (
    CHUNK_BYTES,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    DamagedChunkError,
    DType,
    Frame,
    FrameHead,
    FrameLimits,
    FrameTooLargeError,
    MalformedFrameError,
    TensorPart,
    TensorSpec,
    UnexpectedTensorError,
    WireError,
    WireValue,
)

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
    "as_received",
    "decode",
    "encode",
]
