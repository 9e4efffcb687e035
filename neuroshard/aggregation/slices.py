"""Slices of contributions: rows decoded a few columns at a time, sums in a fixed order, and medians of columns.

The same numbers give the same float64 on every machine, with any kernels and any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LANES = 1 << 16

BLOCK = 4096  # numbers that are summed separately
LANES = 128  # width to which products are folded before a wider sum
Floats: TypeAlias = NDArray[np.float32]
Doubles: TypeAlias = NDArray[np.float64]
"""NumPy's: its operations on a cache's worth of numbers cost half of PyTorch's, and no other thread is asked."""


def fold_products(left: Doubles, right: Doubles, scratch: Doubles, out: Doubles) -> None:
    """Products of two (blocks * 4,096,) vectors, every block folded to 128 lanes, into `out` (blocks, 128).

    Products i, i + 128, i + 256 ... of a block are added to lane i in this order: NumPy adds row after row along an
    axis that is not the last one.
    """
    np.multiply(left, right, out=scratch)
    np.add.reduce(scratch.reshape(-1, BLOCK // LANES, LANES), axis=1, out=out)


def folded(lanes: Doubles) -> Doubles:
    """Sums (n, blocks) of every block from (n, blocks, 128): lanes i and i + 64 are added, then i and i + 32, ..."""
    rows, half = np.ascontiguousarray(lanes.reshape(-1, LANES).T), LANES // 2
    while half:
        np.add(rows[:half], rows[half : 2 * half], out=rows[:half])
        half //= 2
    return rows[0].reshape(lanes.shape[:-1])


def dot_product(left: Tensor, right: Tensor) -> float:
    """Sum of left_i * right_i over two (d,) vectors, in float64.

    Element i is added to lane i mod 65,536, in order, and the lanes are added by halving. Every product and sum is a
    separate elementwise operation, which IEEE 754 fixes to the last bit; library reductions choose their own order.
    The sum is finite exactly if all elements of fp32 vectors are: float64 cannot overflow on their products.
    """
    if left.dim() != 1 or left.shape != right.shape:
        raise ValueError(f"a dot product needs two equal vectors, got {tuple(left.shape)} and {tuple(right.shape)}")
    lanes = torch.zeros(_LANES, dtype=torch.float64)
    product = torch.empty(_LANES, dtype=torch.float64)
    factor = torch.empty(_LANES, dtype=torch.float64)
    for start in range(0, left.shape[0], _LANES):
        size = min(_LANES, left.shape[0] - start)
        product[:size].copy_(left[start : start + size])
        if left is right:
            product[:size].mul_(product[:size])
        else:
            factor[:size].copy_(right[start : start + size])
            product[:size].mul_(factor[:size])
        lanes[:size].add_(product[:size])
    while lanes.shape[0] > 1:
        half = lanes.shape[0] // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes.item())


_DECODED_AT_ONCE = 1 << 20  # numbers of all rows together: starting to decode has a cost, too
VALUES_AT_ONCE = 1 << 18  # fits into the cache of one core


@dataclass(frozen=True)
class SliceRows:
    """n contributions to one slice of `length` numbers.

    `decode(row, start, stop, out)` writes the numbers [start, stop) of a row into `out` (stop - start,) fp32.
    `start` is a multiple of 4,096, and so is `stop` unless it is the length. Its exceptions reach the reader of the
    rows.
    """

    count: int
    length: int
    decode: Callable[[int, int, int, Tensor], object]

    def __post_init__(self) -> None:
        if self.count < 1 or self.length < 1:
            raise ValueError(f"a slice has contributions and numbers, not {self.count} and {self.length}")

    @classmethod
    def of(cls, rows: Tensor) -> SliceRows:
        """Rows (n, d) in memory."""
        if rows.dim() != 2 or rows.numel() == 0 or rows.dtype != torch.float32 or rows.device.type != "cpu":
            raise ValueError(f"contributions must be fp32 of shape (n, d) on the CPU, got {tuple(rows.shape)}")
        numbers = rows.detach().numpy()  # PyTorch would share the copy among threads, which wait for each other

        def decode(row: int, start: int, stop: int, out: Tensor) -> None:
            np.copyto(out.numpy(), numbers[row, start:stop])

        return cls(rows.shape[0], rows.shape[1], decode)

    def chunks(self, among: tuple[int, ...], values_at_once: int = VALUES_AT_ONCE) -> Iterator[tuple[int, Tensor]]:
        """The rows of these numbers, some columns at a time: (first column, (rows, columns) fp32).

        Every chunk overwrites the one before. The columns of the last one are filled up to whole blocks with zeros.
        """
        most, blocks_of_rows = -(-self.length // BLOCK), BLOCK * len(among)
        decoded = BLOCK * min(max(1, _DECODED_AT_ONCE // blocks_of_rows), most)
        given = BLOCK * min(max(1, values_at_once // blocks_of_rows), most)
        buffer = torch.empty(len(among), decoded)
        for start in range(0, self.length, decoded):
            width = min(decoded, self.length - start)
            padded = -(-width // BLOCK) * BLOCK
            for place, row in enumerate(among):
                self.decode(row, start, start + width, buffer[place, :width])
            buffer[:, width:padded].zero_()
            for first in range(0, padded, given):
                yield start + first, buffer[:, first : min(first + given, padded)]


_MAX_NETWORK_ROWS = 32  # above this number a comparison sort of each column needs fewer operations


def comparators(count: int) -> Iterator[tuple[int, int]]:
    """Pairs (i, j), i < j, that sort `count` values when applied in turn: Batcher's odd-even merge sort.

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
    """The `comparators` needed for places first .. last - 1, in any order among themselves.

    A tuple is (i, j, whether the lower value is needed, whether the higher is).
    """
    needed = unordered = set(range(first, last))
    steps: list[tuple[int, int, bool, bool]] = []
    for low, high in reversed(list(comparators(count))):
        if not {low, high} <= unordered and (low in needed or high in needed):
            steps.append((low, high, low in needed, high in needed))
            needed, unordered = needed | {low, high}, unordered - {low, high}
    return tuple(reversed(steps))


def middle_rows(rows: Floats, trim: int) -> list[Floats]:
    """The columns of (n, d) without their `trim` lowest and highest numbers, in an order that depends only on n and
    trim.

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
    # starting with zero makes -0.0 and 0.0 the same value, which sorting does not order
    total = np.add(middle[0], 0.0, dtype=np.float64)
    for row in middle[1:]:
        np.add(total, row, out=total)
    return np.divide(total, len(middle), out=total)


def weighted_middle_mean(rows: Floats, weights: Sequence[float], trim: int) -> tuple[Doubles, Floats, Floats]:
    """Weighted mean (d,) of every column of (n, d) without its `trim` lowest and highest numbers, and the lowest and
    the highest number (d,) of the rest.

    If some numbers equal the lowest or the highest of the rest, and places are left for a part of them only, each of
    them counts by the same part. So the order of the rows changes nothing.
    """
    middle = middle_rows(rows.copy(), trim)
    low, high = middle[0].copy(), middle[0].copy()
    for row in middle[1:]:
        np.minimum(low, row, out=low)
        np.maximum(high, row, out=high)
    total, mass, share = (np.zeros(rows.shape[1]) for _ in range(3))
    kept, is_kept, is_low = np.zeros(rows.shape[1], np.uint16), *(np.empty(rows.shape[1], np.bool_) for _ in range(2))
    for row, weight in zip(rows, weights, strict=True):
        np.greater_equal(row, low, out=is_low)
        np.less_equal(row, high, out=is_kept)
        np.logical_and(is_low, is_kept, out=is_kept)
        np.add(kept, is_kept, out=kept)
        np.multiply(is_kept, weight, out=share)
        np.add(mass, share, out=mass)
        np.multiply(share, row, out=share)
        np.add(total, share, out=total)
    np.divide(total, mass, out=total)
    tied = np.flatnonzero(kept != rows.shape[0] - 2 * trim)
    total[tied] = _mean_with_ties(rows[:, tied], weights, trim, low[tied], high[tied])
    return total, low, high


def _mean_with_ties(rows: Floats, weights: Sequence[float], trim: int, low: Floats, high: Floats) -> Doubles:
    """See `weighted_middle_mean`, for any columns."""
    is_low, is_high, inside = rows == low, rows == high, (rows > low) & (rows < high)
    lower = (is_low.sum(axis=0) - (trim - (rows < low).sum(axis=0))) / is_low.sum(axis=0)
    higher = (is_high.sum(axis=0) - (trim - (rows > high).sum(axis=0))) / is_high.sum(axis=0)
    total, mass = np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
    for row, weight, share in zip(rows, weights, inside + is_low * lower + is_high * higher, strict=True):
        np.add(mass, weight * share, out=mass)
        np.add(total, (weight * share) * row, out=total)
    return np.where(low == high, low + 0.0, total / mass)  # all that are left are equal
