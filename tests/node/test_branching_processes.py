"""`neuroshard run branch`: a friend continues a run whose owner is gone, and another friend joins it again."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node_process import NodeProcess, running_node
from neuroshard.runs.stored_runs import find_run
from neuroshard.state.checkpoint_catalogue import saved_stages
from neuroshard.state.checkpoint_store import find_stage_folders
from neuroshard.state.stage_tensors import ANCHOR, VELOCITY
from neuroshard.state.tensor_file import read_layout
from neuroshard.types import RunId
from tests.worlds.commands import Outcome
from tests.worlds.processes import LONGEST_SECONDS, made, neuroshard, nodes_of, peers_of, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

CONFIG = "architecture = { depth = 2, sequence_length = 64 }\nbatch_size = 1\ninner_steps = 5\n"
TOKENS = {number: f"{number:02x}" * 32 for number in (1, 2)}


def diloco(node: NodeProcess) -> dict[str, Any]:
    """Status of the node's outer steps."""
    found: dict[str, Any] = node.get("/api/status")["diloco"]
    return found


@pytest.mark.long
def test_a_friend_continues_a_run_whose_owner_is_gone(small_genesis: Path, quick: list[str], tmp_path: Path) -> None:
    run = made(CONFIG, small_genesis, tmp_path)
    folders = {number: tmp_path / f"node-{number}" for number in TOKENS}
    branch = ("run", "branch", run.run_id, "--yes", "--data-dir", folders[1], "--token", TOKENS[1])
    with nodes_of(run, quick, tmp_path) as start:
        owner = start(0)
        status = owner.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        address = status["network"]["addresses"][0]
        friends = [start(number, address) for number in TOKENS]
        for node in friends:
            node.wait_for("a step of all", lambda status: status["diloco"]["members"] == 3, LONGEST_SECONDS)
        owner.kill()
        friends[1].kill()
        said = friends[0].wait_for("the remedy", lambda status: "run branch" in str(status), LONGEST_SECONDS)
        assert "run refound" in str(said)
        refused = neuroshard(*branch)
        assert (refused.code, "Stop it first" in refused.err) == (2, True)
        said = friends[0].wait_for("a loss", lambda status: bool(status["training"]["held_out"]), LONGEST_SECONDS)
        first_evaluation = said["training"]["held_out"][0]["step"]
        before = diloco(friends[0])
        steps = friends[0].get("/api/status")["training"]["steps"]
        assert friends[0].stop() == 0

    done = neuroshard(*branch, "--json")
    assert done.code == 0, done.err
    branched = done.json()
    assert (branched["is_new"], branched["continues"]) == (True, run.run_id)
    (stage,) = branched["stages"]
    assert (stage["outer_step"], stage["is_tip"]) == (before["outer_steps"], True)
    assert stage["step"] >= steps
    again = neuroshard(*branch, "--json").json()
    assert (again["run_id"], again["is_new"]) == (branched["run_id"], False)
    old, new = (find_run(folders[1], RunId(each)) for each in (run.run_id, branched["run_id"]))
    assert old is not None
    assert new is not None
    assert new.parameters.genesis == old.parameters.genesis
    assert new.data_run_id == run.run_id

    arguments = [*quick, "--run", branched["run_id"]]
    with running_node(folders[1], arguments, variables={"NEUROSHARD_TOKEN": TOKENS[1]}) as third:
        third.wait_for("a step", lambda status: status["training"]["steps"] > stage["step"], LONGEST_SECONDS)
        status = third.wait_for(
            "an outer step", lambda status: status["diloco"]["outer_steps"] > stage["outer_step"], LONGEST_SECONDS
        )
        assert status["training"]["held_out"][0]["step"] == first_evaluation  # the curve continues
        until("address", lambda: bool(third.get("/api/status")["network"]["addresses"]))
        invite = ("run", "invite", "--run", branched["run_id"], "--data-dir", folders[1], "--token", TOKENS[1])
        link = neuroshard(*invite, "--json").json()["link"]
        variables = {"NEUROSHARD_TOKEN": TOKENS[2], "NEUROSHARD_INVITE": link}
        with running_node(folders[2], quick, variables=variables) as returned:
            returned.wait_for(
                "a step of both",
                lambda status: (
                    status["diloco"]["outer_steps"] > stage["outer_step"] and status["diloco"]["members"] == 2
                ),
                LONGEST_SECONDS,
            )
            assert returned.get("/api/status")["run"]["run_id"] == branched["run_id"]
            assert returned.get("/api/status")["node_id"] in peers_of(third)


def branched_from(folder: Path, *arguments: object) -> Outcome:
    """Branch the only run that was trained in a folder."""
    (stage,) = find_stage_folders(folder)
    return neuroshard("run", "branch", stage.parent.name, "--yes", "--data-dir", folder, "--json", *arguments)


def test_a_state_behind_the_newest_certified_one_needs_force(
    trained: Path, quick: list[str], saving_often: Mapping[str, str], tmp_path: Path
) -> None:
    """A saved state is put back after the node has completed further steps."""
    (stage,) = find_stage_folders(trained)
    oldest, backup = saved_stages([stage])[-1], tmp_path / "backup"
    backup.mkdir()
    for file in (Path(oldest.generation.path), oldest.tensor_file):
        shutil.copy(file, backup)
    wanted = oldest.generation.outer_step + 3  # the newest state may be one step ahead of the certified one
    with running_node(trained, quick, variables=saving_often) as node:
        node.wait_for("further steps", lambda status: status["diloco"]["outer_steps"] >= wanted, LONGEST_SECONDS)
        assert node.stop() == 0
    for state in saved_stages([stage]):
        Path(state.generation.path).unlink()
    shutil.copytree(backup, Path(oldest.generation.path).parent, dirs_exist_ok=True)
    refused = branched_from(trained)
    assert refused.code == 2
    assert "not the newest one" in refused.err
    (done,) = branched_from(trained, "--force").json()["stages"]
    assert (done["outer_step"], done["is_tip"]) == (oldest.generation.outer_step, False)


def damage(tensor_file: Path) -> None:
    """Change a tensor that the root does not cover."""
    data = bytearray(tensor_file.read_bytes())
    with tensor_file.open("rb") as file:
        layout, header = read_layout(file, len(data))
    place = next(spec.start for name, spec in layout.specs.items() if name not in (ANCHOR, VELOCITY))
    data[len(header) + place] ^= 1
    tensor_file.write_bytes(data)


def test_a_damaged_state_is_not_branched(trained: Path) -> None:
    (stage,) = find_stage_folders(trained)
    for saved in saved_stages([stage]):  # a node that stops before a step's certificate has a state newer than the tip
        if saved.has_tensors:
            damage(saved.tensor_file)
    refused = branched_from(trained)
    assert refused.code == 5
    assert "is damaged" in refused.err
    assert len(list((trained / "runs" / "joined").glob("*.foundations"))) == 1
    assert not list(trained.glob("checkpoints/*/*/*/*.part"))


def test_only_a_computer_with_all_layers_can_branch(trained: Path) -> None:
    refused = branched_from(trained, "--token", TOKENS[1])  # another wallet has trained nothing here
    assert refused.code == 2
    assert "no saved state of layers 1-" in refused.err
