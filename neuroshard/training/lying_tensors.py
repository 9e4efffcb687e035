"""Tensors of a paused stage lie in a file: of them only what somebody reads takes memory. Not on Windows."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from neuroshard.training.checkpoint.limits import StorageLimits
from neuroshard.training.checkpoint.tensor_file import bytes_of

_PIECE_BYTES = 1 << 26  # written between two looks at whether somebody waits
_ALIGNMENT = 64  # bytes: vector instructions read no two lines for one


def laid_down(tensors: Sequence[Tensor], folder: Path, is_wanted: Callable[[], bool]) -> list[Tensor] | None:
    """Equal tensors whose memory is a private mapping of a file without a name: what is written to them is in no file.

    `tensors` are contiguous, on the CPU and not changed meanwhile. None where the system cannot, the disk has no room,
    or it is not wanted any more. All of it is on the disk at the end. Raises OSError when it cannot be written.
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
            if not _written(file, bytes_of(tensor), is_wanted):
                return None
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())  # the memory is let go: no later write may fail
        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    return [
        torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    ]


def _written(file: IO[bytes], data: memoryview, is_wanted: Callable[[], bool]) -> bool:
    """Piece by piece, the large ones synced, so that whoever waits does not wait for long; False: somebody does."""
    for begin in range(0, len(data), _PIECE_BYTES):
        if not is_wanted():
            return False
        file.write(data[begin : begin + _PIECE_BYTES])
        if len(data) > _PIECE_BYTES:
            os.fsync(file.fileno())
    return True
