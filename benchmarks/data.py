"""Tokenizer and batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from benchmarks.record import NotHereError, Report, Row
from benchmarks.sizes import size
from benchmarks.texts import real_texts
from neuroshard.data.tokenizer import Tokenizer, TokenizerTable, learn_merges
from neuroshard.data.windows import gather_windows, window_count, window_key, window_order
from neuroshard.types import NodeId, RunId, ShardId

MERGES = size(31_734, 300)
SHARD_TOKENS = size(2_500_000, 50_000)


def measure() -> Report:
    """Skips the text figures when the shared text is not there."""
    rows: list[Row] = []
    notes: list[str] = []
    try:
        texts = [text.decode(errors="replace") for text in real_texts()]
    except NotHereError as error:
        notes.append(f"Tokenizer figures were not measured: {error}.")
    else:
        size_mb = sum(len(text.encode()) for text in texts) / 1e6
        learn_seconds, table = _cpu_seconds(lambda: learn_merges(texts, MERGES, source="text"))
        rows.append(
            Row(
                f"learn {MERGES:,} merges on {size_mb:.0f} MB",
                f"{learn_seconds:.1f} CPU-s",
                "<= 40",
                learn_seconds <= 40,
            )
        )
        rate = median(_encode_rate(table, texts) for _ in range(3))
        rows.append(Row("tokenise, one core", f"{rate:.1f} MB/s", ">= 5", rate >= 5))
    tokens_per_second = _batch_rate()
    rows.append(Row("batches", f"{tokens_per_second / 1e6:.0f} M tokens/s", ">= 100", tokens_per_second >= 100e6))
    return Report("data", "Data", tuple(rows), tuple(notes))


def _cpu_seconds(work: Callable[[], TokenizerTable]) -> tuple[float, TokenizerTable]:
    start = time.process_time()
    value = work()
    return time.process_time() - start, value


def _encode_rate(table: TokenizerTable, texts: list[str]) -> float:
    """MB/s of CPU time over all texts, encoder ready."""
    tokenizer = Tokenizer(table)
    tokenizer.encode("ready")
    start = time.process_time()
    for text in texts:
        tokenizer.encode(text, bos=True, eos=True)
    return sum(len(text.encode()) for text in texts) / 1e6 / (time.process_time() - start)


def _batch_rate(length: int = 512, batch: int = 4) -> float:
    """Tokens a second of cutting batches out of a cached shard, labels included."""
    tokens = np.arange(SHARD_TOKENS, dtype=np.uint16)
    windows = window_count(len(tokens), length)
    order = window_order(window_key(RunId("a" * 64), NodeId("node"), ShardId(0)), windows)
    start = time.perf_counter()
    count = 0
    for first in range(0, windows - batch, batch):
        gather_windows(tokens, order, first, batch, length)
        count += batch * length
    return count / (time.perf_counter() - start)
