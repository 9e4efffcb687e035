"""How fast contributions are encoded and decoded on one core, and what the codecs lose of a random vector."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.record import Report, Row
from benchmarks.sizes import size
from neuroshard.compression import Codec, make_codec

NUMBERS, REPEATS, GOAL = size(25_000_000, 25_000), size(9, 1), 1.0


def measure() -> Report:
    """Every codec on the same vector of 100 MB, by its fastest repeat."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        vector = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(1))
        rows = [row for name in ("int4", "int8", "bf16", "fp32") for row in _rows(make_codec(name), vector)]
    finally:
        torch.set_num_threads(before)
    note = f"GB/s of fp32 numbers, {NUMBERS:,} of them, by the CPU time of one thread, the least of {REPEATS}."
    return Report("codecs", "Encoding contributions", tuple(rows), (note,))


def _rows(codec: Codec, vector: torch.Tensor) -> list[Row]:
    data, out = codec.encode(vector), torch.empty_like(vector)
    codec.decode_range(data, 0, NUMBERS, NUMBERS, out=out)
    lost = ((out - vector).norm() / vector.norm()).item()
    rates = {
        "encode": _rate(vector, lambda: codec.encode(vector)),
        "decode": _rate(vector, lambda: codec.decode_range(data, 0, NUMBERS, NUMBERS, out=out)),
    }
    return [
        *(
            Row(f"{codec.name}, {kind}", f"{rate:.1f} GB/s", f">= {GOAL:g}", rate >= GOAL)
            for kind, rate in rates.items()
        ),
        Row(f"{codec.name}, bytes; error / norm", f"{len(data) / vector.nbytes:.4f}; {lost:.1e}", "report", None),
    ]


def _rate(vector: torch.Tensor, work: Callable[[], object]) -> float:
    seconds: list[float] = []
    for _ in range(REPEATS):
        started = time.thread_time()  # all of it is arithmetic of this thread, whoever else wants the core
        work()
        seconds.append(time.thread_time() - started)
    return vector.nbytes / min(seconds) / 1e9
