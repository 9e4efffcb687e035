"""Work on tensors that must not hold up the event loop: reading, checking and packing what travels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread
from torch import Tensor

from neuroshard.wire import TensorPart

T = TypeVar("T")

SMALL_BYTES = 64 * 1024  # done at once: going to another thread takes longer


async def beside(work: Callable[[], T], *tensors: Tensor | TensorPart | None) -> T:
    """The value of `work`, done on another thread when the tensors that it is about are large."""
    if sum(map(_bytes, tensors)) <= SMALL_BYTES:
        return work()
    return await anyio.to_thread.run_sync(work)


def _bytes(tensor: Tensor | TensorPart | None) -> int:
    if tensor is None:
        return 0
    return tensor.nbytes if isinstance(tensor, Tensor) else tensor.spec.byte_count
