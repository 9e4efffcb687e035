"""Orthonormal rows, the same bits on every machine: modified Gram-Schmidt in float64, in a fixed order."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

UNIT_BITS = 24  # the rows' numbers are multiples of 2^-24: fp32 has each of them, and sums of products can be exact
_DEPENDENT = 2.0**-23  # what is left of a row beside the others, relative to it, is fp32's rounding below this
Doubles: TypeAlias = NDArray[np.float64]


def orthonormal(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows (k, n) whose span is that of the given ones, each of length 1 and orthogonal to the others within 2^-20.

    A row that the rows before it span already, one of zeros and one with a number that is not finite have no direction
    of their own: they become zeros. Products, sums, quotients and roots are separate operations on single numbers, and
    sums are made by halving, so that no kernel and no number of threads changes a bit.
    """
    found = rows.astype(np.float64)
    found[~np.isfinite(found).all(axis=1)] = 0.0
    _orthogonalise(found, _DEPENDENT)
    _orthogonalise(found, 0.5)  # once more: what rounding left of the first pass (Giraud et al. 2005)
    return (np.rint(found * 2.0**UNIT_BITS) / 2.0**UNIT_BITS).astype(np.float32)


def _orthogonalise(rows: Doubles, smallest: float) -> None:
    """One pass in place; a row of which less than `smallest` is left becomes zeros."""
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
    """Sums (k,) of the rows of (k, n), which is used up: the upper half is added to the lower one until one is left."""
    count = terms.shape[1]
    while count > 1:
        lower = (count + 1) // 2
        np.add(terms[:, : count - lower], terms[:, lower:count], out=terms[:, : count - lower])
        count = lower
    return terms[:, 0].copy()
