"""The only holder of a stage is lost while the owner is away: the wallet with the copy continues that stage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from neuroshard.consensus.chain import Chain
from neuroshard.consensus.committee import NameHeir
from neuroshard.consensus.foundation import Foundations, HeirNaming, SignedSuccession, StageStart, Succession
from neuroshard.consensus.round_messages import signed_by
from neuroshard.consensus.stage_chain import FileChainStore, proven_chain
from neuroshard.consensus.vote_log import ROUNDS_FOLDER
from neuroshard.identity.invitations import InvitedTip
from neuroshard.node.founding import PATIENCE_SECONDS, Founder, best_state, inherited_stages
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.types import NodeId
from tests.consensus.test_heirs import HOLDER, NOW, certified, founded, key_of, lone
from tests.node.test_invited_tips import Donor, has_joined, invited
from tests.node.test_invited_tips import certified as stage_line
from tests.worlds.clock import at_once
from tests.worlds.nodes import OFFER, StageNode, StageWorld, living, play

STAGE = 2


@dataclass
class LostStage:
    """A run whose last stage has one holder, the copy of its state, and the chain that the holder serves."""

    holder: StageNode
    keeper: StageNode
    others: list[StageNode]
    known: Foundations
    chain: Chain

    @classmethod
    async def prepared(cls, nodes: list[StageNode]) -> LostStage:
        """The holder certifies its steps alone. It has named the node that has kept a copy, which has its chain."""
        await anyio.sleep(30)
        holder = nodes[STAGE]
        known = founded(*(lone(node.identity) for node in nodes[:3]))
        founding = RunVersions(OFFER, known).founding_of(STAGE)
        assert founding is not None
        chain = certified(Chain.founded(founding), by=holder.identity)
        stub = SimpleNamespace(stage=holder.swarm.name_of(STAGE), chain=SimpleNamespace(chain=chain))
        for node in nodes:
            node.swarm.versions.learn_foundations(known)
            StoredFoundations(node.data_dir).write(OFFER, known)
        holder.swarm.rounds.add(cast("Any", stub))
        await anyio.sleep(60)
        (keeper,) = [node for node in nodes if node.copies.kept(STAGE).meta is not None]
        said = HeirNaming(founding.statement, STAGE, 2, keeper.identity.wallet_id)
        naming = NameHeir(keeper.identity.wallet_id, signed_by(holder.identity, said, NOW).claim)
        chain = stub.chain.chain = certified(certified(chain, naming, by=holder.identity), by=holder.identity)
        await anyio.sleep(60)
        others = [node for node in nodes if node not in (holder, keeper)]
        return cls(holder, keeper, others, known, chain)

    async def taken_over(self, world: StageWorld, taker: StageNode) -> None:
        self.holder.kill()
        await anyio.sleep(15)
        world.tasks.start_soon(taker.take, STAGE)
        while STAGE not in taker.held:
            await anyio.sleep(1)
        await anyio.sleep(15)

    async def asked(self, node: StageNode, seconds: float = 20) -> StoredFoundations:
        """The person at this node types `neuroshard run refound`."""
        stored = StoredFoundations(node.data_dir)
        stored.request_new(OFFER)
        founder = Founder(cast("Any", node.swarm), key_of(node.number), stored, offload=at_once)
        with anyio.move_on_after(PATIENCE_SECONDS + seconds):
            await founder.run()
        return stored


def heir_is(node: StageNode) -> list[int]:
    return inherited_stages(node.data_dir, OFFER, node.identity.wallet_id)


@pytest.mark.parametrize("takes_it_over", ["the keeper", "another node"])
def test_the_keeper_of_the_copy_continues_a_lost_stage(takes_it_over: str, tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 0, 1], moves=False) as nodes:
            lost = await LostStage.prepared(nodes)
            assert heir_is(lost.keeper) == [STAGE]
            assert not any(heir_is(node) for node in lost.others)
            taker = lost.keeper if takes_it_over == "the keeper" else lost.others[0]
            await lost.taken_over(world, taker)
            if taker is lost.keeper:  # it has brought the chain along with the state
                stage = taker.stage
                founding = taker.swarm.versions.founding_of(STAGE)
                assert stage is not None
                assert founding is not None
                chain = proven_chain(FileChainStore(stage.store.folder / ROUNDS_FOLDER), founding)
                stub = SimpleNamespace(stage=taker.swarm.name_of(STAGE), chain=SimpleNamespace(last=chain))
                taker.swarm.rounds.add(cast("Any", stub))
            stored = await lost.asked(lost.keeper)
            assert not stored.is_new_requested(OFFER)
            founding = RunVersions(OFFER, stored.read(OFFER)).founding_of(STAGE)
            assert founding is not None
            assert founding.heir is not None
            assert founding.heir.statement == lost.chain.statement
            assert (founding.start.height, founding.start.parent) == (3, lost.chain.standing.value)
            assert [seat.node_id for seat in founding.start.committee.seats] == [taker.name]
            assert taker.stage is not None
            assert founding.start.root == taker.stage.replica_status().root
            before = RunVersions(OFFER, lost.known)
            assert [RunVersions(OFFER, stored.read(OFFER)).founding_of(stage) for stage in (0, 1)] == [
                before.founding_of(stage) for stage in (0, 1)
            ]

    play(tmp_path, scenario)


def test_no_other_wallet_continues_it_and_nobody_while_the_holder_is_here(tmp_path: Path) -> None:
    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 0, 1], moves=False) as nodes:
            lost = await LostStage.prepared(nodes)
            stored = await lost.asked(lost.keeper)
            assert not stored.is_new_requested(OFFER)  # it does not fire later on its own
            assert stored.read(OFFER).successions == {}
            await lost.taken_over(world, lost.others[0])
            stored = await lost.asked(lost.others[0])
            assert stored.read(OFFER).successions == {}

    play(tmp_path, scenario)


@pytest.mark.parametrize("is_invited", [False, True], ids=["no tip", "a tip on the heir's line"])
def test_a_newcomer_asks_whether_an_heir_was_replaced(is_invited: bool, tmp_path: Path) -> None:
    """An old claim of the holder names a node that is its heir no more. The holder is here and certifies steps."""

    async def scenario(world: StageWorld) -> None:
        async with living(world, [0, 1, 2, 0], moves=False) as nodes:
            holder, former = await Donor.trained(nodes[0]), await Donor.trained(nodes[3])
            base = founded(lone(nodes[0].identity))
            said = HeirNaming(base.highest[0].id, 0, 5, nodes[3].identity.wallet_id)
            claim = signed_by(nodes[0].identity, said, NOW).claim
            start = StageStart(0, lone(nodes[3].identity), 10**6, 1, former.root, "b" * 64)
            signed = SignedSuccession.sign(key_of(3), Succession(OFFER.run_id, said.statement, start, claim))
            known = base.with_statements((), (), [signed])
            founding = RunVersions(OFFER, known).founding_of(0)
            assert founding is not None
            assert founding.statement == signed.id
            former.offer(known, Chain.founded(founding))
            holder.offer(known, stage_line(base, holder.root, 20))
            tip = InvitedTip(0, 1, bytes.fromhex(signed.id)) if is_invited else None
            newcomer = invited(world, known, tip)
            assert await has_joined(newcomer, former if is_invited else holder)
            assert newcomer.stage is not None
            stored = FileChainStore(newcomer.stage.store.folder / ROUNDS_FOLDER).read()
            assert stored is not None
            assert stored.statement == (signed.id if is_invited else said.statement)
            chain = proven_chain(FileChainStore(newcomer.stage.store.folder / ROUNDS_FOLDER), founding)
            assert chain.statement == stored.statement  # also after a restart

    play(tmp_path, scenario)


def test_an_heir_continues_from_a_certified_state_before_one_with_more_work() -> None:
    founding = RunVersions(OFFER, founded(lone(HOLDER))).founding_of(0)
    assert founding is not None
    chain = certified(certified(Chain.founded(founding)))
    root = chain.standing.root
    assert root is not None
    states = {
        NodeId("liar"): ReplicaStatus(True, 10**6, 10**6, "f" * 64),
        NodeId("honest"): ReplicaStatus(True, 30, 2, root),
        NodeId("older"): ReplicaStatus(True, 20, 1, chain.recent[0].value.next_root),
    }
    assert best_state(states, chain, NodeId("older")) == "honest"
    del states[NodeId("honest")], states[NodeId("older")]
    assert best_state(states, chain, NodeId("me")) == "liar"
