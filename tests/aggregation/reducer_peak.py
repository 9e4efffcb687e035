"""Run as a script: does what a reducer of a round does, and prints its peak memory in fp32 contributions.

`python reducer_peak.py CODEC COUNT`. A reducer of n members holds the encoded numbers of all of them for 2 / n of the
vector, and of what it made the encoded result; it lives beside a slice at a time.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from neuroshard.aggregation import (
    SliceRows,
    TrimmedMean,
    judge_statistics,
    reduce_slice,
    reduction_by,
    slice_statistics,
    sum_statistics,
)
from neuroshard.host.computer import peak_megabytes

LENGTH = 1 << 23  # numbers of a contribution: 32 MiB in fp32
SLICES = 64
BLOCK = 4096


class Slice:
    """The encoded contributions to one slice; int8 with a scale a block, or fp32."""

    def __init__(self, codec: str, count: int, length: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.length = length
        self._scales = generator.uniform(0.5, 1.5, (count, -(-length // BLOCK))).astype(np.float32)
        if codec == "int8":
            self._numbers = generator.integers(-20, 128, (count, length), dtype=np.int8)
        else:
            self._numbers = generator.random((count, length), dtype=np.float32)

    def decode(self, row: int, start: int, stop: int, out: torch.Tensor) -> None:
        out.copy_(torch.from_numpy(self._numbers[row, start:stop]))
        for block in range(start // BLOCK, -(-stop // BLOCK)):
            first = block * BLOCK - start
            out[first : first + BLOCK].mul_(float(self._scales[row, block]))

    @property
    def rows(self) -> SliceRows:
        return SliceRows(len(self._numbers), self.length, self.decode)


def reduce_all(codec: str, count: int) -> None:
    share = min(LENGTH, LENGTH * 2 // count)
    size = -(-LENGTH // SLICES // BLOCK) * BLOCK
    slices = [Slice(codec, count, min(size, share - start), start) for start in range(0, share, size)]
    total = sum_statistics([slice_statistics(one.rows) for one in slices])
    reduction = reduction_by(TrimmedMean(), total, judge_statistics(total))
    results: list[np.ndarray[tuple[int], np.dtype[np.generic]]] = []
    for one in slices:
        aggregate = reduce_slice(one.rows, reduction).numpy()
        results.append(aggregate.astype(np.int8) if codec == "int8" else aggregate)


def main() -> None:
    torch.set_num_threads(1)
    codec, count = sys.argv[1], int(sys.argv[2])
    warm = Slice(codec, count, 9 * BLOCK, 0)
    total = slice_statistics(warm.rows)
    reduce_slice(warm.rows, reduction_by(TrimmedMean(), total, judge_statistics(total)))
    before = peak_megabytes()
    reduce_all(codec, count)
    sys.stdout.write(f"{(peak_megabytes() - before) * 1e6 / (4 * LENGTH)}\n")


if __name__ == "__main__":
    main()
