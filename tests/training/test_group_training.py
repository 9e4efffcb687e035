"""Trainers of one model in one process that average over an in-memory network, with all their real parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import pytest
import torch
import trio
from replica_world import IDENTITIES, NOW, QUICK
from replica_world import NAMES as REPLICAS
from small_stage import IDENTITY, PARAMETERS, MemoryFeed, make_parts, make_stage

from neuroshard.config.run_parameters import OuterOptimization, RunParameters, StrategyName
from neuroshard.model.tensor_schema import TensorSchema, flatten
from neuroshard.network import InMemoryNetwork, Link
from neuroshard.swarm.certified.messages import Signed
from neuroshard.swarm.certified.packets import signed_by
from neuroshard.swarm.certified.roster import Member
from neuroshard.swarm.certified.setting import AnyBody
from neuroshard.training.compute import ComputeThread
from neuroshard.training.exchange import StageRounds
from neuroshard.training.held_out_vote import HeldOutVote
from neuroshard.training.loop import Trainer
from neuroshard.training.outer_sync import Abandoned, Outcome, state_root
from neuroshard.training.parts import Driving, StageParts, TrainerParts
from neuroshard.training.pipeline import LocalHop
from neuroshard.training.rounds.door import RoundDoor
from neuroshard.training.rounds.gathering import Replica
from neuroshard.training.rounds.group_rounds import GroupRounds, Judging
from neuroshard.training.rounds.vote_book import FolderBook
from neuroshard.training.routing import FixedRouting
from neuroshard.training.strategy import FragmentStep, strategy_at
from neuroshard.training.transfer.donor import Donor
from neuroshard.training.transfer.download import Asking
from neuroshard.training.transfer.fields import StageName
from neuroshard.training.transfer.live_snapshots import LiveSnapshots
from neuroshard.types import DataPosition, NodeId, ShardId

TOGETHER = replace(PARAMETERS, outer=OuterOptimization(inner_steps=6))
STAGE = StageName(IDENTITY.run_id, IDENTITY.layers)
NAMES = REPLICAS[:2]


@dataclass
class Node:
    trainer: Trainer
    anchors: list[torch.Tensor]  # after each round
    weights: list[torch.Tensor]
    scheduled: list[int]  # sequences, after each round


def node_of(
    compute: ComputeThread,
    folder: Path,
    name: NodeId,
    network: InMemoryNetwork,
    shard: int,
    *,
    parameters: RunParameters = TOGETHER,
) -> Node:
    identity = replace(IDENTITY, node_id=name)
    stage = make_stage(compute, folder / name, parameters, identity)
    alone = make_parts(compute, stage, parameters, identity)
    transport = network.join(name)
    rounds = StageRounds(identity.run_id, 0, TensorSchema.of(stage.executor.model), parameters.outer)
    snapshots = LiveSnapshots(stage.keeper, alone.outer, lambda: stage.record.progress.steps)

    def peers() -> Sequence[NodeId]:
        return [node for node in NAMES if node != name]

    known = IDENTITIES[name]

    def sign(body: AnyBody) -> Signed[AnyBody]:
        return signed_by(known, body, NOW)

    replica = Replica(
        Member(name, known.wallet_id),
        STAGE,
        rounds,
        parameters.sequences_per_step,
        snapshots.own,
        peers,
        lambda node: IDENTITIES[node].wallet_id,
    )
    vote = HeldOutVote(compute, stage.executor, alone.outer, parameters.batch_size)
    group = GroupRounds(
        replica,
        Asking(transport),
        alone.outer.exchange,
        sign,
        Judging(alone.outer.root_after, vote.objection),
        book=FolderBook(folder / name / "rounds"),
        times=QUICK,
    )
    alone.outer.exchange, snapshots.in_group = group.exchange, group.gathering.standing
    group.abandoned = alone.outer.note_abandoned
    donor, door = Donor(lambda node: node in NAMES), RoundDoor()
    donor.offer(STAGE, snapshots)
    donor.serve(transport)
    door.add(group)
    door.serve(transport)
    held = replace(alone, group=group, vote=vote)
    node = Node(Trainer.__new__(Trainer), [], [], [])
    note_rounds(node, held)
    feed = MemoryFeed(DataPosition(shard, ShardId(shard), 0))
    parts = TrainerParts(parameters, (held,), Driving(name, feed, FixedRouting([LocalHop(held.service)])))
    node.trainer = Trainer(parts, [stage.record])
    return node


def note_rounds(node: Node, held: StageParts) -> None:
    """Remember what the stage holds after each round."""
    outer, model, run_round = held.outer, held.executor.model, held.outer.run_round

    async def noted(now: float) -> bool:
        completed = await run_round(now)
        if completed:
            node.anchors.append(outer.state.anchor)
            node.scheduled.append(outer.progress.line_sequences)
            node.weights.append(await held.service.compute.run(lambda: flatten(model).clone()))
        return completed

    outer.run_round = noted  # type: ignore[method-assign]


async def trained_until(are_done: Callable[[], bool], nodes: Sequence[Node]) -> None:
    """All of them, side by side."""
    async with anyio.create_task_group() as tasks:
        for node in nodes:
            tasks.start_soon(node.trainer.run)
        while not are_done():
            await anyio.sleep(0.02)
        for node in nodes:
            node.trainer.stop()


def test_a_paused_node_agrees_to_no_round(tmp_path: Path) -> None:
    compute = ComputeThread(cpu_threads=1)
    with InMemoryNetwork() as network:
        trainer = node_of(compute, tmp_path, NAMES[0], network, 0).trainer
        group = trainer.parts.stages[0].group
        assert group is not None
        assert group.gathering.may_take_part()
        trainer.pause()
        assert not group.gathering.may_take_part()
        trainer.resume()
        assert group.gathering.may_take_part()
    compute.close()


def test_two_trainers_hold_the_same_weights_after_each_round(tmp_path: Path) -> None:
    computes = [ComputeThread(cpu_threads=1) for _ in NAMES]

    async def main() -> list[Node]:
        with InMemoryNetwork() as network, anyio.fail_after(100):
            nodes = [
                node_of(compute, tmp_path, name, network, shard)
                for shard, (compute, name) in enumerate(zip(computes, NAMES, strict=True))
            ]

            await trained_until(lambda: all(len(node.weights) >= 3 for node in nodes), nodes)
            return nodes

    try:
        a, b = trio.run(main)
    finally:
        for compute in computes:
            compute.close()
    for number in range(3):
        assert torch.equal(a.anchors[number], b.anchors[number])
        assert torch.equal(a.weights[number], b.weights[number])
        assert torch.equal(a.weights[number], a.anchors[number])
        assert a.scheduled[number] == b.scheduled[number] > 0
    told = a.trainer.snapshot().diloco
    assert told.members == 2
    (rounds,) = told.rounds
    assert [record.outer_step for record in rounds.recent] == list(range(rounds.completed))
    assert {len(record.contributions) for record in rounds.recent} == {2}
    group = a.trainer.parts.stages[0].group
    assert group is not None
    assert (
        told.certified_root
        == group.certified_root(told.outer_steps)
        == state_root(a.trainer.parts.stages[0].outer.state)
    )
    assert a.trainer.record.progress.position != b.trainer.record.progress.position  # each has data of its own


@pytest.mark.parametrize(("strategy", "numbers"), [("diloco", 6), ("sparta", 6), ("streaming", 24)])
def test_two_trainers_train_on_during_their_rounds(tmp_path: Path, strategy: StrategyName, numbers: int) -> None:
    computes = [ComputeThread(cpu_threads=1) for _ in NAMES]
    overlapped = replace(TOGETHER, outer=OuterOptimization(inner_steps=numbers, strategy=strategy, overlap=True))

    async def main() -> list[Node]:
        with InMemoryNetwork(default_link=Link(delay_seconds=0.05)) as network, anyio.fail_after(100):
            nodes = [
                node_of(compute, tmp_path, name, network, shard, parameters=overlapped)
                for shard, (compute, name) in enumerate(zip(computes, NAMES, strict=True))
            ]
            await trained_until(lambda: all(len(node.anchors) >= 3 for node in nodes), nodes)
            return nodes

    try:
        a, b = trio.run(main)
    finally:
        for compute in computes:
            compute.close()
    for number in range(3):
        assert torch.equal(a.anchors[number], b.anchors[number])
        assert not torch.equal(a.weights[number], a.anchors[number])  # they hold steps that the anchor lacks
        assert not torch.equal(a.weights[number], b.weights[number])
        assert a.scheduled[number] == b.scheduled[number] > 0
    (rounds,) = a.trainer.snapshot().diloco.rounds
    assert all(record.certificate is not None and not record.is_late for record in rounds.recent)
    for node in (a, b):
        progress, record = node.trainer.parts.stages[0].outer.progress, node.trainer.record.progress
        assert progress.successful >= 3
        assert progress.failed == 0
        assert 0 < progress.inner_steps < record.steps


@pytest.mark.parametrize(("strategy", "numbers"), [("sparta", 6), ("streaming", 24)])
def test_two_trainers_agree_on_a_part_of_the_weights_in_each_round(
    tmp_path: Path, strategy: StrategyName, numbers: int
) -> None:
    """A part has its turn after 6 inner steps; the rest of the weights are each node's own."""
    computes = [ComputeThread(cpu_threads=1) for _ in NAMES]
    parameters = replace(TOGETHER, outer=OuterOptimization(inner_steps=numbers, strategy=strategy))

    async def main() -> list[Node]:
        with InMemoryNetwork() as network, anyio.fail_after(100):
            nodes = [
                node_of(compute, tmp_path, name, network, shard, parameters=parameters)
                for shard, (compute, name) in enumerate(zip(computes, NAMES, strict=True))
            ]
            await trained_until(lambda: all(len(node.weights) >= 6 for node in nodes), nodes)
            return nodes

    try:
        a, b = trio.run(main)
    finally:
        for compute in computes:
            compute.close()
    schema = TensorSchema.of(a.trainer.parts.stages[0].executor.model)
    for number in range(6):
        assert torch.equal(a.anchors[number], b.anchors[number])
        step = strategy_at(parameters.outer, schema, number)
        assert isinstance(step, FragmentStep)
        part = step.fragment.of
        assert torch.equal(part(a.weights[number]), part(a.anchors[number]))
        assert torch.equal(part(b.weights[number]), part(a.anchors[number]))
        assert not torch.equal(a.weights[number], b.weights[number])
    for node in (a, b):
        vote = node.trainer.parts.stages[0].vote
        assert vote is not None
        assert "No objection" in vote.explanation


def test_an_aggregate_that_makes_the_model_worse_is_voted_down_and_the_next_good_one_passes(tmp_path: Path) -> None:
    """One of two hands in the opposite of what it has learned, many times over."""
    computes = [ComputeThread(cpu_threads=1) for _ in NAMES]

    async def main() -> tuple[list[Node], list[Outcome]]:
        with InMemoryNetwork() as network, anyio.fail_after(100):
            nodes = [
                node_of(compute, tmp_path, name, network, shard)
                for shard, (compute, name) in enumerate(zip(computes, NAMES, strict=True))
            ]
            outers = [node.trainer.parts.stages[0].outer for node in nodes]
            honest, outcomes = [outer.exchange for outer in outers], list[Outcome]()

            async def poisoned(contribution: torch.Tensor, outer_step: int) -> Outcome:
                return await honest[1](-20 * contribution, outer_step)

            async def noted(contribution: torch.Tensor, outer_step: int) -> Outcome:
                outcomes.append(await honest[0](contribution, outer_step))
                if len(outcomes) == 2:
                    outers[1].exchange = honest[1]
                return outcomes[-1]

            outers[0].exchange, outers[1].exchange = noted, poisoned

            await trained_until(lambda: all(node.anchors for node in nodes), nodes)
            return nodes, outcomes

    try:
        nodes, outcomes = trio.run(main)
    finally:
        for compute in computes:
            compute.close()
    for refused in outcomes[:2]:
        assert isinstance(refused, Abandoned)
        assert "votes no: held-out loss" in refused.reason
    assert torch.equal(nodes[0].anchors[0], nodes[1].anchors[0])
    vote = nodes[0].trainer.parts.stages[0].vote
    assert vote is not None
    assert vote.explanation.startswith("No objection: held-out loss")
