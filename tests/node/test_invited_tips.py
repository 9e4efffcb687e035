"""The tip of an invitation: the invited takes no line that is older or leads elsewhere, whoever offers it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from msgspec import structs

from benchmarks.friends import LONG_AFTER_EVERY_TEST
from neuroshard.consensus.chain import Chain, Step
from neuroshard.consensus.committee import Committee, Seat
from neuroshard.consensus.foundation import Foundations, Founding, SignedFoundation, StageStart
from neuroshard.consensus.round_messages import NO_DIGEST, Phase, Quorum, Vote, signed_by
from neuroshard.consensus.stage_chain import FileChainStore, StoredChain
from neuroshard.consensus.vote_log import ROUNDS_FOLDER
from neuroshard.consensus.waypoints import MILESTONE_HEIGHTS
from neuroshard.identity import Wallet
from neuroshard.identity.invitations import Invitation, InvitationTerms, InvitedPlaces, InvitedTip, invite
from neuroshard.model.architecture import plan_of
from neuroshard.node.invited_tip import verified_tip
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.runs.stored_passes import OwnPass, StoredPasses, entry_pass
from neuroshard.state.checkpoint_store import stage_folder
from neuroshard.state.replica_status import ReplicaStatus
from tests.consensus.test_foundation import DEPUTY
from tests.worlds.claims import identity_of
from tests.worlds.nodes import EPOCH, OFFER, OWNER, StageNode, StageWorld, living, play, root_on_disk

NEAR, LONG = MILESTONE_HEIGHTS + 12, 2 * MILESTONE_HEIGHTS + 140  # the tip is not among the last values of a long line
HOLDER = identity_of(0)


def founded(
    known: Foundations, signer: Wallet = OWNER, *, height: int = 0, deputies: tuple[Wallet, ...] | None = None
) -> Foundations:
    """The next statement of the run: the holder has the only seat of the first stage."""
    committee = Committee.founded([Seat(HOLDER.wallet_id, HOLDER.node_id, 0)], is_open=False)
    start = StageStart(0, committee, height)
    keys = None if deputies is None else tuple(each.public_key for each in deputies)
    return known.with_statements([known.next(signer, [start], keys)])


def certified(known: Foundations, root: str, heights: int, *, fork: int = 10**9) -> Chain:
    """A line of the holder's seat, with other values from a height on. Its first value leads to the root."""
    founding = RunVersions(OFFER, known).founding_of(0)
    assert founding is not None
    chain = Chain.founded(founding)
    for height in range(1, heights + 1):
        at = (0, NO_DIGEST) if height == 1 else (1, root)
        step = Step(OFFER.run_id, 0, *at, "terms", chain.standing, chain.ledger, chain.owner)
        content = structs.replace(step.first_value(), outer_step=1, next_root=root, sequences=int(height >= fork))
        value = step.completed(content)
        vote = signed_by(HOLDER, Vote(step.id, 0, Phase.COMMIT, value.digest), EPOCH)
        chain = chain.extended(Quorum(value, 0, Phase.COMMIT, (vote,)))
    return chain


def tip_of(chain: Chain, folder: Path, known: Foundations) -> InvitedTip:
    """The tip of a computer with this chain on its disk."""
    folder.mkdir(exist_ok=True)
    StoredFoundations(folder).write(OFFER, known)
    stage = stage_folder(folder, HOLDER.wallet_id, OFFER.run_id, plan_of(OFFER.parameters)[0])
    FileChainStore(stage / ROUNDS_FOLDER).write(StoredChain(chain.statement, chain.proof()))
    tip = verified_tip(folder, OFFER, HOLDER.wallet_id)
    assert tip is not None
    return tip


@dataclass
class Donor:
    """A node with the trained first stage. It offers the chain that the test names."""

    node: StageNode
    root: str
    stub: SimpleNamespace

    @classmethod
    async def trained(cls, node: StageNode) -> Donor:
        await anyio.sleep(30)
        assert node.stage is not None
        node.stage.outer_step = 1
        node.stage.save()
        root = root_on_disk(node.stage)
        node.stage.replica_status = lambda: ReplicaStatus(True, 30, 1, root, height=1)
        stub = SimpleNamespace(stage=node.swarm.name_of(0), chain=SimpleNamespace(chain=None))
        node.swarm.rounds.add(cast("Any", stub))
        return cls(node, root, stub)

    def offer(self, known: Foundations, chain: Chain) -> None:
        """Prove this chain from now on."""
        self.node.swarm.versions.learn_foundations(known)
        self.stub.chain.chain = chain


def invited(world: StageWorld, known: Foundations, tip: InvitedTip | None) -> StageNode:
    """A node that enters with the tip of its invitation."""
    newcomer = world.add()
    newcomer.swarm.versions.tip = tip
    newcomer.swarm.versions.learn_foundations(known)
    world.tasks.start_soon(lambda: newcomer.live(0, moves=False))
    return newcomer


async def has_joined(newcomer: StageNode, donor: Donor, seconds: float = 120) -> bool:
    with anyio.move_on_after(seconds):
        while newcomer.stage is None:
            await anyio.sleep(1)
        assert root_on_disk(newcomer.stage) == donor.root
        return True
    return False


@pytest.mark.parametrize(
    ("heights", "fork"),
    [
        pytest.param(100, 10**9, id="older"),
        pytest.param(MILESTONE_HEIGHTS - 1, 20, id="older and forked", marks=pytest.mark.long),
        pytest.param(NEAR, 20, id="forked", marks=pytest.mark.long),
        pytest.param(LONG, 20, id="forked and longer"),
    ],
)
def test_the_invited_waits_for_the_line_of_its_invitation(heights: int, fork: int, tmp_path: Path) -> None:
    """The holder's own key certifies the other line, as an old copy of its folder would."""

    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            donor, known = await Donor.trained(nodes[0]), founded(RunVersions(OFFER).foundations)
            tip = tip_of(certified(known, donor.root, NEAR), tmp_path / "inviter", known)
            assert tip.height == MILESTONE_HEIGHTS
            donor.offer(known, certified(known, donor.root, heights, fork=fork))
            newcomer = invited(world, known, tip)
            assert not await has_joined(newcomer, donor)
            assert "has the value of height 128 from your invitation" in newcomer.told[-1]
            assert "ask for a new invitation" in newcomer.told[-1]
            donor.offer(known, certified(known, donor.root, LONG))
            assert await has_joined(newcomer, donor)

    play(tmp_path, scenario)


def test_without_a_tip_the_same_older_line_is_taken(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            donor, known = await Donor.trained(nodes[0]), founded(RunVersions(OFFER).foundations)
            donor.offer(known, certified(known, donor.root, 100, fork=20))
            assert await has_joined(invited(world, known, None), donor)

    play(tmp_path, scenario)


def test_a_later_foundation_of_the_owner_replaces_the_tip(tmp_path: Path) -> None:
    """The donors know only the older foundation first, then another line, then the owner's word."""

    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2], moves=False) as nodes:
            donor, first = await Donor.trained(nodes[0]), founded(RunVersions(OFFER).foundations)
            second = founded(first)
            tip = tip_of(certified(second, donor.root, NEAR), tmp_path / "inviter", second)
            donor.offer(first, certified(first, donor.root, LONG))
            newcomer = invited(world, first, tip)
            assert not await has_joined(newcomer, donor)
            assert "has the foundation from your invitation" in newcomer.told[-1]
            newcomer.swarm.versions.learn_foundations(second)
            assert not await has_joined(newcomer, donor)
            third = founded(second)
            newcomer.swarm.versions.learn_foundations(third)
            donor.offer(third, certified(third, donor.root, 5))
            assert await has_joined(newcomer, donor)

    play(tmp_path, scenario)


def founding_with(known: Foundations, tip: InvitedTip) -> Founding | None:
    return RunVersions(OFFER, known, tip).founding_of(0)


def tip_in(statement: SignedFoundation, height: int = MILESTONE_HEIGHTS, stage: int = 0) -> InvitedTip:
    return InvitedTip(stage, statement.foundation.epoch, bytes.fromhex(statement.id), height, b"v" * 32)


def test_a_tip_applies_to_its_foundation_and_to_its_stage() -> None:
    known = founded(RunVersions(OFFER).foundations)
    (first,) = known.highest
    found = founding_with(known, tip_in(first))
    assert found is not None
    assert [(point.milestone.height, point.milestone.value) for point in found.points] == [(128, (b"v" * 32).hex())]
    for tip in (tip_in(first, stage=1), structs.replace(tip_in(first), value=None)):
        found = founding_with(known, tip)
        assert found is not None
        assert found.points == ()
    found = founding_with(founded(known), tip_in(first))  # the owner has founded the stage again
    assert found is not None
    assert found.points == ()


def test_a_deputy_that_is_trusted_no_more_replaces_no_tip() -> None:
    """It founds twice on the line before the owner's word, and shows that line only."""
    before = founded(RunVersions(OFFER).foundations, deputies=(DEPUTY,))
    after = founded(before, deputies=())
    (word,) = after.highest
    shown = founded(founded(before, DEPUTY), DEPUTY)
    assert founding_with(shown, tip_in(word)) is None
    assert founding_with(after, tip_in(word)) is not None
    (rival,) = founded(before, DEPUTY).highest
    for overruled in (after, founded(after)):  # the owner's word, on a line without the tip's statement, which is void
        assert founding_with(overruled, tip_in(rival)) is not None
    assert founding_with(before, tip_in(rival)) is None


def test_a_computer_without_milestones_names_the_foundation_only(tmp_path: Path) -> None:
    assert verified_tip(tmp_path, OFFER, HOLDER.wallet_id) is None
    known = founded(RunVersions(OFFER).foundations)
    tip = tip_of(certified(known, "1" * 64, 12), tmp_path, known)
    assert tip == InvitedTip(0, 0, bytes.fromhex(known.highest[0].id))


def invitation(tip: InvitedTip | None, seed: int, days: float = 1) -> Invitation:
    terms = InvitationTerms(LONG_AFTER_EVERY_TEST + days * 86_400, 1, f"label {seed}", tip=tip)
    return invite(OWNER, OFFER.run_id, terms, InvitedPlaces("friends"), seed=bytes([seed] * 32))


def test_the_tip_of_the_invitation_given_last_counts_and_survives_restarts(tmp_path: Path) -> None:
    """So a new invitation helps a computer whose first one names a line that nobody has."""
    first, second = (InvitedTip(0, 0, bytes([number] * 32)) for number in (1, 2))
    me, stored, now = identity_of(3), StoredPasses(tmp_path, OFFER), float(LONG_AFTER_EVERY_TEST)

    def entered(given: Invitation | None, at: float = now) -> OwnPass:
        entry_pass(OFFER, me, stored, given, shown=None, now=at)
        own = stored.own(me.wallet_id)
        assert own is not None
        return own

    assert entered(invitation(first, 1)).tip == first
    assert entered(None).tip == first
    assert entered(invitation(second, 2)).tip == second
    assert entered(None).tip == second
    assert entered(invitation(None, 3)).tip == second  # of an older version
    assert entered(invitation(first, 4), now + 3 * 86_400).tip == second  # expired
    assert entered(None).member_pass == invitation(first, 1).pass_for(me.delegation.grant.wallet_public_key, now)
