"""A node that starts again after others have gone on: by the aggregates that it missed, or by their whole state."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import anyio
import pytest

from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.effects import Complete
from neuroshard.consensus.round_messages import Phase, Quorum
from neuroshard.consensus.slices import digest_of
from neuroshard.consensus.vote_log import KEPT_STEPS, ROUNDS_FOLDER, FileVoteLog
from neuroshard.identity import NodeIdentity
from neuroshard.state.replica_status import ReplicaStatus
from tests.worlds.lone_chains import certified_lone_steps, show_chain
from tests.worlds.nodes import StageWorld, living, play, root_on_disk
from tests.worlds.rounds import value_of


def end_of(root: str, next_root: str, identity: NodeIdentity, outer_step: int = 3) -> Complete:
    member = GroupMember(identity.node_id, identity.wallet_id)
    digests, accepted = (digest_of(b"").hex(),), (member.node_id,)
    contents = {"aggregate": digests, "members": (member,), "accepted": accepted}
    value = value_of(root=root, next_root=next_root, outer_step=outer_step, **contents)
    return Complete(Quorum(value, 0, Phase.COMMIT, ()), (b"",))


@pytest.mark.parametrize(
    ("missed", "kept", "own_ends", "may_catch_up", "is_fetched"),
    [
        (KEPT_STEPS, 0, 0, True, False),
        (KEPT_STEPS + 1, 0, 0, True, True),  # nobody keeps that many aggregates
        (KEPT_STEPS + 9, KEPT_STEPS + 9, 0, True, False),  # another node does
        (KEPT_STEPS + 9, KEPT_STEPS + 8, 0, True, True),
        (1, 0, 1, True, False),  # it has the aggregate itself
        (KEPT_STEPS + 9, 0, 9, True, False),  # it has the first 9 of them itself
        (KEPT_STEPS + 9, 0, 8, True, True),
        (1, 0, None, True, True),  # without a certificate it knows nobody who votes
        (1, 0, 0, False, True),  # it was tried in vain
    ],
)
def test_who_missed_few_rounds_goes_on_from_its_own_state(
    tmp_path: Path, missed: int, kept: int, own_ends: int | None, *, may_catch_up: bool, is_fetched: bool
) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 0, 1, 2], moves=False) as nodes:
            await anyio.sleep(30)
            away, other = nodes[1], nodes[0]
            assert away.stage is not None
            away.stage.outer_step = 3
            away.stage.save()
            own_steps, own_root, folder = away.stage.steps, root_on_disk(away.stage), away.stage.store.folder
            away.kill()
            if own_ends is not None:
                roots = ["5" * 64, own_root, *(f"{number:064x}" for number in range(own_ends))]
                log = FileVoteLog(folder / ROUNDS_FOLDER)
                for number, (root, next_root) in enumerate(pairwise(roots), 2):
                    log.end(number, end_of(root, next_root, away.identity, number + 1), kept=len(roots))
            assert other.stage is not None
            other.stage.outer_step, other.stage.kept = 3 + missed, kept
            await anyio.sleep(60)
            again = world.add_again(away)
            again.may_catch_up = may_catch_up
            world.tasks.start_soon(lambda: again.live(moves=False))
            await anyio.sleep(5)  # it has heard of the others
            await again.take(0)
            (began,) = again.began_steps
            assert (began > own_steps) == is_fetched
            assert again.stage is not None
            assert again.stage.outer_step == (3 + missed if is_fetched else 3)

    play(tmp_path, scenario)


def test_who_starts_again_takes_a_lone_state_whose_certificate_follows(tmp_path: Path) -> None:
    """A node that trains alone certifies each step while it makes the next one, so its chain is one step behind."""

    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 0], moves=False) as nodes:
            await anyio.sleep(30)
            holder, away = nodes
            assert holder.stage is not None
            assert away.stage is not None
            away.stage.steps = holder.stage.steps = 30
            away.stage.save()
            away.kill()
            holder.stage.outer_step = 2
            holder.stage.save()
            root = root_on_disk(holder.stage)
            statement, (first, second) = certified_lone_steps(world, holder, ["1" * 64, root])
            holder.stage.replica_status = lambda: ReplicaStatus(True, 60, 2, root, height=1)  # type: ignore[method-assign]
            certified_at = anyio.current_time() + 3
            show_chain(holder, lambda: first if anyio.current_time() < certified_at else second)
            again = world.add_again(away)
            again.allow_megabytes(1)  # it keeps no copy of that state
            again.swarm.versions.learn_foundations(again.swarm.versions.foundations.with_statements([statement]))
            world.tasks.start_soon(lambda: again.live(moves=False))
            await anyio.sleep(2)  # it has heard of the holder
            await again.take(0)
            assert again.stage is not None
            assert again.stage.outer_step == 2

    play(tmp_path, scenario)
