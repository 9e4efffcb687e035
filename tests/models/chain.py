"""Explore the model of the chain: `python -m tests.models.chain` (seconds) or `--full` (the stated bounds, minutes)."""

from __future__ import annotations

import argparse
import sys
import time

from tests.models.chain_rounds import Boundary, Bounds, Report, explore, start
from tests.models.chain_rules import Rules
from tests.models.chain_schedules import explore_schedules

SMALL, FULL = Bounds(heights=2, faults_per_run=2), Bounds()
FEW, MANY = 300, 10_000


def starts() -> list[Boundary]:
    """Foundations of friends with one to four seats, and of strangers with and without a liar."""
    friends = [start("H" * seats, friends=True) for seats in range(1, 5)]
    return friends + [start(kinds, friends=False) for kinds in ("H", "HHH", "HHHH", "HHHL")]


def explore_all(bounds: Bounds) -> Report:
    """The exhaustive exploration of the proposed rules."""
    return explore(Rules(), starts(), bounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the stated bounds and 10,000 schedules")
    full = parser.parse_args().full
    began = time.process_time()
    report = explore_all(FULL if full else SMALL)
    trace = "".join(f"  {line}\n" for line in report.trace)
    sys.stdout.write(
        f"exhaustive: {report.states} states of heights ({report.unfolded} unfolded),\n"
        f"  {report.transitions} transitions, {report.boundaries} states between heights, "
        f"{time.process_time() - began:.0f} s of CPU; "
        f"{report.violation or 'no violation'}\n{trace}"
    )
    began = time.process_time()
    summary = explore_schedules(Rules(), range(MANY if full else FEW))
    found = f"{summary.violation} (seed {summary.seed})" if summary.violation else "no violation"
    seen = ", ".join(f"{count} {name}" for name, count in sorted(summary.seen.items()))
    sys.stdout.write(
        f"random: {summary.schedules} schedules, {time.process_time() - began:.0f} s of CPU; {found}\n  {seen}\n"
    )
    return bool(report.violation or summary.violation)


if __name__ == "__main__":
    raise SystemExit(main())
