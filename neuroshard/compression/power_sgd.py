"""PowerSGD: matrices of a gradient travel as two thin factors, whose product approximates them (Vogels et al. 2019).

The parts on which members agree have the same bits on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import shake_256
from math import ceil, log2, prod
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuroshard.compression.codec import checked_vector

# the rows' numbers are multiples of 2^-24: fp32 represents each of them, and sums of products can be exact
UNIT_BITS = 24
_DEPENDENT = 2.0**-23  # below this, relative to the row, the remainder next to the other rows is fp32's rounding
Doubles: TypeAlias = NDArray[np.float64]


def orthonormal(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows (k, n) with the span of the given ones, each of length 1 and orthogonal to the others within 2^-20.

    A row in the span of the rows before it, a row of zeros and a row with a number that is not finite have no
    direction of their own: they become zeros. Products, sums, quotients and roots are separate operations on single
    numbers, and sums are made by halving, so that no kernel and no number of threads changes a bit.
    """
    found = rows.astype(np.float64)
    found[~np.isfinite(found).all(axis=1)] = 0.0
    _orthogonalise(found, _DEPENDENT)
    _orthogonalise(found, 0.5)  # again, for the rounding of the first pass (Giraud et al. 2005)
    return (np.rint(found * 2.0**UNIT_BITS) / 2.0**UNIT_BITS).astype(np.float32)


def _orthogonalise(rows: Doubles, smallest: float) -> None:
    """One pass in place; a row of which less than `smallest` remains becomes zeros."""
    scratch = np.empty_like(rows)
    before = np.sqrt(_sums(np.multiply(rows, rows, out=scratch)))
    for index in range(len(rows)):
        row, rest = rows[index], rows[index + 1 :]
        length = np.sqrt(_sums(np.multiply(row, row, out=scratch[index])[None])[0])
        if not length > smallest * before[index]:
            row[:] = 0.0
            continue
        np.divide(row, length, out=row)
        shares = _sums(np.multiply(rest, row, out=scratch[index + 1 :]))
        np.subtract(rest, np.multiply(shares[:, None], row, out=scratch[index + 1 :]), out=rest)


def _sums(terms: Doubles) -> Doubles:
    """Sums (k,) of the rows of (k, n), which is overwritten: the upper half is added to the lower one until one is
    left.
    """
    count = terms.shape[1]
    while count > 1:
        lower = (count + 1) // 2
        np.add(terms[:, : count - lower], terms[:, lower:count], out=terms[:, : count - lower])
        count = lower
    return terms[:, 0].copy()


LARGEST_SHARE = 0.5  # largest share of a matrix's numbers for its factors; a matrix that needs more travels unchanged
_Number = TypeVar("_Number", np.float32, np.float64)
Rows: TypeAlias = NDArray[_Number]


@dataclass(frozen=True)
class Matrix:
    """A matrix (rows, columns) that begins at `start` of the vector."""

    start: int
    rows: int
    columns: int

    def of(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """The matrix inside a vector (d,), sharing its memory."""
        return vector[self.start : self.start + self.rows * self.columns].reshape(self.rows, self.columns)


@dataclass(frozen=True)
class FactorPlan:
    """The matrices of a vector (d,) that have factors of this rank, and the ranges between them.

    Factors are stored column after column, as (rank, rows) and (rank, columns), matrix after matrix: `left_length`
    and `right_length` numbers. The rank is 0 if there are none. Raises ValueError for matrices
    without a rank, and for a length of zero.
    """

    length: int  # d
    rank: int
    matrices: tuple[Matrix, ...]

    def __post_init__(self) -> None:
        if self.rank < bool(self.matrices) or self.length < 1:
            raise ValueError(f"factors need a rank and a vector, got rank {self.rank} and {self.length} numbers")

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], rank: int) -> FactorPlan:
        """The plan for tensors of these shapes in order.

        If a tensor has more than two dimensions, the first counts as rows.
        """
        matrices, start = list[Matrix](), 0
        for shape in shapes:
            size = prod(shape)
            rows, columns = (shape[0], size // shape[0]) if len(shape) > 1 and size else (0, 0)
            if rows and rank * (rows + columns) <= LARGEST_SHARE * size:
                matrices.append(Matrix(start, rows, columns))
            start += size
        return cls(start, rank, tuple(matrices))

    @property
    def left_length(self) -> int:
        """Numbers of all P, and of the basis."""
        return self.rank * sum(matrix.rows for matrix in self.matrices)

    @property
    def right_length(self) -> int:
        """Numbers of all Q."""
        return self.rank * sum(matrix.columns for matrix in self.matrices)

    @property
    def plain_length(self) -> int:
        """Numbers that travel unchanged."""
        return self.length - sum(matrix.rows * matrix.columns for matrix in self.matrices)

    @property
    def projection_length(self) -> int:
        """Numbers of the second phase: the plain ones, then all Q."""
        return self.plain_length + self.right_length

    def plain(self) -> Iterator[tuple[slice, slice]]:
        """The ranges of the plain numbers in the vector and in a projection."""
        begin, there = 0, 0
        for end, after in [*((m.start, m.start + m.rows * m.columns) for m in self.matrices), (self.length, 0)]:
            if end > begin:
                yield slice(begin, end), slice(there, there + end - begin)
            begin, there = after, there + end - begin

    def left(self, factors: Rows[_Number]) -> Iterator[tuple[Matrix, Rows[_Number]]]:
        """Every matrix with its part (rank, rows) of `left_length` numbers, sharing their memory."""
        start = 0
        for matrix in self.matrices:
            size = self.rank * matrix.rows
            yield matrix, factors[start : start + size].reshape(self.rank, matrix.rows)
            start += size

    def right(self, factors: Rows[_Number]) -> Iterator[Rows[_Number]]:
        """Every matrix with its part (rank, columns) of `right_length` numbers, sharing their memory."""
        start = 0
        for matrix in self.matrices:
            size = self.rank * matrix.columns
            yield factors[start : start + size].reshape(self.rank, matrix.columns)
            start += size


_EXACT_BITS = 53  # float64 represents whole numbers up to 2^53
_CHUNK = 1 << 20  # numbers of a product per pass: the only temporary memory except the factors
_LARGEST = float(np.finfo(np.float32).max)


def first_right(plan: FactorPlan, seed: int) -> Tensor:
    """Q (right_length,) before the first step: numbers in (-1, 1), the same for the same seed on every machine."""
    right = torch.zeros(plan.right_length)
    _draw_missing(plan, right, seed, 0)
    return right


def left_factors(plan: FactorPlan, vector: Tensor, right: Tensor) -> Tensor:
    """P = M Q (left_length,) of a member's vector (d,): the contribution of the first phase.

    Raises ValueError for vectors of other lengths, and if the matrices or their product are not finite in fp32.
    """
    numbers = _array(vector, plan.length, "vector")
    found = torch.empty(plan.left_length)
    pairs = zip(plan.left(found.numpy()), plan.right(_array(right, plan.right_length, "Q")), strict=True)
    for (matrix, left), of_matrix in pairs:
        np.matmul(of_matrix, matrix.of(numbers).T, out=left)
    return _finite(found)


def orthonormal_basis(plan: FactorPlan, left: Tensor) -> Tensor:
    """The basis (left_length,) that the averaged P (left_length,) spans, the same bits on every machine."""
    found = torch.empty(plan.left_length)
    pairs = zip(plan.left(_array(left, plan.left_length, "P")), plan.left(found.numpy()), strict=True)
    for (_, averaged), (_, basis) in pairs:
        basis[:] = orthonormal(averaged)
    return found


def projection(plan: FactorPlan, vector: Tensor, basis: Tensor) -> Tensor:
    """The contribution of the second phase (projection_length,): the plain numbers, then M^T basis.

    Raises ValueError for vectors of other lengths, and if a number is not finite in fp32.
    """
    numbers = _array(vector, plan.length, "vector")
    found = torch.empty(plan.projection_length)
    sent = found.numpy()
    for here, there in plan.plain():
        sent[there] = numbers[here]
    factors = plan.left(_array(basis, plan.left_length, "basis"))
    for (matrix, left), right in zip(factors, plan.right(sent[plan.plain_length :]), strict=True):
        np.matmul(left, matrix.of(numbers), out=right)
    return _finite(found)


def restored_vector(plan: FactorPlan, projected: Tensor, basis: Tensor) -> Tensor:
    """The vector (d,) that a projection represents, the same bits on every machine.

    The products are of whole numbers so small that float64 represents every sum of them: their order does not
    matter. In exchange the factors lose everything below 2^-23 of the largest number of their matrix, at a rank of
    64. A matrix with factors that are not finite is NaN.
    """
    sent = _array(projected, plan.projection_length, "projection")
    found = torch.empty(plan.length)
    numbers = found.numpy()
    for here, there in plan.plain():
        numbers[here] = sent[there]
    factors = plan.left(_array(basis, plan.left_length, "basis"))
    for (matrix, left), right in zip(factors, plan.right(sent[plan.plain_length :]), strict=True):
        _multiply(left, right, matrix.of(numbers))
    return found


def next_right(plan: FactorPlan, projected: Tensor, seed: int, step: int) -> Tensor:
    """Q (right_length,) of step number `step` from the agreed projection of the step before.

    Every column is scaled by a power of two, which changes no bit of its direction, until its largest number is in
    [0.5, 1). A column without a direction is drawn again: otherwise it would stay zero for ever.
    """
    sent = _array(projected, plan.projection_length, "projection")
    right = torch.from_numpy(sent[plan.plain_length :].copy())  # pyright: ignore[reportUnknownMemberType]
    for rows in plan.right(right.numpy()):
        largest = np.abs(rows).max(axis=1)
        rows[~np.isfinite(largest)] = 0.0
        _, exponents = np.frexp(np.where(np.isfinite(largest), largest, 0.0))
        rows[:] = np.ldexp(rows.astype(np.float64), -exponents[:, None])
    _draw_missing(plan, right, seed, step)
    return right


def _draw_missing(plan: FactorPlan, right: Tensor, seed: int, step: int) -> None:
    """Fill the columns that are zero with 16 bits of SHAKE-256 per number."""
    for index, rows in enumerate(plan.right(right.numpy())):
        for column in _without_direction(rows):
            key = f"neuroshard/power-sgd/{seed}/{step}/{index}/{column}".encode()
            bits = np.frombuffer(shake_256(key).digest(2 * rows.shape[1]), "<i2")
            rows[column] = (bits.astype(np.float32) + np.float32(0.5)) / np.float32(1 << 15)


def _without_direction(rows: NDArray[np.float32]) -> Iterable[int]:
    return np.flatnonzero(~rows.any(axis=1)).tolist()


def _multiply(left: NDArray[np.float32], right: NDArray[np.float32], out: NDArray[np.float32]) -> None:
    """left^T right (rows, columns) of (k, rows) in multiples of 2^-24 up to 1 and (k, columns)."""
    largest = float(np.abs(right).max())
    if not np.isfinite(largest):
        out[:] = np.nan
        return
    rank = left.shape[0]
    exponent = int(np.frexp(largest)[1]) - (_EXACT_BITS - UNIT_BITS - ceil(log2(rank)))
    whole = np.rint(np.ldexp(right.astype(np.float64), -exponent))
    basis = np.ldexp(left.astype(np.float64), UNIT_BITS)
    rows = max(1, _CHUNK // right.shape[1])
    for start in range(0, left.shape[1], rows):
        product = np.ascontiguousarray(basis[:, start : start + rows].T) @ whole
        product = np.ldexp(product, exponent - UNIT_BITS)
        out[start : start + rows] = np.clip(product, -_LARGEST, _LARGEST)


def _array(vector: Tensor, length: int, what: str) -> NDArray[np.float32]:
    """The numbers of an fp32 CPU vector of that length."""
    if checked_vector(vector).shape[0] != length:
        raise ValueError(f"the {what} has {length} numbers here, got {vector.shape[0]}")
    return vector.detach().numpy()


def _finite(factors: Tensor) -> Tensor:
    if not bool(factors.isfinite().all()):
        raise ValueError("numbers that are not finite, or whose sums are not, have no factors")
    return factors


__all__ = [
    "FactorPlan",
    "Matrix",
    "first_right",
    "left_factors",
    "next_right",
    "orthonormal_basis",
    "projection",
    "restored_vector",
]
