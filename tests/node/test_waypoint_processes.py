"""The owner's node signs a waypoint that travels to a friend that joins, and its invitations name the value, too."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from msgspec import structs

from benchmarks.node_process import TOKEN, running_node
from neuroshard.consensus.waypoints import MILESTONE_HEIGHTS, Waypoint
from neuroshard.identity import Wallet
from neuroshard.identity.invitations import Invitation, InvitationTerms, InvitedPlaces, invite, read_invitation, to_code
from neuroshard.identity.wallet import parse_token
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.runs.stored_runs import find_run
from neuroshard.types import RunId
from tests.worlds.processes import LONGEST_SECONDS, made, neuroshard, nodes_of, until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

CONFIG = 'architecture = { depth = 2, sequence_length = 64 }\nbatch_size = 1\ninner_steps = 1\ninterval = "fixed"\n'


def waypoint_in(folder: Path, run_id: str) -> Waypoint | None:
    """The newest waypoint that a data folder knows."""
    offer = find_run(folder, RunId(run_id))
    return None if offer is None else StoredFoundations(folder).read(offer).points.get(0)


def leading_elsewhere(invitation: Invitation) -> str:
    """An invitation of the same owner to the same nodes, with a tip that is on no line."""
    assert invitation.tip is not None
    tip = structs.replace(invitation.tip, value=bytes(32))
    owner, places = Wallet.from_secret(parse_token(TOKEN)), InvitedPlaces("friends", invitation.peers)
    terms = InvitationTerms(time.time() + 3600, 1, "elsewhere", tip=tip)
    return to_code(invite(owner, invitation.run_id, terms, places, seed=bytes(32)))


@pytest.mark.long
def test_a_friend_learns_the_owners_waypoint_and_its_invitation_names_the_same_value(
    small_genesis: Path, quick: list[str], tmp_path: Path
) -> None:
    run = made(CONFIG, small_genesis, tmp_path)
    with nodes_of(run, quick[:-2], tmp_path) as start:
        owner = start(0)
        owner.wait_for("address", lambda status: bool(status["network"]["addresses"]), LONGEST_SECONDS)
        owner.wait_for(
            "the milestone", lambda status: status["diloco"]["outer_steps"] > MILESTONE_HEIGHTS, LONGEST_SECONDS
        )
        until("the owner's node signs", lambda: waypoint_in(run.data_dir, run.run_id) is not None)
        signed = waypoint_in(run.data_dir, run.run_id)
        assert signed is not None
        assert signed.milestone.height == MILESTONE_HEIGHTS
        link = neuroshard("run", "invite", "--label", "Ada", "--json", "--data-dir", run.data_dir).json()["link"]
        invitation = read_invitation(link)
        assert invitation.tip is not None
        assert invitation.tip.value is not None
        assert (invitation.tip.height, invitation.tip.value.hex()) == (MILESTONE_HEIGHTS, signed.milestone.value)
        assert invitation.tip.foundation.hex() == signed.statement

        friend, stray = tmp_path / "friend", {"NEUROSHARD_TOKEN": "b2" * 32}
        with running_node(friend, [*quick, "--invite", link], variables={"NEUROSHARD_TOKEN": "a1" * 32}) as joined:
            joined.wait_for("a step of both", lambda status: status["diloco"]["members"] == 2, LONGEST_SECONDS)
            assert waypoint_in(friend, run.run_id) == signed
        with running_node(
            tmp_path / "stray", [*quick, "--invite", leading_elsewhere(invitation)], variables=stray
        ) as lost:
            status = lost.wait_for("the reason", lambda status: "your invitation" in str(status), LONGEST_SECONDS)
            assert f"has the value of height {MILESTONE_HEIGHTS} from your invitation" in str(status)
            assert status["training"]["steps"] == 0
