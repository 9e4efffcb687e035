"""Two processes that agree on parts of the weights, or on gradients.

`tests/training` shows the same of all strategies in memory, and of averaging in pipelines too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.node_process import NodeProcess
from tests.worlds.processes import made, nodes_of, until

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(400)]

AVERAGING = """
strategy = "averaging"
aggregator = "mean"
codec = "fp32"
averager_rank = 4
averaging_target_batch_size = 40
"""
SHAPE = "batch_size = 1\nsequences_per_step = 1\narchitecture = { depth = 2, sequence_length = 64 }\n"


def note_root(node: NodeProcess, roots: dict[int, str]) -> None:
    """Remember the node's root by its outer step, after rounds of several members."""
    diloco = node.get("/api/status")["diloco"]
    if diloco["state_root"] and diloco["members"] > 1:
        roots[diloco["outer_steps"]] = diloco["state_root"]


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ('strategy = "streaming"\ninner_steps = 80\n', ("a quarter of the weights", "quarter")),
        (AVERAGING, ("a gradient", "gradient, phase")),
    ],
    ids=["streaming", "averaging"],
)
def test_two_nodes_hold_the_same_anchor_after_rounds_about_parts(
    small_genesis: Path, quick: list[str], tmp_path: Path, scheme: str, words: tuple[str, str]
) -> None:
    run = made(scheme + SHAPE, small_genesis, tmp_path)
    with nodes_of(run, quick, tmp_path) as start:
        owner = start(0)
        owner.wait_for_steps(20)  # a round of a node alone
        status = owner.wait_for("address", lambda status: bool(status["network"]["addresses"]))
        joiner = start(1, status["network"]["addresses"][0])
        joiner.wait_for("a round", lambda status: status["diloco"]["members"] > 1)
        roots: list[dict[int, str]] = [{}, {}]

        def have_agreed() -> bool:
            for node, found in zip((owner, joiner), roots, strict=True):
                note_root(node, found)
            return len(roots[0].keys() & roots[1].keys()) > 2

        until("rounds about parts", have_agreed)
        assert all(roots[0][step] == roots[1][step] for step in roots[0].keys() & roots[1].keys())
        explanation, part_begins = words
        for node in (owner, joiner):
            assert explanation in node.get("/api/status")["diloco"]["explanation"]
            told = {(one["strategy"], one["part"]) for one in node.get("/api/rounds")["rounds"]}
            assert len(told) > 1
            assert all(strategy in scheme and part.startswith(part_begins) for strategy, part in told)
