"""The contributions to one slice of the vector, decoded a few columns at a time: memory stays small at any length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from neuroshard.aggregation.sums import BLOCK

_DECODED_AT_ONCE = 1 << 20  # numbers of all rows together: beginning to decode costs something, too
VALUES_AT_ONCE = 1 << 18  # that stay in a core's own cache


@dataclass(frozen=True)
class SliceRows:
    """n contributions to one slice of `length` numbers.

    `decode(row, start, stop, out)` writes the numbers [start, stop) of a row into `out` (stop - start,) fp32. `start`
    is a multiple of 4,096, and so is `stop` unless it is the length. What it raises, whoever reads the rows raises.
    """

    count: int
    length: int
    decode: Callable[[int, int, int, Tensor], object]

    def __post_init__(self) -> None:
        if self.count < 1 or self.length < 1:
            raise ValueError(f"a slice has contributions and numbers, not {self.count} and {self.length}")

    @classmethod
    def of(cls, rows: Tensor) -> SliceRows:
        """Rows (n, d) that lie in memory."""
        if rows.dim() != 2 or rows.numel() == 0 or rows.dtype != torch.float32 or rows.device.type != "cpu":
            raise ValueError(f"contributions must be fp32 of shape (n, d) on the CPU, got {tuple(rows.shape)}")
        numbers = rows.detach().numpy()  # PyTorch would share the copying among threads, which wait for each other

        def decode(row: int, start: int, stop: int, out: Tensor) -> None:
            np.copyto(out.numpy(), numbers[row, start:stop])

        return cls(rows.shape[0], rows.shape[1], decode)

    def chunks(self, among: tuple[int, ...], values_at_once: int = VALUES_AT_ONCE) -> Iterator[tuple[int, Tensor]]:
        """The rows of these numbers, some columns at a time: (first column, (rows, columns) fp32).

        Every chunk overwrites the one before. The columns of the last one are filled up to whole blocks with zeros.
        """
        most = -(-self.length // BLOCK)
        decoded, given = (
            BLOCK * min(max(1, values // (BLOCK * len(among))), most) for values in (_DECODED_AT_ONCE, values_at_once)
        )
        buffer = torch.empty(len(among), decoded)
        for start in range(0, self.length, decoded):
            width = min(decoded, self.length - start)
            padded = -(-width // BLOCK) * BLOCK
            for place, row in enumerate(among):
                self.decode(row, start, start + width, buffer[place, :width])
            buffer[:, width:padded].zero_()
            for first in range(0, padded, given):
                yield start + first, buffer[:, first : min(first + given, padded)]
