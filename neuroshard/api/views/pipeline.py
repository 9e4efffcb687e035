"""Snapshot to answers about the pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from neuroshard.api.bodies.base import Layers
from neuroshard.api.bodies.pipeline import (
    BottleneckBody,
    FlowBody,
    HopBody,
    OwnStageBody,
    PassageBody,
    PipelineBody,
    PipelineSummary,
    StageBody,
    StageLoadBody,
    TakeoverBody,
)
from neuroshard.status.pipeline import Passage, PipelineFlow, PipelineStage
from neuroshard.status.snapshot import ModelStatus, NodeStatus, StageStatus
from neuroshard.types import LayerRange, NodeId


def pipeline_view(status: NodeStatus) -> PipelineBody:
    """GET /api/pipeline."""
    stages = stages_of(status)
    layer_count = status.model.architecture.layer_count if status.model else 0
    held = (stage.layers for stage in stages if not stage.is_missing)
    covered = {layer for layers in held for layer in range(layers.start, min(layers.stop, layer_count))}
    flow = status.pipeline.flow if status.pipeline else None
    return PipelineBody(
        **vars(_summary(status, stages)),
        stages=[_stage_body(stage, status.node_id, layer_count) for stage in stages],
        layer_count=layer_count,
        layers_covered=len(covered),
        coverage=len(covered) / layer_count if layer_count else 0.0,
        complete=0 < layer_count == len(covered),
        own_stages=[_own_stage_body(stage) for stage in status.stages],
        flow=_flow_body(flow) if flow else None,
    )


def pipeline_summary(status: NodeStatus) -> PipelineSummary | None:
    """The part that /api/status tells; None before the stages are known."""
    return _summary(status, status.pipeline.stages) if status.pipeline else None


def stages_of(status: NodeStatus) -> Sequence[PipelineStage]:
    """The stages of the run's plan; before it is known those that nodes hold, by their layers."""
    if status.pipeline is not None:
        return status.pipeline.stages
    return () if status.model is None else _told_stages(status, status.model)


def missing_layers(stages: Iterable[PipelineStage]) -> list[Layers]:
    """Neighbouring stages as one range."""
    ranges: list[Layers] = []
    for stage in stages:
        start, stop = stage.layers.start, stage.layers.stop
        if stage.is_missing and ranges and ranges[-1].stop == start:
            ranges[-1] = Layers(start=ranges[-1].start, stop=stop)
        elif stage.is_missing:
            ranges.append(Layers(start=start, stop=stop))
    return ranges


def _summary(status: NodeStatus, stages: Sequence[PipelineStage]) -> PipelineSummary:
    return PipelineSummary(
        stage_count=len(stages),
        missing=status.pipeline.missing if status.pipeline else "",
        missing_layers=missing_layers(stages),
    )


def _told_stages(status: NodeStatus, model: ModelStatus) -> list[PipelineStage]:
    holders: dict[LayerRange, list[NodeId]] = {}
    if model.layers is not None:
        holders[model.layers] = [status.node_id or NodeId("this node")]
    for peer in status.peers:
        if peer.layers is not None:
            holders.setdefault(peer.layers, []).append(peer.node_id)
    return [PipelineStage(index, layers, tuple(holders[layers])) for index, layers in enumerate(sorted(holders))]


def _stage_body(stage: PipelineStage, node_id: NodeId | None, layer_count: int) -> StageBody:
    holders = sorted(stage.holders, key=lambda holder: holder != node_id)
    return StageBody(
        stage=stage.index,
        layers=Layers.model_validate(stage.layers),
        roles=list(stage.layers.roles(layer_count)),
        holders=list(holders),
        paused=list(stage.paused),
        joining=list(stage.joining),
        is_here=node_id in stage.holders,
        is_missing=stage.is_missing,
        is_resting=stage.is_resting,
        has_single_holder=stage.has_single_holder,
        has_copy=None if stage.copy is None else stage.copy.age_seconds is not None,
        copy_age_seconds=None if stage.copy is None else stage.copy.age_seconds,
    )


def _own_stage_body(stage: StageStatus) -> OwnStageBody:
    return OwnStageBody.model_validate({**vars(stage), "stage": stage.index})


def _flow_body(flow: PipelineFlow) -> FlowBody:
    parts = {
        "tokens_per_second": flow.tokens_per_second,
        "loads": [StageLoadBody.model_validate(load) for load in flow.loads],
        "bottleneck": BottleneckBody.model_validate(flow.bottleneck) if flow.bottleneck else None,
        "recent": [_passage_body(passage) for passage in flow.recent],
    }
    return FlowBody.model_validate({**vars(flow), **parts})


def _passage_body(passage: Passage) -> PassageBody:
    hops = [HopBody.model_validate({**vars(hop), "stage": stage}) for stage, hop in enumerate(passage.hops)]
    parts = {
        "other_seconds": passage.other_seconds,
        "hops": hops,
        "takeovers": [TakeoverBody.model_validate(takeover) for takeover in passage.takeovers],
    }
    return PassageBody.model_validate({**vars(passage), **parts})
