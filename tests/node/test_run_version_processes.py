"""`neuroshard organise set`: versions that the owner signs beside a running node apply at all members together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node_process import NodeProcess, running_node
from tests.worlds import processes
from tests.worlds.processes import LONGEST_SECONDS, Run

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

INNER_STEPS = 10
RATES = (1e-3, 5e-4, 2e-4)  # of versions 1, 2 and 3
SHAPE = "architecture = { depth = 2, sequence_length = 64 }\n"
RUN = (
    f'name = "friends"\ninner_lr = {RATES[0]}\nschedule = "constant"\nwarmup_steps = 0\ninner_steps = {INNER_STEPS}\n'
    "batch_size = 1\nsequences_per_step = 1\narchitecture = { depth = 2, sequence_length = 64 }\n"
)


def neuroshard(*arguments: object) -> str:
    """What a command of the run's owner printed, which ended well."""
    ran = processes.neuroshard(*arguments)
    assert ran.code == 0, ran.err
    return ran.out


def set_rate(folder: Path, run_id: str, rate: float, *arguments: object) -> str:
    """What the owner types to change the learning rate, also in a run of friends."""
    return neuroshard("organise", "set", "inner_lr", rate, "--yes", "--run", run_id, "--data-dir", folder, *arguments)


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
        starts = (reached + 4, reached + 7)
        told = set_rate(tmp_path / "owner", run_id, RATES[1], "--from", starts[0])
        assert f"inner_lr: {RATES[0]} -> {RATES[1]}" in told
        assert f"It applies from outer step {starts[0]}, or from the second one after its entry" in told
        set_rate(tmp_path / "owner", run_id, RATES[2], "--from", starts[1])
        owner.wait_for("the news", lambda _: is_logged(owner, "signed version 3."))
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


def first_step_of(node: NodeProcess, version: int) -> int | None:
    """The outer step from which a node has used a version, as its log says; None before that."""
    said = re.compile(rf"Outer step (\d+): version {version} of the run applies now; it changes inner.learning_rate")
    found = [said.match(line["message"]) for line in node.get("/api/logs?after=0")["records"]]
    steps = [int(each[1]) for each in found if each is not None]
    assert len(steps) <= 1
    return steps[0] if steps else None


def test_friends_change_at_one_outer_step_although_one_is_away_and_the_owner_starts_again(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    config = f'inner_lr = {RATES[0]}\nschedule = "constant"\nwarmup_steps = 0\nbatch_size = 1\n{SHAPE}'
    run = processes.made(config, small_genesis, tmp_path)
    refused = processes.neuroshard(
        *("organise", "set", "inner_lr", 1, "--yes", "--run", run.run_id, "--data-dir", run.data_dir),
        "--token",
        "ab" * 32,
    )
    assert (refused.code, "Only its owner can sign a new version" in refused.err) == (2, True)
    with processes.nodes_of(run, quick, tmp_path) as start:
        owner = start(0)
        status = owner.wait_for("address", lambda status: bool(status["network"]["addresses"]))
        address = status["network"]["addresses"][0]
        friends = [start(number, address) for number in (1, 2)]
        for node in (owner, *friends):
            node.wait_for("a round of all", lambda status: status["diloco"]["members"] == 3, LONGEST_SECONDS)
        friends[1].kill()
        set_rate(run.data_dir, run.run_id, RATES[1])
        for node in (owner, friends[0]):
            node.wait_for("the version", lambda _, node=node: first_step_of(node, 2) is not None, LONGEST_SECONDS)
            node.wait_for("its rate", lambda status: status["training"]["lr"] == RATES[1])
        first = first_step_of(owner, 2)
        assert first == first_step_of(friends[0], 2)
        for node in (owner, friends[0]):
            shown = node.get("/api/status")["diloco"]
            assert (shown["version"], shown["version_from"]) == (2, first)

        friends[1] = start(2, address)  # it was away when the version was signed, certified and applied
        friends[1].wait_for("the version", lambda status: status["training"]["lr"] == RATES[1], LONGEST_SECONDS)
        assert friends[1].get("/api/status")["diloco"]["outer_steps"] >= first
        assert owner.stop() == 0
        owner = start(0)
        owner.wait_for("training", lambda status: status["state"] == "training", LONGEST_SECONDS)
        assert set(rates_since_start(owner)) == {RATES[1]}


def rates_since_start(node: NodeProcess) -> list[float]:
    """Learning rates of the steps since the node started, in order."""
    begun = node.get("/api/status")["training"]["steps"]
    node.wait_for_steps(begun + 10)
    points: list[dict[str, Any]] = node.get("/api/training/history")["points"]
    return [point["lr"] for point in points if point["step"] > begun]
