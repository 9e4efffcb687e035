"""Who may fetch the state of a stage: members of the run and those who join it, by what was heard of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuroshard.membership.announcements import Announcement
from neuroshard.membership.claim_intake import Statement
from neuroshard.network import RequestRefusedError
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.runs.exchange import RunVersions
from neuroshard.state.transfer_messages import manifest_request
from tests.worlds.nodes import EPOCH, OFFER, StageNode, StageWorld, play


def announced_by(node: StageNode) -> Statement[Announcement]:
    """What a joiner says with its hello, before its first report."""
    address = f"/memory/p2p/{node.name}"
    announcement = Announcement(OFFER.run_id, 1, None, None, EPOCH, 500, False, "1", addresses=(address,))
    return Statement(node.name, node.identity.wallet_id, EPOCH, EPOCH + 1e6, announcement)


def test_a_stranger_is_refused_until_it_has_said_hello(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        holder, joiner = world.add(), world.add()
        swarm = StageSwarm(holder.identity, RunVersions(OFFER), holder.membership, holder.networking)
        request = manifest_request(swarm.name_of(0), 30.0)
        with pytest.raises(RequestRefusedError, match="serves only members of the run"):
            await swarm.donor.give_manifest(joiner.name, request)
        holder.membership.hear_announcement(announced_by(joiner))
        with pytest.raises(RequestRefusedError, match="nothing of these layers"):
            await swarm.donor.give_manifest(joiner.name, request)

    play(tmp_path, scenario)
