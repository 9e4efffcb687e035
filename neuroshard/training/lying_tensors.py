"""Tensors of a paused stage lie in a file: of them only what somebody reads takes memory. Not on Windows."""

from __future__ import annotations

import mmap
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from neuroshard.training.checkpoint.limits import StorageLimits
from neuroshard.training.checkpoint.tensor_file import bytes_of

_ALIGNMENT = 64  # bytes: vector instructions read no two lines for one


def laid_down(tensors: Sequence[Tensor], folder: Path) -> list[Tensor] | None:
    """Equal tensors whose memory is a private mapping of a file without a name: what is written to them is in no file.

    `tensors` are contiguous, on the CPU and not changed meanwhile. None where the system cannot, or the disk has no
    room. Raises OSError when the folder cannot be written.
    """
    starts, size = list[int](), 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    if sys.platform == "win32" or size == 0:
        return None
    if shutil.disk_usage(folder).free < size + StorageLimits().reserve_bytes:
        return None
    with tempfile.TemporaryFile(dir=folder) as file:
        for start, tensor in zip(starts, tensors, strict=True):
            file.seek(start)
            file.write(bytes_of(tensor))
        file.truncate(size)
        file.flush()
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    return [
        torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]
