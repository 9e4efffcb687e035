"""Bodies about training: its verdict, the curve, the run's numbers, the pipeline and the certified rounds."""

from __future__ import annotations

from pydantic import Field

from neuroshard.api.rendering import Layers, Number, ResponseBody, Text
from neuroshard.status.rounds import AbandonReason, MemberPart
from neuroshard.status.snapshot import LearningVerdict, LossTrend, NodeState
from neuroshard.types import Role


class VerifyBody(ResponseBody):
    """GET /api/training/verify: is the model really learning?"""

    training_verified: bool
    status: LearningVerdict
    reason: Text
    action: Text
    loss_trend: LossTrend
    hash_agreement_rate: Number = Field(description="0..1; 1 when alone")
    sync_success_rate: Number = Field(description="0..1; null when there is nobody to synchronise with")
    global_loss: Number
    local_loss: Number
    initial_loss: Number
    steps: int
    held_out_loss: Number
    held_out_initial_loss: Number
    unigram_entropy: Number = Field(description="loss that knowing only word frequencies gives")


class DilocoProgress(ResponseBody):
    """Progress towards the next outer step."""

    inner_step: int
    inner_steps_total: int
    progress: Number = Field(description="0..1")
    outer_steps: int
    last_sync: Number
    members: int
    lone_outer: str
    strategy: str = Field(description="diloco, streaming, sparta or averaging; empty while it is not known")
    part: str = Field(description='what the next round is about, in words: "all weights", "quarter 2 of 4"')
    codec: str = Field(description="how contributions to it are encoded")
    explanation: Text


class NetworkNode(ResponseBody):
    """One node of the network."""

    node_id: str
    wallet_id: str | None
    roles: list[Role]
    role: str = Field(description='roles joined by "+", for people')
    layers: Layers | None
    loss: Number
    tokens_per_second: Number
    last_seen: Number
    is_local: bool


class LocalNode(ResponseBody):
    """This node's own part of the network's numbers."""

    node_id: str | None
    state: NodeState
    roles: list[Role]
    layers: Layers | None
    loss: Number
    loss_ema: Number
    steps: int
    tokens: int
    tokens_per_second: Number
    skipped_steps: int


class GlobalBody(ResponseBody):
    """GET /api/training/global: the network's numbers."""

    training_nodes: int
    global_loss: Number
    global_min_loss: Number
    total_steps: int
    total_tokens: int
    data_shards: int
    data_shards_covered: int
    tokens_per_second: Number
    hash_agreement_rate: Number
    model_hashes: dict[str, str]
    loss_trend: LossTrend
    training_verified: bool
    is_converging: bool
    successful_syncs: int
    failed_syncs: int
    sync_success_rate: Number
    diloco: DilocoProgress
    nodes: list[NetworkNode]
    local: LocalNode


class HistoryPoint(ResponseBody):
    """One point of the curve; loss in nats a token."""

    step: int
    time: Number
    loss: Number
    lr: Number
    tokens: int


class HistoryHeldOut(ResponseBody):
    """One held-out evaluation beside the curve."""

    step: int
    time: Number
    loss: Number


class HistoryBody(ResponseBody):
    """GET /api/training/history: at most 1,000 points, oldest first."""

    points: list[HistoryPoint]
    held_out: list[HistoryHeldOut]


class StageBody(ResponseBody):
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


class OwnStageBody(ResponseBody):
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


class HopBody(ResponseBody):
    """What one stage's part of a microbatch took, forward and backward pass together; seconds and bytes."""

    stage: int
    node_id: str = Field(description="who did it in the end")
    compute_seconds: Number = Field(description="at work, says the stage")
    wait_seconds: Number = Field(description="at the stage, behind others or behind its step")
    wire_seconds: Number = Field(description="sending, packing and the way there and back; 0 on this node itself")
    recompute_seconds: Number = Field(description="of the compute time: the forward pass done again")
    bytes_sent: int = Field(description="tensors only, by the driver")
    bytes_received: int


class TakeoverBody(ResponseBody):
    """A stage whose work another replica took over in the middle of a microbatch."""

    stage: int
    before: str = Field(description="node id")
    after: str = Field(description="node id")
    is_exact: bool = Field(description="both said that their weights are the same")


class MicrobatchTraceBody(ResponseBody):
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


class StageLoadBody(ResponseBody):
    """What a stage takes for a microbatch on average, whoever does it; seconds."""

    stage: int
    compute_seconds: Number
    wait_seconds: Number
    wire_seconds: Number
    nodes: int = Field(description="that worked on it")


class BottleneckBody(ResponseBody):
    """The stage at which microbatches spend most time, at work and waiting, and the slowest of its nodes."""

    stage: int
    node_id: str
    seconds: Number = Field(description="that a microbatch spends at this stage on average")
    share: Number = Field(description="of the time that it spends at all stages, 0..1")


class FlowBody(ResponseBody):
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
    recent: list[MicrobatchTraceBody] = Field(description="the last ones, at most 32, the newest last")


class PipelineSummary(ResponseBody):
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


class RoundMemberBody(ResponseBody):
    """One member's part in a round."""

    node_id: str
    wallet_id: str
    part: MemberPart = Field(description="abstained: it did too little work to count; absent: nothing came of its call")
    refusal: str = Field(description="class of the reason for a refusal, as in /metrics; empty without one")
    reason: Text = Field(description="why its contribution was refused, in words")


class PhasesBody(ResponseBody):
    """Seconds of a round's phases, all its views together."""

    gather: Number = Field(description="until a proposal named the members")
    exchange: Number = Field(description="slices to their reducers, verdict, slices of the aggregate")
    vote: Number = Field(description="check of the aggregate, two votes")


class CertificateBody(ResponseBody):
    """What ended a round."""

    value: str = Field(description="first 16 hex digits of the digest that was voted on")
    votes: int = Field(description="to commit")
    voters: int = Field(description="of the step")


class RoundBody(ResponseBody):
    """One round in which this node took part."""

    stage: int = Field(description="counted from 0")
    layers: Layers
    outer_step: int
    result: str = Field(description='"completed" or "abandoned"')
    abandoned_for: AbandonReason | None = Field(description="null: it completed")
    reason: Text = Field(description="why it was abandoned, in words")
    is_late: bool = Field(description="it completed after training had gone on, and was told as abandoned before")
    ended_at: Number = Field(description="seconds since the epoch")
    seconds: Number = Field(description="from entering it to its end")
    phases: PhasesBody
    members: list[RoundMemberBody]
    bytes_sent: int = Field(description="in messages of rounds since the record before this one")
    bytes_received: int
    strategy: str = Field(description="how replicas synchronise: diloco, streaming, sparta or averaging")
    part: str = Field(
        description='what the round was about, in words: "all weights", "quarter 2 of 4", "slice 7 of 20", "gradient"'
    )
    codec: str = Field(description="how contributions were encoded, as the run's file names it")
    aggregator: str
    views: int = Field(description="tries, each with a proposer of its own")
    certificate: CertificateBody | None = Field(description="null: it was abandoned")


class ContributorBody(ResponseBody):
    """A node's parts in completed rounds, over all stages of this node."""

    node_id: str
    wallet_id: str
    is_here: bool = Field(description="this node")
    rounds: int = Field(description="with a contribution of it")
    accepted: int
    refused: int
    absent: int = Field(description="rounds that it was called to without a contribution")


class RoundsBody(ResponseBody):
    """GET /api/rounds: what this node has seen of rounds since its start."""

    rounds: list[RoundBody] = Field(description="the last 20 of each stage, the newest first")
    completed: int
    abandoned: dict[AbandonReason, int] = Field(description="how many, by class of the reason")
    accepted: int = Field(description="contributions to completed rounds")
    refused: dict[str, int] = Field(description="contributions to completed rounds, by class of the reason")
    bytes_sent: int
    bytes_received: int
    hash_agreement_rate: Number = Field(description="0..1; 1 when alone")
    sync_success_rate: Number = Field(description="0..1; null when there is nobody to synchronise with")
    contributors: list[ContributorBody] = Field(description="most rounds first")
