"""Snapshots of a node in a pipeline."""

from __future__ import annotations

from dataclasses import replace

from fake_node import STARTED, training_status

from neuroshard.status.pipeline import (
    Bottleneck,
    HopTimes,
    MicrobatchTrace,
    PipelineFlow,
    PipelineStage,
    PipelineStatus,
    StageLoad,
    Takeover,
)
from neuroshard.status.snapshot import ModelStatus, NodeStatus, StageStatus
from neuroshard.types import LayerRange, NodeId, Role

ME, B, C, D = NodeId("12D3KooWtest"), NodeId("b"), NodeId("c"), NodeId("d")

PASSAGE = MicrobatchTrace(
    session=7,
    microbatch=3,
    ended_at=STARTED + 59,
    seconds=2.0,
    tokens=256,
    hops=(
        HopTimes(ME, 0.25, 0.125, 0.0),
        HopTimes(B, 0.5, 0.25, 0.125, 0.125, 4096, 8192),
        HopTimes(D, 0.25, 0.0, 0.0625, 0.0, 4096, 4096),
    ),
    takeovers=(Takeover(1, C, B, is_exact=False),),
    failures=1,
)
FLOW = PipelineFlow(
    window_seconds=60.0,
    microbatches=30,
    tokens=7680,
    bubble_share=0.4375,
    recompute_share=0.125,
    wire_bytes_per_token=80.0,
    loads=(StageLoad(0, 0.25, 0.125, 0.0, 1), StageLoad(1, 0.5, 0.25, 0.125, 2), StageLoad(2, 0.25, 0.0, 0.0625, 1)),
    bottleneck=Bottleneck(1, B, 0.75, 0.5),
    exact_takeovers=2,
    approximate_takeovers=1,
    failures=4,
    given_up=1,
    unanswered=(1,),
    recent=(replace(PASSAGE, microbatch=2, takeovers=(), failures=0), PASSAGE),
)
STAGES = (
    PipelineStage(0, LayerRange(0, 2), ready=(ME,)),
    PipelineStage(1, LayerRange(2, 3), ready=(B, C)),
    PipelineStage(2, LayerRange(3, 4), ready=(D,), joining=(C,)),
)


def in_a_pipeline(stages: tuple[PipelineStage, ...] = STAGES, flow: PipelineFlow | None = FLOW) -> NodeStatus:
    """A node that drives, with the first stage of three."""
    status = training_status()
    assert status.model is not None
    own = StageStatus(0, LayerRange(0, 2), 20, 1, 6.5, 0.5, 3, 8, 2, 1, "ab" * 32, 10)
    missing = "" if not any(stage.is_missing for stage in stages) else "Some layers are missing."
    return replace(
        status,
        model=ModelStatus(status.model.architecture, 123_456, LayerRange(0, 2), (Role.DRIVER,)),
        stages=(own,),
        pipeline=PipelineStatus(stages, missing, flow),
    )
