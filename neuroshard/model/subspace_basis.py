"""The orthonormal basis U of a run's subspace, with the same bytes on every machine, from the bits of a counter.

It does not load PyTorch. The bits come from Philox4x32-10 (Salmon et al. 2011) in integers of 64 bits. The same
operations on tensors give the same bits on any device.
"""

from __future__ import annotations

from hashlib import sha256
from math import sqrt
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from neuroshard.identity import hash_parts

Words = TypeVar("Words")
"""An array or a tensor of int64 with words of 32 bits."""
Key = tuple[int, int]
"""Two words of 32 bits."""

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57  # of the first and the third word
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
HALF = 1 << 23  # centres the upper 24 bits of a word
SCALE = float(np.float32(sqrt(3) / HALF))  # gives a standard deviation of 1
AT_ONCE = 1 << 13  # numbers of one operation: they fit into the processor's cache, and one thread computes them
_BASIS_WORD = 1  # third word of the counters of U; those of the frozen rows have 0


def philox(counter: tuple[Words, Words, Words, Words], key: Key) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10: four random words for each counter of four words."""
    first, second, third, fourth = cast("tuple[Any, Any, Any, Any]", counter)
    for number in range(_ROUNDS):
        of_first, of_second = ((word + number * step) & _WORD for word, step in zip(key, _KEY_STEPS, strict=True))
        high_first, low_first = _product(first, _MULTIPLIERS[0])
        high_third, low_third = _product(third, _MULTIPLIERS[1])
        first, second = high_third ^ second ^ of_first, low_third
        third, fourth = high_first ^ fourth ^ of_second, low_first
    return first, second, third, fourth


def _product(words: Any, multiplier: int) -> tuple[Any, Any]:
    """High and low 32 bits of words x multiplier, in halves of it, because 64 bits would overflow int64."""
    low = words * (multiplier & 0xFFFF)
    total = words * (multiplier >> 16) + (low >> 16)
    return total >> 16, ((total & 0xFFFF) << 16) | (low & 0xFFFF)


def subspace_key(seed: int) -> Key:
    """The key of a run's U and frozen rows; `seed` is that of its initial weights."""
    digest = hash_parts("neuroshard/subspace", seed)
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def subspace_basis(width: int, rank: int, seed: int) -> NDArray[np.float32]:
    """U (width, rank) with orthonormal columns.

    The columns are drawn uniformly, entry (i, j) from word j % 4 of the counter (j // 4, i, 1, 0). Modified
    Gram-Schmidt follows, twice, in float64. Every operation is element-wise, so that no library chooses an order.
    """
    padded = 1 << (width - 1).bit_length()
    columns = np.zeros((rank, padded))  # each in a row, with zeros at its end
    columns[:, :width] = _drawn(width, rank, seed).T
    at_once = max(1, AT_ONCE // padded)
    for _ in range(2):
        for index in range(rank):
            columns[index] /= np.sqrt(_sums(columns[index] * columns[index]))
            for start in range(index + 1, rank, at_once):
                rest = columns[start : start + at_once]
                rest -= columns[index] * _sums(columns[index] * rest)
    return np.ascontiguousarray(columns[:, :width].T, np.float32)


def _drawn(width: int, rank: int, seed: int) -> NDArray[np.float32]:
    columns, rows = np.meshgrid(np.arange(-(-rank // 4)), np.arange(width))
    words = philox((columns, rows, np.full_like(rows, _BASIS_WORD), np.zeros_like(rows)), subspace_key(seed))
    drawn = np.stack(words, -1).reshape(width, -1)[:, :rank]
    return ((drawn >> 8) - HALF).astype(np.float32) * np.float32(SCALE)


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums of rows (..., n) -> (..., 1): the second half is added to the first until one is left; n is 2^i."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values


def basis_sha256(basis: NDArray[np.float32]) -> str:
    """Hex digest of the bytes of U, row by row, little-endian."""
    return sha256(basis.astype("<f4").tobytes()).hexdigest()
