"""The owner's node signs a waypoint of its run, and it travels to a friend that joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuroshard.consensus.waypoints import MILESTONE_HEIGHTS, Waypoint
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.runs.stored_runs import find_run
from neuroshard.types import RunId
from tests.worlds.processes import LONGEST_SECONDS, made, nodes_of, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

CONFIG = 'architecture = { depth = 2, sequence_length = 64 }\nbatch_size = 1\ninner_steps = 1\ninterval = "fixed"\n'


def waypoint_in(folder: Path, run_id: str) -> Waypoint | None:
    """The newest waypoint that a data folder knows."""
    offer = find_run(folder, RunId(run_id))
    return None if offer is None else StoredFoundations(folder).read(offer).points.get(0)


@pytest.mark.long
def test_a_friend_learns_the_owners_waypoint_when_it_joins(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(CONFIG, small_genesis, tmp_path)
    with nodes_of(run, quick[:-2], tmp_path) as start:
        owner = start(0)
        status = owner.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        owner.wait_for(
            "the milestone", lambda status: status["diloco"]["outer_steps"] > MILESTONE_HEIGHTS, LONGEST_SECONDS
        )
        until("the owner's node signs", lambda: waypoint_in(run.data_dir, run.run_id) is not None)
        signed = waypoint_in(run.data_dir, run.run_id)
        assert signed is not None
        assert signed.milestone.height == MILESTONE_HEIGHTS
        friend = start(1, status["network"]["addresses"][0])
        friend.wait_for("a step of both", lambda status: status["diloco"]["members"] == 2, LONGEST_SECONDS)
        assert waypoint_in(tmp_path / "node-1", run.run_id) == signed
