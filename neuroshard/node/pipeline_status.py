"""The pipeline as the status shows it: every stage of the run's plan with the nodes that hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import anyio

from neuroshard.membership.stage_coverage import StageRange, layers_of, missing_sentence
from neuroshard.model.architecture import StagePlan
from neuroshard.network import Network
from neuroshard.node.stage_swarm import AT_WORK, GONE, HOLDING, StageSwarm
from neuroshard.status.board import Publisher
from neuroshard.status.pipeline import PipelineFlow, PipelineStage, PipelineStatus, StateCopyStatus
from neuroshard.status.snapshot import NodeState, NodeStatus
from neuroshard.types import LayerRange, NodeId
from neuroshard.waiting import sleep_to_tick

LOOK_SECONDS = 1.0
_AT_HAND = {NodeState.STARTING: NodeState.TRAINING}  # stages that are held here can be used before the first step


@dataclass(frozen=True)
class Holding:
    """A node, the stages that it reports or holds, and its state."""

    node_id: NodeId
    stages: StageRange
    state: NodeState


@dataclass
class _Row:
    ready: list[NodeId] = field(default_factory=list[NodeId])
    paused: list[NodeId] = field(default_factory=list[NodeId])
    joining: list[NodeId] = field(default_factory=list[NodeId])

    def nodes(self, state: NodeState) -> list[NodeId]:
        """The list for nodes in this state: ready, paused or joining."""
        if state in AT_WORK:
            return self.ready
        return self.paused if state in HOLDING else self.joining


def pipeline_stages(plan: StagePlan, holdings: Iterable[Holding]) -> tuple[PipelineStage, ...]:
    """List every stage of the plan, even without holders; nodes keep the order of `holdings`."""
    rows = [_Row() for _ in plan]
    for holding in holdings:
        if holding.state not in GONE:
            for stage in holding.stages:
                rows[stage].nodes(holding.state).append(holding.node_id)
    return tuple(
        PipelineStage(index, layers, tuple(row.ready), tuple(row.paused), tuple(row.joining))
        for index, (layers, row) in enumerate(zip(plan, rows, strict=True))
    )


def pipeline_status(
    swarm: StageSwarm, state: NodeState, flow: PipelineFlow | None = None, wanted: LayerRange | None = None
) -> PipelineStatus:
    """Build the status of the pipeline. `state` is this node's present one: its own report may be seconds old.

    `wanted` are the layers that this node prepares while it holds none.
    """
    held, coming = swarm.held, None if wanted is None else swarm.stages_of(wanted)
    own: list[Holding] = []
    if held is not None:
        own.append(Holding(swarm.node_id, held, _AT_HAND.get(state, state)))
    elif coming is not None:
        own.append(Holding(swarm.node_id, coming, state))
    others = [
        Holding(member.node_id, stages, member.report.state)
        for member in swarm.membership.view.members.values()
        if member.node_id != swarm.node_id
        and member.node_id not in swarm.lost
        and member.report.layers is not None
        and (stages := swarm.stages_of(member.report.layers)) is not None
    ]
    stages = tuple(
        replace(stage, copy=_copy_of(swarm, stage)) for stage in pipeline_stages(swarm.plan, [*own, *others])
    )
    missing = layers_of((stage.index for stage in stages if stage.is_missing), swarm.plan)
    return PipelineStatus(stages, missing_sentence(missing), flow)


def _copy_of(swarm: StageSwarm, stage: PipelineStage) -> StateCopyStatus | None:
    """Status of the copy of a stage with a single holder, according to that holder; None for other stages."""
    holder = next(iter((*stage.ready, *stage.paused)), None)
    if not stage.has_single_holder:
        return None
    if holder == swarm.node_id:
        status = swarm.donor.replica_status(swarm.name_of(stage.index))
        return None if status is None or not status.is_live else StateCopyStatus(status.copied_seconds)
    copy = swarm.reported_copies.get(stage.index)
    if copy is None or copy.holder != holder:
        return None
    age = None if copy.age_seconds is None else copy.age_seconds + anyio.current_time() - copy.reported_at
    return StateCopyStatus(age)


async def publish_stages(
    swarm: StageSwarm, publisher: Publisher, current: Callable[[], NodeStatus], _network: Network
) -> None:
    """Publish the pipeline while this node starts, until cancelled; after that the observer publishes it."""
    while True:
        await sleep_to_tick(LOOK_SECONDS)
        status = current()
        if status.state is NodeState.STARTING:
            wanted = None if status.model is None else status.model.layers
            publisher.change(pipeline=pipeline_status(swarm, status.state, wanted=wanted))
