"""Versions of a run as its owner signs them beside a running node: each takes force with its outer step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node_process import NodeProcess, running_node
from tests.worlds import processes
from tests.worlds.processes import Run

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

INNER_STEPS = 10
RATES = (1e-3, 5e-4, 2e-4)  # of versions 1, 2 and 3
RUN = (
    f'name = "friends"\ninner_lr = {RATES[0]}\nschedule = "constant"\nwarmup_steps = 0\ninner_steps = {INNER_STEPS}\n'
    "batch_size = 1\nsequences_per_step = 1\narchitecture = { depth = 2, sequence_length = 64 }\n"
)


def neuroshard(*arguments: object) -> str:
    """What a command of the run's owner printed, which ended well."""
    ran = processes.neuroshard(*arguments)
    assert ran.code == 0, ran.err
    return ran.out


def sign_version(folder: Path, run_id: str, rate: float, start: int) -> str:
    """What the owner types to change the learning rate from an outer step on."""
    (folder / "later.toml").write_text(f"inner_lr = {rate}\nholds_from_outer_step = {start}\n")
    where = ("--data-dir", folder / "owner", "--out", folder / "signed.json")
    return neuroshard("run", "create", "--config", folder / "later.toml", "--update", run_id, *where)


def is_logged(node: NodeProcess, text: str) -> bool:
    return any(text in line["message"] for line in node.get("/api/logs?after=0")["records"])


def rates_of(node: NodeProcess) -> dict[int, float]:
    """Learning rate of each outer step's inner steps; all of them must have used the same."""
    points: list[dict[str, Any]] = node.get("/api/training/history")["points"]
    rates: dict[int, set[float]] = {}
    for point in points:
        rates.setdefault((point["step"] - 1) // INNER_STEPS, set()).add(point["lr"])
    assert all(len(used) == 1 for used in rates.values()), rates
    return {outer_step: used.pop() for outer_step, used in rates.items()}


@pytest.mark.long
def test_versions_take_force_with_their_outer_steps_and_a_joiner_gets_them_all(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    where = ("--genesis", small_genesis, "--data-dir", tmp_path / "owner", "--out", tmp_path / "signed.json")
    run_id = neuroshard("run", "create", "--config", tmp_path / "run.toml", *where).split("run ")[1].split(",")[0]
    with running_node(tmp_path / "owner", [*quick, "--run", run_id]) as owner:
        owner.wait_for_steps(2 * INNER_STEPS)
        owner.post("/api/training/pause")
        reached = owner.wait_for("pause", lambda status: status["state"] == "paused")["diloco"]["outer_steps"]
        starts = (reached + 2, reached + 4)
        told = sign_version(tmp_path, run_id, RATES[1], starts[0])
        assert f"It applies from outer step {starts[0]} on, and version 1 before." in told
        sign_version(tmp_path, run_id, RATES[2], starts[1])
        owner.wait_for("the news", lambda _: is_logged(owner, "signed version 3,"))
        owner.post("/api/training/resume")
        owner.wait_for_steps((starts[1] + 2) * INNER_STEPS)
        rates = rates_of(owner)
        expected = {step: RATES[sum(step >= start for start in starts)] for step in rates}
        assert rates == pytest.approx(expected)
        assert set(expected.values()) == set(RATES)
        owner.wait_for("word of it", lambda _: is_logged(owner, "version 3 of the run applies now"))

        address = owner.wait_for("address", lambda status: bool(status["network"]["addresses"]))
        invitation = Run(run_id, tmp_path / "owner").invitation
        peer = ["--invite", invitation, "--peer", address["network"]["addresses"][0]]
        variables = {"NEUROSHARD_TOKEN": "ab" * 32}
        with running_node(tmp_path / "joiner", [*quick, *peer], variables=variables) as joiner:

            def trains_by_version_3(status: dict[str, Any]) -> bool:
                has_reached = status["diloco"]["outer_steps"] >= starts[1]
                return has_reached and status["training"]["lr"] == pytest.approx(RATES[2])

            joiner.wait_for("version 3", trains_by_version_3)
        shown = neuroshard("run", "show", run_id, "--data-dir", tmp_path / "joiner", "--json")
        assert [each["from_outer_step"] for each in json.loads(shown)["versions"]] == [0, *starts]
