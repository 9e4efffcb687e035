"""Statistics of the contributions to a slice for the gates, and their bytes.

The statistics of all slices add up to those of the whole vector. The same numbers give the same bits on every
machine.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress
from math import fsum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from neuroshard.aggregation.slices import (
    BLOCK,
    LANES,
    VALUES_AT_ONCE,
    Doubles,
    Floats,
    SliceRows,
    fold_products,
    folded,
    middle_mean,
)
from neuroshard.errors import NeuroShardError

MIN_ROBUST_MEMBERS = 3
LARGEST_SUM = 2.0**320  # 2^64 products of fp32 numbers, each below 2^256: sums of such sums cannot overflow

GramMatrix: TypeAlias = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class SliceStatistics:
    """Sums over the numbers of a slice, or of the whole vector, for each of n contributions by row number.

    A row with a number that is not finite has zeros instead of sums. The center is the coordinate-wise median of the
    established rows, in every block of 4,096 numbers over those that are finite there (for sparse rows it is the
    mean). With fewer than MIN_ROBUST_MEMBERS established rows no majority has a direction, and the center is zero.
    All numbers are finite, and zero is +0.0. Raises ValueError if the fields contradict each other.
    """

    finite: tuple[bool, ...]
    squared_norms: tuple[float, ...]
    center_dots: tuple[float, ...]  # dot products with the center
    center_squared_norm: float
    gram: GramMatrix | None = None  # (n, n) dot products of the rows with each other; only some aggregators need it

    def __post_init__(self) -> None:
        count = len(self.finite)
        if count < 1 or len(self.squared_norms) != count or len(self.center_dots) != count:
            raise ValueError("statistics need one finite flag, norm and dot product for each contribution")
        if min(self.squared_norms) < 0 or self.center_squared_norm < 0:
            raise ValueError("a squared norm is not negative")
        values = chain(self.squared_norms, self.center_dots, (self.center_squared_norm,), *(self.gram or ()))
        if not all(abs(value) <= LARGEST_SUM for value in values):  # the comparison is also false for NaN
            raise ValueError("statistics hold a number that no sum of products of contributions can be")
        if any(self.squared_norms[i] or self.center_dots[i] for i in range(count) if not self.finite[i]):
            raise ValueError("a row that is not finite has no norm and no dot product")
        if self.gram is not None:
            self._check_gram(self.gram)

    @property
    def count(self) -> int:
        """Number of contributions."""
        return len(self.finite)

    def _check_gram(self, gram: GramMatrix) -> None:
        if [len(row) for row in gram] != [self.count] * self.count:
            raise ValueError(f"the Gram matrix of {self.count} contributions has {self.count} rows and columns")
        if any(gram[i][i] != self.squared_norms[i] for i in range(self.count)):
            raise ValueError("the diagonal of a Gram matrix holds the squared norms")
        if any(gram[i][j] != gram[j][i] for i in range(self.count) for j in range(i)):
            raise ValueError("a Gram matrix is symmetric")
        if any(any(gram[i]) for i in range(self.count) if not self.finite[i]):
            raise ValueError("a row that is not finite has no dot products")


def slice_statistics(
    rows: SliceRows,
    *,
    with_gram: bool = False,
    is_sparse: bool = False,
    established: Sequence[bool] | None = None,
) -> SliceStatistics:
    """Statistics of one slice in one pass over its rows; `with_gram` costs n / 2 times as much arithmetic.

    Without `established` all rows are. For sparse rows the center is the mean: their median is zero nearly everywhere.

    Every block of 4,096 numbers is summed in float64 in the order of `sums`, and the sums of the blocks are added
    exactly and rounded once (Python's fsum). So vectors cut at other multiples of 4,096 have sums that differ in the
    last bits at most.
    """
    every_row = range(rows.count)
    voters = every_row if established is None else compress(every_row, established)
    workspace = _Workspace(rows.count, with_gram, is_sparse, tuple(voters))
    finite, sums = np.ones(rows.count, np.bool_), list[Doubles]()
    # half as many as otherwise: their float64 form needs memory too
    for _, chunk in rows.chunks(tuple(every_row), VALUES_AT_ONCE // 2):
        are_finite, of_blocks = workspace.sums(chunk.numpy())
        finite &= are_finite
        sums.append(of_blocks)
    of_all_blocks: Doubles = np.concatenate(sums, axis=1)
    return arranged(finite, list(map(fsum, of_all_blocks)), with_gram=with_gram)


def sum_statistics(slices: Sequence[SliceStatistics]) -> SliceStatistics:
    """Statistics of the whole vector, the same in any order of its slices.

    Raises ValueError for no slices, and for slices with different numbers of contributions or with and without Gram
    matrices.
    """
    shapes = {(one.count, one.gram is None) for one in slices}
    if len(shapes) != 1:
        raise ValueError("only statistics of the same contributions, all with or all without Gram matrices, add up")
    finite = np.all([one.finite for one in slices], axis=0)
    sums = list(map(fsum, zip(*map(sums_in_order, slices), strict=True)))
    return arranged(finite, sums, with_gram=slices[0].gram is not None)


class _Workspace:
    """Memory that is reused for every chunk: allocating it each time would cost more than the arithmetic."""

    def __init__(self, count: int, with_gram: bool, is_sparse: bool, established: Sequence[int]) -> None:
        self._count = count
        self._is_sparse = is_sparse
        self._established = list(established)
        self._pairs = [(i, j) for i in range(count) for j in range(i)] if with_gram else []
        self._values = self._scratch = self._lanes = np.empty(0)

    def sums(self, chunk: Floats) -> tuple[NDArray[np.bool_], Doubles]:
        """Which of n rows are finite, and the sums of every block (sums, blocks) in the order of `sums_in_order`."""
        count, blocks = self._count, chunk.shape[1] // BLOCK
        if self._values.shape != chunk.shape:
            self._values, self._scratch = np.empty(chunk.shape), np.empty(chunk.shape[1])
            self._lanes = np.empty((2 * count + 1 + len(self._pairs), blocks, LANES))
        values, scratch, lanes = self._values, self._scratch, self._lanes
        np.copyto(values, chunk)
        for row in range(count):
            fold_products(values[row], values[row], scratch, lanes[row])
        # finite exactly if all numbers of the block are: float64 cannot overflow on squares of fp32
        norms = folded(lanes[:count])
        finite = np.isfinite(norms)
        if not finite.all():
            values.reshape(count, blocks, BLOCK)[~finite] = 0.0
            norms[~finite] = 0.0
        self._dots_with_center(chunk, finite)
        for place, (i, j) in enumerate(self._pairs, start=2 * count + 1):
            fold_products(values[i], values[j], scratch, lanes[place])
        return np.logical_and.reduce(finite, axis=1), np.concatenate((norms, folded(lanes[count:])))

    def _dots_with_center(self, chunk: Floats, finite: NDArray[np.bool_]) -> None:
        count, lanes, among = self._count, self._lanes, self._established
        if len(among) < MIN_ROBUST_MEMBERS:
            lanes[count : 2 * count + 1] = 0.0
            return
        is_every_row = len(among) == count
        if self._is_sparse:
            # numbers that are not finite have become zero; only the direction of the mean matters here, not its length
            center = (self._values if is_every_row else self._values[among]).sum(axis=0) / len(among)
        else:
            center = _center(chunk, finite) if is_every_row else _center(chunk[among], finite[among])
        for row in range(count):
            fold_products(self._values[row], center, self._scratch, lanes[count + row])
        fold_products(center, center, self._scratch, lanes[2 * count])


def _center(chunk: Floats, finite: NDArray[np.bool_]) -> Doubles:
    """Float64 median of every column over the rows that are finite in its block; zero if there are none.

    Overwrites the chunk.
    """
    if finite.all():
        return middle_mean(chunk, (chunk.shape[0] - 1) // 2)
    center = np.zeros((finite.shape[1], BLOCK))
    for pattern in {tuple(bool(flag) for flag in of_block) for of_block in finite.T}:
        among = [row for row, flag in enumerate(pattern) if flag]
        if among:
            blocks = (np.array(pattern) == finite.T).all(axis=1)
            columns = chunk[among].reshape(len(among), -1, BLOCK)[:, blocks].reshape(len(among), -1)
            center[blocks] = middle_mean(columns, (len(among) - 1) // 2).reshape(-1, BLOCK)
    return center.reshape(-1)


def sums_in_order(statistics: SliceStatistics) -> list[float]:
    """All sums in fixed order: squared norms, dot products, the center's square, the lower half of the Gram matrix."""
    pairs = chain(*(row[:i] for i, row in enumerate(statistics.gram or ())))
    return [*statistics.squared_norms, *statistics.center_dots, statistics.center_squared_norm, *pairs]


def arranged(finite: NDArray[np.bool_], sums: Sequence[float], *, with_gram: bool) -> SliceStatistics:
    """The inverse of `sums_in_order`; rows that are not finite lose their sums."""
    count = len(finite)
    with np.errstate(invalid="ignore"):  # a sender's NaN may signal; `SliceStatistics` refuses any NaN
        tidy = np.array(sums) + 0.0  # replaces -0.0 by 0.0
    norms, dots = np.where(finite, tidy[: 2 * count].reshape(2, count), 0.0).tolist()
    center, *pairs = tidy[2 * count :].tolist()
    gram = _mirrored(norms, pairs, finite) if with_gram else None
    return SliceStatistics(tuple(finite.tolist()), tuple(norms), tuple(dots), center, gram)


def _mirrored(diagonal: Sequence[float], pairs: Sequence[float], finite: NDArray[np.bool_]) -> GramMatrix:
    count, values = len(finite), iter(pairs)
    full = [[0.0] * count for _ in range(count)]
    for i in range(count):
        full[i][i] = diagonal[i]
        for j in range(i):
            value = next(values)
            if finite[i] and finite[j]:
                full[i][j] = full[j][i] = value
    return tuple(tuple(row) for row in full)


class MalformedStatisticsError(NeuroShardError):
    """Bytes that are not the statistics of this number of contributions."""


def statistics_size(count: int, *, with_gram: bool) -> int:
    """Size in bytes of the statistics of `count` contributions."""
    return count + 8 * (2 * count + 1 + (count * (count - 1) // 2 if with_gram else 0))


def statistics_bytes(statistics: SliceStatistics) -> bytes:
    """A byte 0 or 1 for each contribution (finite or not), then all sums as little-endian float64."""
    sums = sums_in_order(statistics)
    return bytes(statistics.finite) + struct.pack(f"<{len(sums)}d", *sums)


def read_statistics(data: bytes | memoryview, count: int, *, with_gram: bool) -> SliceStatistics:
    """The inverse of `statistics_bytes`. Raises MalformedStatisticsError, for which the sender is responsible."""
    if count < 1 or len(data) != statistics_size(count, with_gram=with_gram):
        raise MalformedStatisticsError(f"{len(data)} bytes are not the statistics of {count} contributions.")
    finite = np.frombuffer(data, np.uint8, count) != 0
    sums = struct.unpack(f"<{(len(data) - count) // 8}d", data[count:])
    try:
        statistics = arranged(finite, sums, with_gram=with_gram)
    except ValueError as error:
        raise MalformedStatisticsError(f"These statistics contradict each other: {error}.") from None
    if statistics_bytes(statistics) != data:
        raise MalformedStatisticsError(
            "Statistics have one form only: flags are 0 or 1, zero is +0.0, and a row that is not finite has no sums."
        )
    return statistics
