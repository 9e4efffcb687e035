"""What must hold on every machine: the same bits with other kernels and threads, and little memory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from neuroshard.aggregation import (
    AggregatorConfig,
    CentredClipping,
    Krum,
    Mean,
    Median,
    MemberFacts,
    SliceRows,
    TrimmedMean,
    judge_statistics,
    reduce_slice,
    reduction_by,
    slice_statistics,
    statistics_bytes,
    sum_statistics,
)
from neuroshard.host.computer import peak_megabytes

CONFIGS: tuple[AggregatorConfig, ...] = (Mean(), Median(), TrimmedMean(0.25), Krum(), CentredClipping())


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


def facts_of(count: int) -> MemberFacts:
    """Every fourth member is not established, and each has done other work."""
    work = tuple(100.0 + row for row in range(count))
    return MemberFacts(work, tuple(row % 4 != 0 for row in range(count)), tuple(range(count)))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def print_digests(threads: int) -> None:
    """Of statistics, verdict and every aggregate of the same contributions, one per line."""
    torch.set_num_threads(threads)
    for count, length in ((7, 60_001), (40, 9_000)):  # by the network, and by numpy's sort
        rows = contributions(count, length)
        whole = SliceRows.of(rows)
        total = slice_statistics(whole, with_gram=True)
        verdict = judge_statistics(total)
        lines = [digest(statistics_bytes(total)), str(verdict)]
        facts = facts_of(count)
        mixed = slice_statistics(whole, with_gram=True, established=facts.established)
        for with_others, sums, judged in (
            (False, total, verdict),
            (True, mixed, judge_statistics(mixed, facts)),
        ):
            for config in CONFIGS:
                aggregate = reduce_slice(whole, reduction_by(config, sums, judged, tolerated=1))
                lines.append(f"{config} {with_others} {digest(aggregate.numpy().tobytes())}")
        sys.stdout.write("\n".join(lines) + "\n")


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
    total = sum_statistics([slice_statistics(one.rows, with_gram=count >= 8) for one in slices])
    reduction = reduction_by(TrimmedMean(), total, judge_statistics(total))
    results: list[np.ndarray[tuple[int], np.dtype[np.generic]]] = []
    for one in slices:
        aggregate = reduce_slice(one.rows, reduction).numpy()
        results.append(aggregate.astype(np.int8) if codec == "int8" else aggregate)


def print_peak(codec: str, count: int) -> None:
    """Peak memory of a reducer of a round, in fp32 contributions.

    A reducer of n members holds the encoded numbers of all of them for 2 / n of the vector, and the encoded result that
    it made of them; it works on one slice at a time.
    """
    torch.set_num_threads(1)
    warm = Slice(codec, count, 9 * BLOCK, 0)
    total = slice_statistics(warm.rows, with_gram=count >= 8)
    reduce_slice(warm.rows, reduction_by(TrimmedMean(), total, judge_statistics(total)))
    before = peak_megabytes()
    reduce_all(codec, count)
    sys.stdout.write(f"{(peak_megabytes() - before) * 1e6 / (4 * LENGTH)}\n")


def output_of(*arguments: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, __file__, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
    ).stdout


@pytest.mark.process
def test_neither_kernels_nor_threads_change_a_bit() -> None:
    plain = output_of("1", ATEN_CPU_CAPABILITY="default")
    assert len(plain.splitlines()) == 24
    for kernels, threads in (("default", "4"), ("avx2", "2"), ("avx512", "1")):
        assert output_of(threads, ATEN_CPU_CAPABILITY=kernels) == plain, (kernels, threads)


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of resident memory is read from /proc")
@pytest.mark.parametrize(
    ("codec", "most", "count"),
    [
        ("int8", 1.3, "32"),
        ("fp32", 3.3, "2"),
        pytest.param("int8", 1.3, "2", marks=pytest.mark.long),
        pytest.param("fp32", 3.3, "32", marks=pytest.mark.long),
    ],
)
def test_a_reducer_stays_within_its_memory(codec: str, most: float, count: str) -> None:
    assert 0.2 < float(output_of(codec, count)) < most


if __name__ == "__main__":
    print_peak(sys.argv[1], int(sys.argv[2])) if len(sys.argv) == 3 else print_digests(int(sys.argv[1]))
