"""Run as a script: prints digests of statistics, verdict and every aggregate of the same contributions, a line each.

`python bit_identity.py THREADS`. The lines must not depend on the number of threads or on ATEN_CPU_CAPABILITY.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import torch

from neuroshard.aggregation import (
    AggregatorConfig,
    CentredClipping,
    Krum,
    Mean,
    Median,
    MultiKrum,
    SliceRows,
    TrimmedMean,
    judge_statistics,
    reduce_slice,
    reduction_by,
    slice_statistics,
    statistics_bytes,
)

CONFIGS: tuple[AggregatorConfig, ...] = (Mean(), Median(), TrimmedMean(0.25), Krum(), MultiKrum(), CentredClipping())


def contributions(count: int, length: int) -> torch.Tensor:
    """From numpy's generator, whose numbers depend on no kernel: magnitudes from 1e-12 to 1e3, zeros of both signs."""
    generator = np.random.default_rng(5)
    common = generator.random(length, dtype=np.float32) - np.float32(0.5)
    rows = generator.random((count, length), dtype=np.float32) - np.float32(0.5) + 2 * common
    rows *= np.float32(2.0) ** generator.integers(-40, 10, length).astype(np.float32)
    rows[:, ::97] = 0.0
    rows[1::2, ::97] = -0.0
    rows[2] *= 3  # is clipped
    rows[3, 5] = np.nan  # is refused
    return torch.from_numpy(rows)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    for count, length in ((7, 60_001), (40, 9_000)):  # by the network, and by numpy's sort
        rows = contributions(count, length)
        whole = SliceRows.of(rows)
        total = slice_statistics(whole, with_gram=True)
        verdict = judge_statistics(total)
        lines = [digest(statistics_bytes(total)), str(verdict)]
        for config in CONFIGS:
            aggregate = reduce_slice(whole, reduction_by(config, total, verdict, tolerated=1))
            lines.append(f"{config} {digest(aggregate.numpy().tobytes())}")
        sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
