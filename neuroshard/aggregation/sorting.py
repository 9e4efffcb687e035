"""Sorting many short columns at once: a network of minima and maxima over whole rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

_MAX_NETWORK_ROWS = 32  # beyond that a comparison sort of each column needs fewer operations


def comparators(count: int) -> Iterator[tuple[int, int]]:
    """Pairs (i, j), i < j, whose ordering in turn sorts `count` values: Batcher's odd-even merge sort.

    Knuth, The Art of Computer Programming 3, 5.2.2 M; for any count.
    """
    largest = 1 << max(0, (count - 1).bit_length() - 1)
    part = largest
    while part:
        step, offset, bit = largest, part, 0
        while True:
            for i in range(count - offset):
                if i & part == bit:
                    yield i, i + offset
            if step == part:
                break
            step, offset, bit = step // 2, step - part, part
        part //= 2


def sorted_rows(rows: Tensor) -> Tensor:
    """(n, d) with every column in ascending order, in memory of its own."""
    count = rows.shape[0]
    if count > _MAX_NETWORK_ROWS:
        return torch.from_numpy(np.sort(rows.numpy(), axis=0))  # pyright: ignore[reportUnknownMemberType]
    ordered = list(rows.clone())
    spare = torch.empty_like(ordered[0])
    for low, high in comparators(count):
        torch.minimum(ordered[low], ordered[high], out=spare)
        torch.maximum(ordered[low], ordered[high], out=ordered[high])
        ordered[low], spare = spare, ordered[low]
    return torch.stack(ordered)


def middle_mean(rows: Tensor, trim: int) -> Tensor:
    """Float64 mean (d,) of every column of (n, d) without its `trim` lowest and highest numbers."""
    return row_mean(sorted_rows(rows)[trim : rows.shape[0] - trim])


def row_mean(rows: Tensor) -> Tensor:
    """Float64 mean (d,) of the rows (n, d), added one after the other."""
    # beginning with zero makes -0.0 and 0.0, which sorting does not order, one value
    total = torch.zeros(rows.shape[1], dtype=torch.float64)
    for row in rows:
        total.add_(row)
    return total.div_(rows.shape[0])
