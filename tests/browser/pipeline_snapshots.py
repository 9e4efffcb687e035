"""Snapshots of nodes in pipelines: three stages, a gap, a crowd."""

from __future__ import annotations

import time
from dataclasses import replace

import snapshots
from swarm_snapshots import among, peer_id

from neuroshard.model.architecture import StagePlan
from neuroshard.pipeline.microbatch_call import flow_of
from neuroshard.status.pipeline import (
    HopTimes,
    MicrobatchTrace,
    PipelineFlow,
    PipelineStage,
    PipelineStatus,
    Takeover,
)
from neuroshard.status.snapshot import ModelStatus, NodeState, NodeStatus, StageStatus
from neuroshard.types import LayerRange, NodeId, Role

ME = snapshots.training().node_id or NodeId("")
LAYERS = 12
TAKEN_OVER = 20  # the microbatch in which another computer took over


def holders(stages: int, replicas: int) -> tuple[PipelineStage, ...]:
    """Every stage at `replicas` nodes of its own; this node has the first one."""
    plan = StagePlan.even(max(LAYERS, stages), stages)
    rows: list[PipelineStage] = []
    for index, layers in enumerate(plan):
        nodes = tuple(peer_id(index * replicas + number) for number in range(replicas))
        rows.append(PipelineStage(index, layers, (ME, *nodes[1:]) if index == 0 else nodes))
    return tuple(rows)


def passages(stages: tuple[PipelineStage, ...], count: int = 32) -> tuple[MicrobatchTrace, ...]:
    """Microbatches whose second stage takes longest; in one of them it was taken over."""
    now = time.time()
    rows: list[MicrobatchTrace] = []
    for number in range(count):
        hops = tuple(
            HopTimes(
                stage.ready[number % len(stage.ready)],
                compute_seconds=0.125 if stage.index != 1 else 0.25,
                wait_seconds=0.0625 if stage.index != 1 else 0.5,
                wire_seconds=0.03125 if stage.index else 0.0,
                bytes_sent=262_144 if stage.index else 0,
                bytes_received=262_144 if stage.index else 0,
            )
            for stage in stages
        )
        is_taken_over = number == TAKEN_OVER and len(stages) > 1
        takeovers = (Takeover(1, peer_id(900), hops[1].node_id, is_exact=False),) if is_taken_over else ()
        lost = 0.5 if is_taken_over else 0.0
        seconds = sum(hop.seconds for hop in hops) + lost
        rows.append(
            MicrobatchTrace(
                5, number, now - 2 * (count - number), seconds, 1024, hops, takeovers, failures=len(takeovers)
            )
        )
    return tuple(rows)


def flow(stages: tuple[PipelineStage, ...]) -> PipelineFlow:
    """What a driver tells of the last minute."""
    recent = passages(stages)
    return replace(flow_of(recent, 60.0), exact_takeovers=2, approximate_takeovers=1, failures=4, recent=recent)


def own_stage(stage: PipelineStage) -> StageStatus:
    """With three of eight passages for the next step."""
    return StageStatus(stage.index, stage.layers, 764, 1, 3.605, 0.42, 3, 8, 2, 1, "ab" * 32, 750)


def driver(stages: tuple[PipelineStage, ...] | None = None) -> NodeStatus:
    """Drives a run of three stages on three computers."""
    stages = stages or holders(3, 1)
    status = among(max(len(stages) - 1, 1))
    assert status.model is not None
    layers = stages[0].layers
    count = stages[-1].layers.stop
    shape = replace(status.model.architecture, layer_count=count)
    return replace(
        status,
        model=ModelStatus(shape, 9_412_352, layers, layers.roles(count)),
        stages=(own_stage(stages[0]),),
        pipeline=PipelineStatus(stages, "", flow(stages)),
    )


def worker() -> NodeStatus:
    """Holds the middle one of three stages and drives nothing."""
    status = driver()
    assert status.pipeline is not None
    assert status.model is not None
    first, middle, last = status.pipeline.stages
    stages = (replace(first, ready=(peer_id(0),)), replace(middle, ready=(ME,)), last)
    return replace(
        status,
        model=replace(status.model, layers=middle.layers, roles=(Role.WORKER,)),
        stages=(replace(own_stage(middle), loss=None),),
        pipeline=PipelineStatus(stages),
    )


def gap() -> NodeStatus:
    """Nobody has the last of three stages yet, and somebody gets ready for it."""
    status = driver()
    assert status.pipeline is not None
    first, middle, last = status.pipeline.stages
    stages = (first, middle, replace(last, ready=(), joining=last.ready))
    missing = "Layers 9-12 are missing."
    return replace(
        status,
        state=NodeState.WAITING_FOR_STAGES,
        state_reason=missing,
        pipeline=PipelineStatus(stages, missing, PipelineFlow()),
    )


def resting() -> NodeStatus:
    """The only holder of the second stage is paused."""
    status = driver()
    assert status.pipeline is not None
    first, middle, last = status.pipeline.stages
    stages = (first, replace(middle, ready=(), paused=middle.ready), last)
    return replace(status, pipeline=replace(status.pipeline, stages=stages))


def one_stage() -> NodeStatus:
    """The whole model here, as on a lone node."""
    stages = (PipelineStage(0, LayerRange(0, 6), (ME,)),)
    return replace(
        snapshots.training(), stages=(own_stage(stages[0]),), pipeline=PipelineStatus(stages, "", flow(stages))
    )


def crowd() -> NodeStatus:
    """64 stages with 200 computers each."""
    return driver(holders(64, 200))


def silent() -> NodeStatus:
    """The only holder of the second stage has died, and nobody has noticed but this driver."""
    status = driver()
    assert status.pipeline is not None
    assert status.pipeline.flow is not None
    waiting = replace(status.pipeline.flow, unanswered=(1,))
    return replace(
        status,
        state=NodeState.WAITING_FOR_STAGES,
        state_reason="All nodes that hold a stage fail; this node tries them again.",
        pipeline=replace(status.pipeline, flow=waiting),
    )


def trainer() -> NodeStatus:
    """Drives the stages of others and holds none."""
    status = driver()
    assert status.pipeline is not None
    assert status.model is not None
    first, *others = status.pipeline.stages
    return replace(
        status,
        model=replace(status.model, layers=None),
        stages=(),
        pipeline=replace(status.pipeline, stages=(replace(first, ready=(peer_id(0),)), *others)),
    )
