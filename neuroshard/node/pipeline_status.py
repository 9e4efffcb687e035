"""The pipeline as the status tells it: every stage of the run's plan with the nodes that hold it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from neuroshard.model.stage_plan import StagePlan
from neuroshard.node.stage_swarm import AT_WORK, GONE, HOLDING, StageSwarm
from neuroshard.status.pipeline import PipelineFlow, PipelineStage, PipelineStatus
from neuroshard.status.snapshot import NodeState
from neuroshard.swarm.stage_coverage import StageRange, layers_of, missing_sentence
from neuroshard.types import NodeId

_AT_HAND = {NodeState.STARTING: NodeState.TRAINING}  # stages that are held here can be used before the first step


@dataclass(frozen=True)
class Holding:
    """A node, the stages it told or has, and what it does."""

    node_id: NodeId
    stages: StageRange
    state: NodeState


@dataclass
class _Row:
    ready: list[NodeId] = field(default_factory=list[NodeId])
    paused: list[NodeId] = field(default_factory=list[NodeId])
    joining: list[NodeId] = field(default_factory=list[NodeId])

    def nodes(self, state: NodeState) -> list[NodeId]:
        """Where nodes in this state stand."""
        if state in AT_WORK:
            return self.ready
        return self.paused if state in HOLDING else self.joining


def pipeline_stages(plan: StagePlan, holdings: Iterable[Holding]) -> tuple[PipelineStage, ...]:
    """Every stage of the plan, also one that nobody holds; nodes in the order in which they are given."""
    rows = [_Row() for _ in plan]
    for holding in holdings:
        if holding.state not in GONE:
            for stage in holding.stages:
                rows[stage].nodes(holding.state).append(holding.node_id)
    return tuple(
        PipelineStage(index, layers, tuple(row.ready), tuple(row.paused), tuple(row.joining))
        for index, (layers, row) in enumerate(zip(plan, rows, strict=True))
    )


def pipeline_status(swarm: StageSwarm, state: NodeState, flow: PipelineFlow | None) -> PipelineStatus:
    """The pipeline now; `state` is this node's, whose own report may be some seconds old."""
    held = swarm.held
    own = [] if held is None else [Holding(swarm.node_id, held, _AT_HAND.get(state, state))]
    others = [
        Holding(member.node_id, stages, member.report.state)
        for member in swarm.membership.view.members.values()
        if member.node_id != swarm.node_id
        and member.report.layers is not None
        and (stages := swarm.stages_of(member.report.layers)) is not None
    ]
    stages = pipeline_stages(swarm.plan, [*own, *others])
    missing = layers_of((stage.index for stage in stages if stage.is_missing), swarm.plan)
    return PipelineStatus(stages, missing_sentence(missing), flow)
