"""Trainers in one process that hold all layers, in one stage or in three, alone or in groups.

Real: the training, its rounds and its checkpoints, by the real clock. Simulated: the data and the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import anyio
import torch
from torch import Tensor

from neuroshard.config.run_parameters import OuterOptimization, RunParameters
from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.effects import AnyBody
from neuroshard.consensus.group_rounds import AcceptanceCheck, GroupRounds, RoundRequestHandlers
from neuroshard.consensus.matchmaking import Replica
from neuroshard.consensus.round_messages import VerifiedBody, signed_by
from neuroshard.consensus.stage_chain import InMemoryChainStore, StageChain
from neuroshard.consensus.sync_strategies import RunRound, StageRounds
from neuroshard.consensus.vote_log import FileVoteLog
from neuroshard.model.weights import TensorSchema, flatten
from neuroshard.network import InMemoryNetwork, Transport
from neuroshard.pipeline.control import Control
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import LocalStageClient, StageClient
from neuroshard.state.download import ReplicaClient
from neuroshard.state.snapshot_server import SnapshotServer
from neuroshard.state.transfer_messages import StageName
from neuroshard.status.rounds import MemberPart
from neuroshard.training.held_out_vote import HeldOutVote
from neuroshard.training.outer_sync import ReplicaProgress, lone_exchange
from neuroshard.training.parts import DriverParts, StageParts, TrainerParts
from neuroshard.training.stage_checkpoint import Stage
from neuroshard.training.state_transfer import StateDonor
from neuroshard.training.trainer import Trainer
from neuroshard.types import DataPosition, LayerRange, NodeId, ShardId
from tests.worlds.replicas import IDENTITIES, NOW, QUICK, founding_of
from tests.worlds.replicas import NAMES as REPLICAS
from tests.worlds.stages import IDENTITY, PARAMETERS, MemoryFeed, make_parts, make_stage

CUTS = (0, 1, 2, 3)
WHOLE = replace(PARAMETERS, sequences_per_step=8, inner=replace(PARAMETERS.inner, max_grad_norm=1e9))  # never clipped
SPLIT = replace(WHOLE, stage_count=3)


def make_stages(compute: ComputeThread, folder: Path, parameters: RunParameters = SPLIT) -> list[Stage]:
    """Built or restored, each in a folder of its own."""
    return [
        make_stage(compute, folder / str(number), parameters, replace(IDENTITY, layers=LayerRange(start, stop)))
        for number, (start, stop) in enumerate(pairwise(CUTS))
    ]


def parts_of(
    compute: ComputeThread, stages: Sequence[Stage], parameters: RunParameters = SPLIT
) -> tuple[StageParts, ...]:
    """Each stage in a sync group of one."""
    return tuple(
        make_parts(compute, stage, parameters, replace(IDENTITY, layers=LayerRange(start, stop)), number)
        for number, (stage, (start, stop)) in enumerate(zip(stages, pairwise(CUTS), strict=True))
    )


def make_split_trainer(
    compute: ComputeThread,
    stages: Path | list[Stage],
    *,
    feed: MemoryFeed | None = None,
    in_flight: int = 1,
    parameters: RunParameters = SPLIT,
    wrap: Callable[[int, LocalStageClient], StageClient] = lambda _, hop: hop,
    monotonic: Callable[[], float] | None = None,
) -> Trainer:
    """Drives microbatches through its own three stages, given ones or those that a folder holds."""
    stages = make_stages(compute, stages, parameters) if isinstance(stages, Path) else stages
    held = parts_of(compute, stages, parameters)
    feed = feed or MemoryFeed(stages[0].record.progress.position)
    routing = FixedRouting([wrap(part.index, LocalStageClient(part.service, IDENTITY.node_id)) for part in held])
    parts = TrainerParts(parameters, held, DriverParts(IDENTITY.node_id, feed, routing, in_flight))
    records = [stage.record for stage in stages]
    return Trainer(parts, records) if monotonic is None else Trainer(parts, records, monotonic=monotonic)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """By name, of all stages."""
    return {
        name: parameter.detach().clone()
        for stage in trainer.parts.stages
        for name, parameter in stage.executor.model.named_parameters()
    }


TOGETHER = replace(PARAMETERS, outer=OuterOptimization(inner_steps=6, interval="fixed"))
NAMES = REPLICAS[:2]


@dataclass
class Noted:
    """What a stage held after each of its rounds."""

    anchors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    weights: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    scheduled: list[int] = field(default_factory=list[int])  # sequences


@dataclass
class Node(Noted):
    """What is noted of its first stage, and its trainer."""

    trainer: Trainer = field(default_factory=lambda: Trainer.__new__(Trainer))
    others: list[Noted] = field(default_factory=list[Noted])  # of the stages behind the first one


@dataclass(frozen=True)
class Place:
    """Where the groups of a node's stages are."""

    name: NodeId
    folder: Path
    transport: Transport
    donor: SnapshotServer
    door: RoundRequestHandlers
    parameters: RunParameters
    control: Control


def node_of(
    compute: ComputeThread,
    folder: Path,
    name: NodeId,
    network: InMemoryNetwork,
    shard: int,
    *,
    parameters: RunParameters = TOGETHER,
    batch_seconds: float = 0.0,
) -> Node:
    """A node whose feed takes `batch_seconds` for a batch."""
    identity = replace(IDENTITY, node_id=name)
    cuts = CUTS if parameters.stage_count > 1 else (CUTS[0], CUTS[-1])
    transport, donor, door = network.join(name), SnapshotServer(lambda node: node in NAMES), RoundRequestHandlers()
    control = Control()
    place = Place(name, folder / name, transport, donor, door, parameters, control)
    stages, held = list[Stage](), list[StageParts]()
    for number, layers in enumerate(LayerRange(*cut) for cut in pairwise(cuts)):
        known = replace(identity, layers=layers)
        stage = make_stage(compute, folder / name / str(number), parameters, known)
        part = make_parts(compute, stage, parameters, known, number)
        stages.append(stage)
        held.append(in_group(compute, part, stage, StageName(known.run_id, layers), place))
    donor.serve(transport)
    door.serve(transport)
    node = Node(others=[Noted() for _ in held[1:]])
    for noted, part in zip((node, *node.others), held, strict=True):
        note_rounds(noted, part)
    feed = MemoryFeed(DataPosition(shard, ShardId(shard), 0), batch_seconds)
    routing = FixedRouting([LocalStageClient(part.service, name) for part in held])
    parts = TrainerParts(parameters, tuple(held), DriverParts(name, feed, routing))
    node.trainer = Trainer(parts, [stage.record for stage in stages], control=control)
    return node


def in_group(compute: ComputeThread, held: StageParts, stage: Stage, stage_name: StageName, place: Place) -> StageParts:
    """A stage whose other replica is at the other node."""
    parameters, known, outer = place.parameters, IDENTITIES[place.name], held.outer
    rounds = StageRounds(stage_name.run_id, held.index, TensorSchema.of(stage.executor.model), parameters.outer)
    progress = ReplicaProgress(outer, stage.record)

    def peers() -> Sequence[NodeId]:
        return [node for node in NAMES if node != place.name]

    def sign(body: AnyBody) -> VerifiedBody[AnyBody]:
        return signed_by(known, body, NOW)

    replica = Replica(
        GroupMember(place.name, known.wallet_id),
        stage_name,
        rounds,
        outer.sequences_due,
        progress.status,
        peers,
        lambda node: IDENTITIES[node].wallet_id,
        lambda: place.control.must_hold is None,
        lambda: NOW,
    )
    vote = HeldOutVote(compute, stage.executor, outer, parameters.batch_size)
    founding = founding_of(NAMES)
    group = GroupRounds(
        replica,
        ReplicaClient(place.transport),
        lone_exchange,
        sign,
        AcceptanceCheck(outer.root_after, outer.measured_candidates, vote.objection, vote.choice),
        book=FileVoteLog(place.folder / f"rounds-{held.index}"),
        chain=StageChain(lambda: founding, InMemoryChainStore()),
        times=QUICK,
        note_abandoned=outer.note_abandoned,
    )
    place.donor.offer(stage_name, StateDonor(stage.keeper, outer, progress, group))
    place.door.add(group)
    return replace(held, group=group, vote=vote)


def note_rounds(noted: Noted, held: StageParts) -> None:
    """Remember what the stage holds after each round."""
    outer, model, run_round = held.outer, held.executor.model, held.outer.run_round

    async def note(exchange: RunRound, now: float) -> bool:
        completed = await run_round(exchange, now)
        if completed:
            noted.anchors.append(outer.state.anchor)
            noted.scheduled.append(outer.state.line.sequences)
            noted.weights.append(await held.service.compute.run(lambda: flatten(model).clone()))
        return completed

    outer.run_round = note  # type: ignore[method-assign]


def accepted_rounds(node: Node, name: NodeId) -> set[int]:
    """The outer steps whose aggregate contains all work that the node had done in its first stage.

    On a busy machine a round may leave a node out that comes too late.
    """
    group = node.trainer.parts.stages[0].group
    assert group is not None
    return {
        record.outer_step
        for record in group.status.recent
        if not record.is_late
        for member in record.members
        if (member.node_id, member.part) == (name, MemberPart.ACCEPTED)
    }


async def trained_until(are_done: Callable[[], bool], nodes: Sequence[Node]) -> None:
    """All of them, side by side."""
    async with anyio.create_task_group() as tasks:
        for node in nodes:
            tasks.start_soon(node.trainer.run)
        while not are_done():
            await anyio.sleep(0.02)
        for node in nodes:
            node.trainer.stop()
