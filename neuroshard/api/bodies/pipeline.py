"""Answers about the pipeline: the run's stages, who holds them, and how this node's microbatches go through them."""

from __future__ import annotations

from pydantic import Field

from neuroshard.api.bodies.base import Answer, Layers, Number, Text
from neuroshard.types import Role


class StageBody(Answer):
    """One stage of the pipeline and who holds it."""

    stage: int = Field(description="counted from 0")
    layers: Layers
    roles: list[Role] = Field(description="of a node that holds this stage alone")
    holders: list[str] = Field(description="node ids; this node first, then those that can work on it now")
    paused: list[str] = Field(description="those of the holders that have its weights and do not work now")
    joining: list[str] = Field(description="those of the holders that get ready for it and have no weights yet")
    is_here: bool = Field(description="whether this node is one of the holders")
    is_missing: bool = Field(description="nobody has its weights at hand: nothing is trained")
    is_resting: bool = Field(description="all that have its weights are paused: nothing is trained")
    has_single_holder: bool = Field(description="its weights are on one node only")
    has_copy: bool | None = Field(
        description="whether another node keeps a copy of a single holder's state; null where that is not known"
    )
    copy_age_seconds: Number = Field(description="of that copy: what would be lost with the holder; null without one")


class OwnStageBody(Answer):
    """One stage that this node holds; stages advance on their own clocks."""

    stage: int = Field(description="counted from 0")
    layers: Layers
    steps: int = Field(description="optimizer steps")
    outer_step: int
    loss: Number = Field(description="nats a token; null where it is not known: in the middle of the pipeline")
    grad_norm: Number = Field(description="of the last step, before clipping")
    sequences_accumulated: int = Field(description="for the step in work")
    sequences_wanted: int = Field(description="for a step")
    open_microbatches: int = Field(description="between their forward and their backward pass")
    sessions: int = Field(description="of drivers, not closed")
    last_saved_step: int | None


class HopBody(Answer):
    """What one stage's part of a microbatch took, forward and backward pass together; seconds and bytes."""

    stage: int
    node_id: str = Field(description="who did it in the end")
    compute_seconds: Number = Field(description="at work, says the stage")
    wait_seconds: Number = Field(description="at the stage, behind others or behind its step")
    wire_seconds: Number = Field(description="sending, packing and the way there and back; 0 on this node itself")
    recompute_seconds: Number = Field(description="of the compute time: the forward pass done again")
    bytes_sent: int = Field(description="tensors only, by the driver")
    bytes_received: int


class TakeoverBody(Answer):
    """A stage whose work another replica took over in the middle of a microbatch."""

    stage: int
    before: str = Field(description="node id")
    after: str = Field(description="node id")
    is_exact: bool = Field(description="both said that their weights are the same")


class PassageBody(Answer):
    """One microbatch on its way through all stages, there and back."""

    session: int
    microbatch: int
    ended_at: Number = Field(description="seconds since the epoch")
    seconds: Number = Field(description="from the first request to the last answer")
    other_seconds: Number = Field(description="of those between the stages: looking for somebody, asking again")
    tokens: int
    hops: list[HopBody] = Field(description="one a stage, in order")
    takeovers: list[TakeoverBody]
    failures: int = Field(description="requests after which somebody else was asked")


class StageLoadBody(Answer):
    """What a stage takes for a microbatch on average, whoever does it; seconds."""

    stage: int
    compute_seconds: Number
    wait_seconds: Number
    wire_seconds: Number
    nodes: int = Field(description="that worked on it")


class BottleneckBody(Answer):
    """The stage at which microbatches spend most time, at work and waiting, and the slowest of its nodes."""

    stage: int
    node_id: str
    seconds: Number = Field(description="that a microbatch spends at this stage on average")
    share: Number = Field(description="of the time that it spends at all stages, 0..1")


class FlowBody(Answer):
    """How the microbatches that this node drives went: those that ended within the last minute."""

    window_seconds: Number = Field(description="that the numbers cover: at most 60")
    microbatches: int = Field(description="that ended in this time")
    tokens: int = Field(description="of those")
    tokens_per_second: Number
    bubble_share: Number = Field(
        description="1 - compute seconds / (computers x window), 0..1: the share of their time in which the computers "
        "that did the stages did nothing for this driver; null without microbatches"
    )
    recompute_share: Number = Field(description="of the compute time, 0..1: forward passes done again to save memory")
    wire_bytes_per_token: Number = Field(description="tensors that this driver sent and received")
    loads: list[StageLoadBody] = Field(description="one a stage; empty without microbatches")
    bottleneck: BottleneckBody | None = Field(description="null with one stage, and without microbatches")
    exact_takeovers: int = Field(description="since the start, as all counts that follow: between equal weights")
    approximate_takeovers: int = Field(description="between weights that were not known to be equal")
    failures: int = Field(description="requests after which somebody else was asked")
    given_up: int = Field(description="microbatches that were left out for good")
    unanswered: list[int] = Field(description="stages for which microbatches wait now: whoever holds them fails")
    recent: list[PassageBody] = Field(description="the last ones, at most 32, the newest last")


class PipelineSummary(Answer):
    """The run's stages in short."""

    stage_count: int
    missing: Text = Field(description="which layers nobody has at hand, in a sentence, counted from 1; may be empty")
    missing_layers: list[Layers] = Field(description="the same as ranges counted from 0, neighbouring stages as one")


class PipelineBody(PipelineSummary):
    """GET /api/pipeline: every stage of the run's plan, and how microbatches go through them."""

    stages: list[StageBody]
    layer_count: int
    layers_covered: int = Field(description="layers whose weights at least one node has at hand")
    coverage: Number = Field(description="share of the layers that at least one node has at hand, 0..1")
    complete: bool = Field(description="whether no stage is missing")
    own_stages: list[OwnStageBody] = Field(description="stages that this node holds")
    flow: FlowBody | None = Field(description="null on a node that drives no microbatches")
