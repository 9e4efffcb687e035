"""Snapshots of a node: alone, in a swarm, in a pipeline, and after rounds."""

from __future__ import annotations

import time
from dataclasses import replace

from neuroshard.status.computer import MemoryStatus
from neuroshard.status.data import DataStatus
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
from neuroshard.status.rounds import (
    AbandonReason,
    CertificateStatus,
    Contributor,
    MemberPart,
    PhaseSeconds,
    RoundContribution,
    RoundStatus,
    StageRoundsStatus,
)
from neuroshard.status.snapshot import (
    CheckpointGeneration,
    CheckpointStatus,
    ConnectionKind,
    DilocoStatus,
    HeldOutPoint,
    LossPoint,
    ModelStatus,
    NetworkState,
    NetworkStatus,
    NodeState,
    NodeStatus,
    PeerStatus,
    RunStatus,
    StageStatus,
    SwarmStatus,
    TrainingStatus,
)
from neuroshard.types import Architecture, LayerRange, NodeId, Role, RunId, ShardId, WalletId

STARTED = 1_000.0


def training_status(steps: int = 20) -> NodeStatus:
    """A node in the middle of a run of its own."""
    architecture = Architecture(
        hidden_size=64,
        layer_count=4,
        head_count=4,
        key_value_head_count=2,
        feed_forward_size=160,
        vocabulary_size=512,
        sequence_length=64,
    )
    points = tuple(LossPoint(step, STARTED + step, 7.0 - step / 100, 1e-3, step * 512) for step in range(1, steps + 1))
    return NodeStatus(
        version="0.0.1",
        started_at=STARTED,
        time=STARTED + 60,
        uptime_seconds=60,
        state=NodeState.TRAINING,
        state_reason="Training.",
        node_id=NodeId("12D3KooWtest"),
        wallet_id=WalletId("0123456789abcdef"),
        data_dir="/data",
        model=ModelStatus(architecture, 123_456, LayerRange(0, 4), (Role.DRIVER, Role.VALIDATOR)),
        memory=MemoryStatus(1_000, 1_200, "--memory", 900, 400, 450),
        run=RunStatus(RunId("ab" * 32), is_own=True, is_demo=False, explanation="A run of its own."),
        training=TrainingStatus(
            steps=steps,
            tokens=steps * 512,
            loss=6.8,
            loss_ema=6.9,
            initial_loss=6.99,
            tokens_per_second=900.0,
            held_out=(HeldOutPoint(0, STARTED, 7.1, 0.0, 0.1), HeldOutPoint(10, STARTED + 10, 6.5, 0.6, 0.1)),
        ),
        data=DataStatus(
            "folder", verified=True, explanation="Signed.", total_shards=16, shard=ShardId(3), shards_seen=2
        ),
        checkpoints=CheckpointStatus("/data/c", (CheckpointGeneration(10, 0, STARTED, 6.9, 100, "/data/c/step-10"),)),
        history=points,
    )


def with_step(status: NodeStatus, loss: float) -> NodeStatus:
    """The snapshot after one more step with this loss."""
    training = status.training
    step = training.steps + 1
    tokens = training.tokens + 2048
    point = LossPoint(step=step, time=time.time(), loss=loss, lr=1e-3, tokens=tokens)
    return replace(
        status,
        training=replace(training, steps=step, tokens=tokens, loss=loss, loss_ema=loss),
        history=(*status.history[-999:], point),
    )


JOIN_LINE = "neuroshard --run abab --peer /ip4/192.0.2.7/tcp/4001/p2p/12D3KooWtest"


def peer(number: int) -> PeerStatus:
    """A peer that trains everything it is asked to, reached directly."""
    return PeerStatus(
        node_id=NodeId(f"12D3KooWpeer{number:04}"),
        wallet_id=WalletId(f"{number:016x}"),
        roles=(Role.DRIVER, Role.VALIDATOR),
        layers=LayerRange(0, 4),
        loss_ema=5.0 + number / 1_000,
        tokens_per_second=1_000.0 + number,
        last_seen=STARTED + 59,
        steps=100 + number,
        tokens=51_200,
        shard=ShardId(number),
        outer_step=2,
        state_hash="aa" * 32,
        state=NodeState.TRAINING,
        started_at=STARTED - 100,
        first_seen=STARTED + 1,
        version="0.0.1",
        connection=ConnectionKind.DIRECT,
        address=f"/ip4/192.0.2.{number % 250}/tcp/4001",
        rtt_seconds=0.012,
        bytes_sent=1_000,
        bytes_received=2_000,
        score=3.0,
    )


def among(count: int) -> NodeStatus:
    """A node that trains with `count` others."""
    network = NetworkStatus(
        state=NetworkState.CONNECTED,
        explanation="Connected.",
        addresses=("/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWtest",),
        connections=count,
        bytes_sent=10_000,
        bytes_received=20_000,
        upload_rate=100.0,
        download_rate=200.0,
        upload_limit=1e6,
        banned_peers=1,
        refused=(("bad_signature", 2), ("oversized", 1)),
        join_line=JOIN_LINE,
    )
    swarm = SwarmStatus(
        nodes=count + 1,
        training_nodes=count + 1,
        global_loss=5.5,
        min_loss=4.5,
        total_steps=9_000,
        total_tokens=4_608_000,
        shards_covered=9,
        tokens_per_second=5_000.0,
        model_hashes=((NodeId("12D3KooWpeer0000"), "aa" * 32),),
    )
    peers = tuple(peer(number) for number in range(count))
    return replace(training_status(), network=network, swarm=swarm, peers=peers)


ME, B, C, D = NodeId("12D3KooWtest"), NodeId("b"), NodeId("c"), NodeId("d")
WALLET = WalletId("0123456789abcdef")

PASSAGE = MicrobatchTrace(
    session=7,
    microbatch=3,
    ended_at=STARTED + 59,
    seconds=2.0,
    tokens=256,
    hops=(
        HopTimes(ME, 0.25, 0.125, 0.0),
        HopTimes(B, 0.5, 0.25, 0.125, 0.125, 4096, 8192, 16384),
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
    busiest_upload_per_token=96.0,
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


FIRST, SECOND = peer(0), peer(1)
FAR = "its norm is far from the median norm"

COMPLETED = RoundStatus(
    outer_step=3,
    ended_at=STARTED + 50,
    phases=PhaseSeconds(gather=0.25, exchange=1.5, vote=0.25),
    members=(
        RoundContribution(FIRST.node_id, FIRST.wallet_id, MemberPart.ACCEPTED),
        RoundContribution(SECOND.node_id, SECOND.wallet_id, MemberPart.REFUSED, "norm", FAR),
        RoundContribution(ME, WALLET, MemberPart.ACCEPTED),
    ),
    bytes_sent=4_000,
    bytes_received=3_000,
    strategy="streaming",
    part="quarter 4 of 4",
    codec="int8",
    aggregator="trimmed_mean(0.2)",
    views=2,
    skipped_audits=1,
    certificate=CertificateStatus("0123456789abcdef", 3, 3),
)
ABANDONED = replace(
    COMPLETED,
    outer_step=4,
    ended_at=STARTED + 58,
    certificate=None,
    abandoned_for=AbandonReason.NO_ANSWER,
    reason="too few members answered in time",
)
FIRST_STAGE = StageRoundsStatus(
    0,
    LayerRange(0, 4),
    (COMPLETED, ABANDONED),
    completed=4,
    abandoned=((AbandonReason.NO_ANSWER, 1),),
    accepted=8,
    refused=(("norm", 4),),
    bytes_sent=20_000,
    bytes_received=15_000,
    skipped_audits=2,
    contributors=(
        Contributor(SECOND.node_id, SECOND.wallet_id, accepted=0, refused=4),
        Contributor(FIRST.node_id, FIRST.wallet_id, accepted=4),
        Contributor(ME, WALLET, accepted=4),
    ),
)
SECOND_STAGE = StageRoundsStatus(
    1,
    LayerRange(4, 8),
    (replace(COMPLETED, ended_at=STARTED + 55),),
    completed=1,
    abandoned=((AbandonReason.NO_ANSWER, 2), (AbandonReason.NODE, 1)),
    accepted=1,
    refused=(("norm", 1), ("zero", 1)),
    bytes_sent=1_000,
    bytes_received=1_000,
    skipped_audits=1,
    contributors=(Contributor(FIRST.node_id, FIRST.wallet_id, accepted=1, absent=2),),
)


def after_rounds(*stages: StageRoundsStatus) -> NodeStatus:
    """A node among others whose stages had these rounds."""
    root = "aa" * 32
    diloco = DilocoStatus(outer_steps=2, state_root=root, certified_root=root, members=3, rounds=stages)
    return replace(among(2), diloco=diloco)
