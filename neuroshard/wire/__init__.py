"""Frames: what two nodes say to each other, as bytes. Pure: no sockets, no clocks, and nothing is ever unpickled."""

from neuroshard.wire.frame import (
    MAX_HEADER_BYTES,
    DType,
    Frame,
    FrameLimits,
    TensorPart,
    TensorSpec,
    WireError,
    WireValue,
    check_limits,
)

__all__ = [
    "MAX_HEADER_BYTES",
    "DType",
    "Frame",
    "FrameLimits",
    "TensorPart",
    "TensorSpec",
    "WireError",
    "WireValue",
    "check_limits",
]
