"""How fast tensors cross a line: the pool and libp2p against one TLS connection, on loopback and on shaped lines."""

from __future__ import annotations

import os
from dataclasses import dataclass
from statistics import median

from benchmarks.bulk_processes import bulk_pair
from benchmarks.record import NotHereError, Report, Row, load_average, mean_with_interval
from benchmarks.shaped_line import FAR_ADDRESS, NoLineError, shaped_line
from benchmarks.sizes import size

PAIRS = int(os.environ.get("BENCHMARK_PAIRS", size(20, 1)))
LOOPBACK_SECONDS = size(1.0, 0.05)
SHAPED_SECONDS = float(os.environ.get("BENCHMARK_SHAPED_SECONDS", size(30, 0.5)))
LINE_MBIT = 100
CUBIC = ("--congestion-control", "cubic")
POOL_GOAL, LIBP2P_GOAL = 0.8, 0.2


@dataclass(frozen=True)
class Condition:
    """A shaped line and what the pool should reach on it."""

    rtt_ms: int
    loss: float
    goal: str
    share_of_single: float = 0.0  # of one TLS connection
    share_of_line: float = 0.0

    @property
    def name(self) -> str:
        """For people."""
        return f"{LINE_MBIT} Mbit/s, {self.rtt_ms} ms, {self.loss:.1%} loss"

    def is_met(self, pool: float, single: float) -> bool:
        """Both in Mbit/s."""
        return pool >= max(self.share_of_single * single, self.share_of_line * LINE_MBIT)


CONDITIONS = tuple(
    condition
    for rtt_ms in (50, 100)
    for condition in (
        Condition(rtt_ms, 0.0, ">= 0.95 of one TLS connection", share_of_single=0.95),
        Condition(rtt_ms, 0.001, f">= {0.65 * LINE_MBIT:.0f} Mbit/s", share_of_line=0.65),
        Condition(rtt_ms, 0.01, ">= 10 x one TLS connection", share_of_single=10),
    )
)[: size(None, 1)]


def measure(line: str) -> Report:
    """The rows of "loopback", or of the "shaped" lines. Raises NotHereError where no shaped line can be made.

    Two results, because the shaped lines take ten minutes.
    """
    if line == "loopback":
        rows, notes = _loopback()
        return Report("loopback_speed", "Tensors over loopback", tuple(rows), tuple(notes))
    rows, notes = list[Row](), list[str]()
    for condition in CONDITIONS:
        try:
            shaped, algorithm = _shaped(condition)
        except NoLineError as error:
            raise NotHereError(str(error)) from error
        rows.append(shaped)
        notes.append(f"{condition.name}: congestion control {algorithm}.")
    return Report("line_speed", "Tensors over a shaped line", tuple(rows), tuple(notes))


def _loopback() -> tuple[list[Row], list[str]]:
    """Interleaved: raw, pool, libp2p, libp2p, pool, raw ..."""
    rates: dict[str, list[float]] = {"raw": [], "pool": [], "libp2p": []}
    with bulk_pair("raw") as raw, bulk_pair("pool") as pool, bulk_pair("libp2p") as libp2p:
        pairs = {"raw": raw, "pool": pool, "libp2p": libp2p}
        for pair in pairs.values():
            pair.send_for(LOOPBACK_SECONDS)
        for turn in range(PAIRS):
            for way in list(pairs)[:: 1 if turn % 2 else -1]:
                rates[way].append(pairs[way].send_for(LOOPBACK_SECONDS).mib_per_second)
        algorithms = f"{raw.congestion_control} and {pool.congestion_control}"
    rows = [
        Row("one TLS connection, loopback, median", f"{median(rates['raw']):.0f} MiB/s", "report", None),
        _ratio_row("pool", rates, POOL_GOAL),
        _ratio_row("libp2p", rates, LIBP2P_GOAL),
    ]
    frames = "frames of 16 MiB, two at a time, hashed on both sides"
    turns = f"{PAIRS} interleaved turns of {LOOPBACK_SECONDS:g} s"
    why = (
        "A MiB costs the pool 1.1 ms of a core where it is sent and 1.2 where it arrives, one TLS connection 0.6 each: "
        "BLAKE3 0.16 each, the memory of each new body 0.2, the event loop and 64 records a MiB the rest. With both "
        "cores full the hashes alone would leave 0.8. By the profiles, a few percent each: wake-ups, 2 a MiB, "
        "and calls a record. With bodies from memory that the allocator keeps (MALLOC_TRIM_THRESHOLD_) it was 0.48."
    )
    return rows, [why, f"Loopback: {turns}, {frames}; congestion control {algorithms}; load average {load_average()}."]


def _ratio_row(way: str, rates: dict[str, list[float]], goal: float) -> Row:
    ratios = [rate / raw for rate, raw in zip(rates[way], rates["raw"], strict=True)]
    mean, half = mean_with_interval(ratios)
    figure = f"{median(ratios):.2f} (mean {mean:.2f} ± {half:.2f}), {median(rates[way]):.0f} MiB/s"
    return Row(f"{way} / one TLS connection, loopback, median", figure, f">= {goal}", median(ratios) >= goal)


def _shaped(condition: Condition) -> tuple[Row, str]:
    with shaped_line(LINE_MBIT, condition.rtt_ms, condition.loss) as line:
        places = {"serve_in": line.inside(line.far), "ask_in": line.inside(line.near)}
        with bulk_pair("raw", CUBIC, FAR_ADDRESS, **places) as raw:
            single = raw.send_for(SHAPED_SECONDS).mbit_per_second
            algorithm = raw.congestion_control
        with bulk_pair("pool", CUBIC, FAR_ADDRESS, **places) as pair:
            cold, warm = (pair.send_for(SHAPED_SECONDS) for _ in range(2))
            algorithm += f" and {pair.congestion_control}"
    pool = warm.mbit_per_second
    figure = (
        f"{pool:.1f} Mbit/s over {warm.connections} ({cold.mbit_per_second:.1f} in the first {cold.seconds:.0f} s); "
        f"one TLS connection {single:.1f}; ratio {pool / single:.2f}"
    )
    return Row(f"pool, {condition.name}", figure, condition.goal, condition.is_met(pool, single)), algorithm
