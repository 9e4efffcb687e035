"""`neuroshard run refound` beside a node and without one: the run continues from the newest certified state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks.friends import invitation_to
from benchmarks.node_process import TOKEN, NodeProcess, running_node
from neuroshard.errors import UsageError
from neuroshard.identity import Wallet, parse_token
from neuroshard.membership.run_members import Papers
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.runs.stored_passes import StoredPasses
from neuroshard.runs.stored_runs import find_run
from neuroshard.state.checkpoint_store import find_stage_folders
from neuroshard.types import RunId
from tests.worlds.processes import neuroshard

pytestmark = pytest.mark.process


def run_of(folder: Path) -> str:
    """Id of the only run that was trained in a data folder."""
    (stage,) = find_stage_folders(folder)
    return stage.parent.name


def outer_steps(status: dict[str, Any]) -> int:
    """Outer steps of the only stage."""
    return int(status["diloco"]["outer_steps"])


def advances(node: NodeProcess) -> None:
    """Wait until the node completes one more outer step."""
    before = outer_steps(node.wait_for("training", lambda status: status["state"] == "training"))
    node.wait_for("an outer step", lambda status: outer_steps(status) > before)


def epochs(folder: Path, run_id: str) -> list[int]:
    """Epochs of the foundations that a data folder keeps."""
    offer = find_run(folder, RunId(run_id))
    assert offer is not None
    return sorted(each.foundation.epoch for each in StoredFoundations(folder).read(offer).known.values())


def test_a_node_continues_after_its_run_is_founded_again(trained: Path, quick: list[str]) -> None:
    run_id = run_of(trained)
    with running_node(trained, quick) as node:
        advances(node)
        told = neuroshard("run", "refound", run_id, "--yes", "--data-dir", trained)
        assert told.code == 0, told.err
        assert "Your node is the only voter of the run from now on:" in told.out
        advances(node)
    assert epochs(trained, run_id) == [0, 1]


@pytest.mark.long
def test_two_foundations_of_one_epoch_stop_the_steps_until_the_owner_decides(
    trained: Path, quick: list[str], tmp_path: Path
) -> None:
    run_id, copy = run_of(trained), shutil.copytree(trained, tmp_path / "copy")
    offer = find_run(trained, RunId(run_id))
    assert offer is not None
    for folder in (trained, copy):  # the second is the owner's other computer
        StoredFoundations(folder).request_new(offer)
        with running_node(folder, quick) as node:
            node.wait_for("the foundation", lambda _, folder=folder: epochs(folder, run_id) == [0, 1])
    StoredFoundations(trained).write(offer, StoredFoundations(copy).read(offer))
    assert epochs(trained, run_id) == [0, 1, 1]
    with running_node(trained, quick) as node:
        node.wait_for("the contradiction", lambda status: "two that contradict each other" in str(status))
        before = node.get("/api/status")
        node.wait_for_steps(before["training"]["steps"] + 40)
        assert outer_steps(node.get("/api/status")) == outer_steps(before)
        assert neuroshard("run", "refound", run_id, "--yes", "--data-dir", trained).code == 0
        node.wait_for("the decision", lambda status: outer_steps(status) > outer_steps(before))
    assert epochs(trained, run_id) == [0, 1, 1, 2]


def test_only_the_owner_founds_a_run_again_and_a_node_must_run(trained: Path, tmp_path: Path) -> None:
    run_id = run_of(trained)
    foreign = neuroshard("run", "refound", run_id, "--yes", "--data-dir", trained, "--token", "ab" * 32)
    assert foreign.code == 2
    assert "Only the run's owner and its deputies can use `run refound`." in foreign.err
    unknown = neuroshard("run", "refound", "cd" * 32, "--yes", "--data-dir", tmp_path)
    assert unknown.code == 2
    assert "is not known" in unknown.err
    later = neuroshard("run", "refound", run_id, "--yes", "--data-dir", trained, "--json")
    assert (later.code, later.json()["is_founded"]) == (0, False)
    assert epochs(trained, run_id) == [0]


def test_the_owner_names_a_deputy_and_withdraws_the_trust(trained: Path) -> None:
    run_id, friend = run_of(trained), Wallet.from_secret(parse_token("ab" * 32))
    offer, owner = find_run(trained, RunId(run_id)), Wallet.from_secret(parse_token(TOKEN))
    assert offer is not None
    member_pass = invitation_to(RunId(run_id), owner).pass_for(friend.public_key, 1)
    StoredPasses(trained, offer).keep_papers(Papers((member_pass,)))
    place = ("--run", run_id, "--data-dir", trained)
    with pytest.raises(UsageError, match="Only the run's owner can name its deputies"):
        StoredFoundations(trained).name_deputy(offer, friend, friend.public_key)
    named = neuroshard("run", "trust", friend.wallet_id[:8], *place)
    assert f": {friend.wallet_id[:8]}. Members that are online learn it" in named.out, named.err
    founding = ("run", "refound", run_id, "--yes", "--data-dir", trained, "--token", "ab" * 32, "--json")
    assert neuroshard(*founding).json()["is_founded"] is False  # no node runs
    assert "Deputies of run" in neuroshard("run", "trust", friend.wallet_id[:8], "--withdraw", *place).out
    assert not StoredFoundations(trained).read(offer).may_sign(friend.public_key)
    assert epochs(trained, run_id) == [0, 1, 2]


def test_a_run_that_was_trained_before_it_had_a_foundation_continues(trained: Path, quick: list[str]) -> None:
    run_id = run_of(trained)
    (stage,) = find_stage_folders(trained)
    shutil.rmtree(stage / "rounds")
    (trained / "runs" / "joined" / f"{run_id}.foundations").unlink()
    with running_node(trained, quick) as node:
        advances(node)
    assert epochs(trained, run_id) == [0]


def test_lost_certificates_are_reported_and_the_owner_decides(trained: Path, quick: list[str]) -> None:
    run_id = run_of(trained)
    (stage,) = find_stage_folders(trained)
    shutil.rmtree(stage / "rounds")
    with running_node(trained, quick) as node:
        node.wait_for("the report", lambda status: "certificates of this node's state are lost" in str(status))
        assert neuroshard("run", "refound", run_id, "--yes", "--data-dir", trained).code == 0
        advances(node)
