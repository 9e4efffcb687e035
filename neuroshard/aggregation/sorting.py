"""The middle of many short columns at once: a sorting network of minima and maxima over whole rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from neuroshard.aggregation.sums import Doubles, Floats

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


@cache
def pruned_comparators(count: int, first: int, last: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """The `comparators` that bring the right numbers to places first .. last - 1, in any order among themselves.

    (i, j, the lower value is needed, the higher is).
    """
    needed = unordered = set(range(first, last))
    steps: list[tuple[int, int, bool, bool]] = []
    for low, high in reversed(list(comparators(count))):
        if not {low, high} <= unordered and (low in needed or high in needed):
            steps.append((low, high, low in needed, high in needed))
            needed, unordered = needed | {low, high}, unordered - {low, high}
    return tuple(reversed(steps))


def middle_rows(rows: Floats, trim: int) -> list[Floats]:
    """The columns of (n, d) without their `trim` lowest and highest numbers, in an order that only n and trim decide.

    Overwrites the rows.
    """
    count = rows.shape[0]
    if count > _MAX_NETWORK_ROWS:
        rows.sort(axis=0)
        return list(rows[trim : count - trim])
    lines = list(rows)
    spare = np.empty_like(lines[0])
    for low, high, needs_low, needs_high in pruned_comparators(count, trim, count - trim):
        if needs_low and needs_high:
            np.minimum(lines[low], lines[high], out=spare)
            np.maximum(lines[low], lines[high], out=lines[high])
            lines[low], spare = spare, lines[low]
        elif needs_low:
            np.minimum(lines[low], lines[high], out=lines[low])
        else:
            np.maximum(lines[low], lines[high], out=lines[high])
    return lines[trim : count - trim]


def middle_mean(rows: Floats, trim: int) -> Doubles:
    """Float64 mean (d,) of every column of (n, d) without its `trim` lowest and highest numbers; overwrites rows."""
    middle = middle_rows(rows, trim)
    # beginning with zero makes -0.0 and 0.0, which sorting does not order, one value
    total = np.add(middle[0], 0.0, dtype=np.float64)
    for row in middle[1:]:
        np.add(total, row, out=total)
    return np.divide(total, len(middle), out=total)
