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
from neuroshard.consensus.committee import ChangeParameters
from neuroshard.consensus.effects import AnyBody
from neuroshard.consensus.foundation import SignedFoundation
from neuroshard.consensus.group_rounds import RoundRequestHandlers
from neuroshard.consensus.round_messages import VerifiedBody, signed_by
from neuroshard.consensus.round_runner import RoundDependencies
from neuroshard.consensus.stage_chain import InMemoryChainStore, StageChain
from neuroshard.consensus.sync_strategies import RunRound
from neuroshard.consensus.vote_log import FileVoteLog
from neuroshard.identity.node_revocations import RevokedPairs
from neuroshard.network import InMemoryNetwork
from neuroshard.pipeline.control import Control
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import LocalStageClient, StageClient
from neuroshard.state.download import ReplicaClient
from neuroshard.state.snapshot_server import SnapshotServer
from neuroshard.status.rounds import MemberPart
from neuroshard.training.parts import DriverParts, TrainerParts
from neuroshard.training.site.site import Site
from neuroshard.training.stage_checkpoint import Stage
from neuroshard.training.stage_replica import StageReplica
from neuroshard.training.trainer import Trainer
from neuroshard.types import DataPosition, LayerRange, NodeId, ShardId, WalletId
from tests.worlds.replicas import IDENTITIES, NOW, QUICK, founding_of
from tests.worlds.replicas import NAMES as REPLICAS
from tests.worlds.stages import IDENTITY, PARAMETERS, MemoryFeed, make_replica, make_stage

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
) -> tuple[StageReplica, ...]:
    """Each stage in a sync group of one."""
    return tuple(
        make_replica(compute, stage, parameters, replace(IDENTITY, layers=LayerRange(start, stop)), number)
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
    return Trainer(parts) if monotonic is None else Trainer(parts, monotonic=monotonic)


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
class BothNodes:
    """The two nodes, each with a replica of every stage; implements RunSwarm for one of them."""

    name: NodeId
    may_meet: bool = True
    word: SignedFoundation | None = None
    changes: tuple[ChangeParameters, ...] = ()

    def replicas(self, stage: int) -> Sequence[NodeId]:
        return [node for node in NAMES if node != self.name]

    def newcomers(self) -> frozenset[NodeId]:
        return frozenset()

    def wallet_of(self, node_id: NodeId) -> WalletId:
        return IDENTITIES[node_id].wallet_id

    def is_removed(self, wallet: WalletId) -> bool:
        return False

    @property
    def revoked(self) -> RevokedPairs:
        return frozenset()

    def sign(self, body: AnyBody) -> VerifiedBody[AnyBody]:
        return signed_by(IDENTITIES[self.name], body, NOW)


def node_of(
    compute: ComputeThread,
    folder: Path,
    name: NodeId,
    network: InMemoryNetwork,
    shard: int,
    *,
    parameters: RunParameters = TOGETHER,
    batch_seconds: float = 0.0,
    site: Site | None = None,
) -> Node:
    """A node whose feed takes `batch_seconds` for a batch. With a `site`, its ranks compute."""
    identity = replace(IDENTITY, node_id=name, wallet_id=IDENTITIES[name].wallet_id)
    cuts = CUTS if parameters.stage_count > 1 else (CUTS[0], CUTS[-1])
    transport, donor, door = network.join(name), SnapshotServer(lambda node: node in NAMES), RoundRequestHandlers()
    control, founding = Control(), founding_of(NAMES)
    held = list[StageReplica]()
    for number, layers in enumerate(LayerRange(*cut) for cut in pairwise(cuts)):
        known = replace(identity, layers=layers)
        stage = make_stage(compute, folder / name / str(number), parameters, known, site=site)
        around = RoundDependencies(
            BothNodes(name),
            ReplicaClient(transport),
            FileVoteLog(folder / name / f"rounds-{number}"),
            StageChain(lambda: founding, InMemoryChainStore()),
            times=QUICK,
            now=lambda: NOW,
        )
        replica = StageReplica(
            compute, stage, known, parameters, number, versions=lambda _: parameters, control=control, around=around
        )
        donor.offer(replica.stage, replica)
        assert replica.group is not None
        door.add(replica.group)
        held.append(replica)
    donor.serve(transport)
    door.serve(transport)
    node = Node(others=[Noted() for _ in held[1:]])
    for noted, part in zip((node, *node.others), held, strict=True):
        note_rounds(noted, part)
    feed = MemoryFeed(DataPosition(shard, ShardId(shard), 0), batch_seconds)
    routing = FixedRouting([LocalStageClient(part.service, name) for part in held])
    parts = TrainerParts(parameters, tuple(held), DriverParts(name, feed, routing))
    node.trainer = Trainer(parts, control=control)
    return node


def note_rounds(noted: Noted, held: StageReplica) -> None:
    """Remember what the stage holds after each round."""
    outer, executor, run_round = held.outer, held.executor, held.outer.run_round

    async def note(exchange: RunRound, now: float) -> bool:
        completed = await run_round(exchange, now)
        if completed:
            noted.anchors.append(outer.state.anchor)
            noted.scheduled.append(outer.state.line.sequences)
            noted.weights.append(await held.service.compute.run(executor.vector))
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
