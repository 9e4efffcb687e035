"""Trimmed mean and median of many contributions, against a plain torch.sort and against ByzFL, in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.record import Report, Row, mean_with_interval
from benchmarks.sizes import size

COUNT, LENGTH = 8, size(10_000_000, 10_000)
BYZFL_COUNT, BYZFL_LENGTH = 16, 2_500_000
PAIRS = int(os.environ.get("BENCHMARK_PAIRS", size(10, 1)))
RULES = size(("trimmed mean", "median"), ("median",))
BYZFL = "BENCHMARK_BYZFL"
Form = Callable[[], Any]


def measure() -> Report:
    """Each comparison in a process of its own. $BENCHMARK_BYZFL is a wheel of ByzFL 0.0.11, or a folder with it."""
    rows: list[Row] = []
    for rule in RULES:
        facts = _in_process("sort", rule)
        rows.append(_speed_row(f"{rule} of {COUNT} x 10 M fp32: torch.sort / here", facts, 4))
        rows.append(_seconds_row(rule, facts, "torch.sort"))
        ours, plain = (_in_process("peak", rule, form)["megabytes"] for form in ("here", "torch.sort"))
        item = f"{rule}: memory beside the contributions, here / torch.sort"
        rows.append(Row(item, f"{ours / plain:.3f} ({ours} MB, {plain} MB)", "< 0.25", ours < 0.25 * plain))
    notes = ["torch.sort: `rows.sort(dim=0).values[k : n - k].mean(dim=0)`; here: `reduce_slice`, sums in float64."]
    if os.environ.get(BYZFL):
        for rule in RULES:
            facts = _in_process("ByzFL", rule)
            name = f"{rule} of {BYZFL_COUNT} x 2.5 M fp32: ByzFL 0.0.11 / here"
            rows += [_speed_row(name, facts, 5), _seconds_row(rule, facts, "ByzFL")]
        notes.append(
            "Of 16 rows 4 are trimmed at either end: a network of 52 comparators, whose minima and maxima are as fast "
            "as the second-level cache gives the rows, on one thread; sorting in smaller pieces costs more in calls."
        )
        notes.append("ByzFL gets numpy arrays or tensors, whichever it is faster with; medians of tensors it refuses.")
    else:
        notes.append(f"ByzFL was not run: {BYZFL} names no wheel and no folder that has it.")
    rows.append(_round_row(_in_process("round", "all")))
    notes.append(f"{PAIRS} interleaved pairs each; two threads wherever a library uses them.")
    return Report("aggregation", "Robust aggregation", tuple(rows), tuple(notes))


def _speed_row(item: str, facts: dict[str, Any], goal: int) -> Row:
    mean, half = mean_with_interval([other / ours for ours, other in facts["pairs"]])
    return Row(f"{item}, {len(facts['pairs'])} pairs", f"{mean:.1f} ± {half:.1f} (95 %)", f">= {goal}", mean >= goal)


def _seconds_row(rule: str, facts: dict[str, Any], other: str) -> Row:
    here, there = (median(pair[i] for pair in facts["pairs"]) for i in (0, 1))
    megabytes = facts["bytes"] / 1e6
    figure = f"{here:.2f} s ({megabytes / here:,.0f} MB/s), {there:.2f} s ({megabytes / there:,.0f} MB/s)"
    return Row(f"{rule}: here, {other}", figure, "report", None)


def _round_row(facts: dict[str, Any]) -> Row:
    figure = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in facts["seconds"].items())
    return Row(f"{COUNT} x 10 M fp32", figure, "report", None)


def _in_process(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.aggregation", *arguments]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def _pairs(ours: Form, other: Form, pairs: int) -> list[tuple[float, float]]:
    """Seconds of both, in turns; which of them begins changes."""
    ours()
    other()
    timed: list[tuple[float, float]] = []
    for number in range(pairs):
        order = (ours, other) if number % 2 == 0 else (other, ours)
        seconds = {form: _seconds(form) for form in order}
        timed.append((seconds[ours], seconds[other]))
    return timed


def _seconds(form: Form) -> float:
    begun = time.perf_counter()
    form()
    return time.perf_counter() - begun


def _forms(rule: str, count: int, length: int) -> tuple[Any, int, dict[str, Form]]:
    """The contributions (count, length), how many are trimmed at either end, and both ways to reduce them."""
    import torch

    from neuroshard.aggregation import MiddleMean, SliceRows, reduce_slice, trim_count

    rows = torch.randn(count, length, generator=torch.Generator().manual_seed(1))
    trim = trim_count(count, 0.25) if rule == "trimmed mean" else (count - 1) // 2
    reduction = MiddleMean.of_equals(count, trim)
    forms: dict[str, Form] = {
        "here": lambda: reduce_slice(SliceRows.of(rows), reduction),
        "torch.sort": lambda: rows.sort(dim=0).values[trim : count - trim].mean(dim=0),
    }
    return rows, trim, forms


def _against_sort(rule: str) -> dict[str, Any]:
    import torch

    rows, _, forms = _forms(rule, COUNT, LENGTH)
    torch.testing.assert_close(forms["here"](), forms["torch.sort"](), rtol=1e-5, atol=1e-6)
    return {"pairs": _pairs(forms["here"], forms["torch.sort"], PAIRS), "bytes": rows.nbytes}


def _against_byzfl(rule: str) -> dict[str, Any]:
    import numpy as np

    from benchmarks.byzfl_aggregators import byzfl_aggregators

    rows, trim, forms = _forms(rule, BYZFL_COUNT, BYZFL_LENGTH)
    aggregators = byzfl_aggregators(os.environ[BYZFL])
    aggregate = aggregators.TrMean(trim) if rule == "trimmed mean" else aggregators.Median()
    array = rows.numpy()
    np.testing.assert_allclose(forms["here"](), aggregate(array), rtol=1e-5, atol=1e-6)
    others: list[Form] = [lambda: aggregate(array)]
    if rule == "trimmed mean":  # torch.quantile, its median, takes no more than 16 M numbers
        others.append(lambda: aggregate(rows))
    fastest = min(others, key=_seconds)
    return {"pairs": _pairs(forms["here"], fastest, PAIRS), "bytes": rows.nbytes}


def _peak(rule: str, form: str) -> dict[str, Any]:
    from neuroshard.host.computer import peak_megabytes

    _, _, forms = _forms(rule, COUNT, LENGTH)
    before = peak_megabytes()
    forms[form]()
    return {"megabytes": max(1, peak_megabytes() - before)}


def _whole_round() -> dict[str, Any]:
    import torch

    from neuroshard.aggregation import (
        Mean,
        SliceRows,
        TrimmedMean,
        judge_statistics,
        reduce_slice,
        reduction_by,
        slice_statistics,
    )

    rows = torch.randn(COUNT, LENGTH, generator=torch.Generator().manual_seed(1)).add_(1)
    whole = SliceRows.of(rows)
    total = slice_statistics(whole, with_gram=True)
    verdict = judge_statistics(total)
    reduction = reduction_by(Mean(), total, verdict)
    clusters = tuple(replace(one, weight=100.0 + one.rows[0]) for one in verdict.clusters)
    weighted = reduction_by(TrimmedMean(0.25), total, replace(verdict, clusters=clusters))
    return {
        "seconds": {
            "statistics": _seconds(lambda: slice_statistics(whole)),
            "statistics with Gram matrix (near-copies, Krum, centred clipping)": _seconds(
                lambda: slice_statistics(whole, with_gram=True)
            ),
            "weighted sum of clipped rows": _seconds(lambda: reduce_slice(whole, reduction)),
            "trimmed mean of clipped rows with different weights": _seconds(lambda: reduce_slice(whole, weighted)),
        }
    }


def _main(comparison: str, rule: str, *rest: str) -> dict[str, Any]:
    match comparison:
        case "sort":
            return _against_sort(rule)
        case "ByzFL":
            return _against_byzfl(rule)
        case "peak":
            return _peak(rule, *rest)
        case _:
            return _whole_round()


if __name__ == "__main__":
    print(json.dumps(_main(*sys.argv[1:])))
