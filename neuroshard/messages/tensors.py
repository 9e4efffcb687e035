"""Torch tensors to parts of a frame and back. The only file of this room that imports torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from neuroshard.messages.frame import DType, MalformedFrameError, TensorPart, TensorSpec

_DTYPES: Mapping[DType, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
}
_NAMES: Mapping[torch.dtype, DType] = {dtype: name for name, dtype in _DTYPES.items()}


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Return name, type and shape of a tensor. Raises MalformedFrameError for a type that cannot be sent."""
    dtype = _NAMES.get(tensor.dtype)
    if dtype is None:
        raise MalformedFrameError(f"The tensor {name!r} has the type {tensor.dtype}, which cannot travel.")
    return TensorSpec(name, dtype, tuple(tensor.shape))


def part_of(name: str, tensor: Tensor) -> TensorPart:
    """Return a tensor, without its gradient, as a part of a frame.

    The tensor is copied only from a device or out of a strided layout. Otherwise the part reads the tensor's own
    memory: do not change the tensor before the frame was sent.
    """
    spec = spec_of(name, tensor)
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().data.toreadonly() if plain.numel() else b""
    return TensorPart(spec, data)


def tensor_of(part: TensorPart) -> Tensor:
    """Return the tensor of a part, on the CPU. Raises MalformedFrameError if the bytes do not fit the shape.

    Received parts are writable, and the tensor shares their memory. It has its own memory if the part is read-only (a
    frame that never left this process) or is not aligned for the type.
    """
    if memoryview(part.data).nbytes != part.spec.byte_count:
        raise MalformedFrameError(f"The tensor {part.spec.name!r} does not have the bytes that its shape needs.")
    dtype = _DTYPES[part.spec.dtype]
    if not part.spec.byte_count:
        return torch.empty(part.spec.shape, dtype=dtype)
    view = memoryview(part.data)
    data = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    aligned = data if data.data_ptr() % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype).reshape(part.spec.shape)
