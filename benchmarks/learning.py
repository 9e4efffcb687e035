"""Does the demo learn? Held-out loss against the unigram entropy, the verdict, and what the model writes."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.flat_curves import RUNS, falsely_verified
from benchmarks.node_process import NodeProcess, running_node
from benchmarks.prepared_run import build_data, fix_run
from benchmarks.record import Report, Row
from benchmarks.sizes import size
from neuroshard.model.architecture import architecture_for

MARKS = size((60, 120, 240, 300), (1, 2, 3, 4))  # seconds after the first step
RATE_SECONDS = size(10.0, 0.1)
STILL_SECONDS = size(90, 1)
STILL_RATE = 1e-12  # a run must have a learning rate above 0
PROMPT = "The function returns"


def measure() -> Report:
    """One demo from nothing, five minutes after its first step; then a node that learns next to nothing."""
    with tempfile.TemporaryDirectory() as folder, running_node(Path(folder), [], demo=True) as node:
        node.wait_for_steps(1)
        started = time.monotonic()
        seen = {0: _training(node)}
        verified_at: float | None = None
        texts: dict[int, str] = {}
        for mark in MARKS:
            while time.monotonic() - started < mark:
                time.sleep(1)
                verdict = node.get("/api/training/verify")
                if verified_at is None and verdict["training_verified"]:
                    verified_at = time.monotonic() - started
            seen[mark] = _training(node)
            texts[mark] = _completion(node)
        rate = node.training_rate(RATE_SECONDS)
    _, second, third, last = MARKS
    entropy = float(seen[last]["unigram_entropy"])
    losses = {mark: float(training["held_out"][-1]["loss"]) for mark, training in seen.items()}
    below = {mark: entropy - loss for mark, loss in losses.items()}
    rows = (
        Row("demo: held-out loss at start, 1, 2, 4, 5 minutes", _series(losses), "report", None),
        Row("unigram entropy of the held-out text", f"{entropy:.2f} nats", "report", None),
        Row("below the unigram entropy after 2 minutes", f"{below[second]:.2f} nats", ">= 1.5", below[second] >= 1.5),
        Row("below the unigram entropy after 4 minutes", f"{below[third]:.2f} nats", ">= 2.5", below[third] >= 2.5),
        Row("tokens/s", f"{rate:,.0f}", "report", None),
        Row(
            "`training_verified` turned true after",
            "never" if verified_at is None else f"{verified_at:.0f} s",
            "minutes",
            verified_at is not None,
        ),
        _still_row(),
        *_flat_rows(),
    )
    notes = tuple(f'After {mark} s, "{PROMPT}" goes on: "{text.strip()[:200]}"' for mark, text in texts.items())
    return Report("learning", "The demo learns", rows, notes)


def _flat_rows() -> list[Row]:
    """Simulated runs that learn nothing, without and with noise that all sequences share."""
    rows = list[Row]()
    for shift in (0.0, 0.005):
        share = falsely_verified(shift)
        item = f"{RUNS:,} simulated flat noisy curves, common noise {shift} nats: falsely verified"
        rows.append(Row(item, f"{share:.1%}", "< 1 %", share < 0.01))
    return rows


def _training(node: NodeProcess) -> dict[str, Any]:
    training: dict[str, Any] = node.get("/api/status")["training"]
    return training


def _completion(node: NodeProcess) -> str:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0.5, "seed": 1}
    text: str = node.post("/v1/completions", body)["choices"][0]["text"]
    return text.replace("\n", " ")


def _series(losses: dict[int, float]) -> str:
    return ", ".join(f"{losses[mark]:.2f}" for mark in sorted(losses))


def _still_row() -> Row:
    """A run that cannot learn must not be called verified."""
    with tempfile.TemporaryDirectory() as folder:
        pins, ids = build_data(Path(folder) / "genesis", 2000)
        fix_run(Path(folder) / "node", pins, architecture_for(4, ids, 128), 8, learning_rate=STILL_RATE)
        with running_node(Path(folder) / "node", ["--genesis", str(Path(folder) / "genesis")]) as node:
            node.wait_for_steps(1)
            deadline = time.monotonic() + STILL_SECONDS
            ever = False
            while time.monotonic() < deadline:
                time.sleep(1)
                verdict = node.get("/api/training/verify")
                ever = ever or bool(verdict["training_verified"])
            evaluations = len(_training(node)["held_out"])
    figure = f'{"became true" if ever else "stayed false"}, status "{verdict["status"]}", {evaluations} evaluations'
    item = f"the same with learning rate {STILL_RATE:g}, {STILL_SECONDS} s: `training_verified`"
    return Row(item, figure, "stays false", not ever)
