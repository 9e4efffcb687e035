"""Which tensors of a vector travel as factors, and where everything is. A matter of shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

LARGEST_SHARE = 0.5  # of a matrix's numbers that its factors may have: with more of them it goes as it is
_Number = TypeVar("_Number", np.float32, np.float64)
Rows: TypeAlias = NDArray[_Number]


@dataclass(frozen=True)
class Matrix:
    """A matrix (rows, columns) that lies at `start` of the vector."""

    start: int
    rows: int
    columns: int

    def of(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        """The matrix inside a vector (d,), sharing its memory."""
        return vector[self.start : self.start + self.rows * self.columns].reshape(self.rows, self.columns)


@dataclass(frozen=True)
class FactorPlan:
    """The matrices of a vector (d,) that have factors of this rank, and the ranges between them.

    Factors lie one column after another, as (rank, rows) and (rank, columns), matrix after matrix: `left_length` and
    `right_length` numbers. Raises ValueError for a rank or a vector of nothing.
    """

    length: int  # d
    rank: int
    matrices: tuple[Matrix, ...]

    def __post_init__(self) -> None:
        if self.rank < 1 or self.length < 1:
            raise ValueError(f"factors need a rank and a vector, got rank {self.rank} and {self.length} numbers")

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], rank: int) -> FactorPlan:
        """For tensors of these shapes, one after another. Of one with more than two sizes the first counts as rows."""
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
        """Numbers that travel as they are."""
        return self.length - sum(matrix.rows * matrix.columns for matrix in self.matrices)

    @property
    def projection_length(self) -> int:
        """Numbers of the second phase: the plain ones, then all Q."""
        return self.plain_length + self.right_length

    def plain(self) -> Iterator[tuple[slice, slice]]:
        """Where the plain numbers are: in the vector, and in a projection."""
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
        """Of every matrix its part (rank, columns) of `right_length` numbers, sharing their memory."""
        start = 0
        for matrix in self.matrices:
            size = self.rank * matrix.columns
            yield factors[start : start + size].reshape(self.rank, matrix.columns)
            start += size
