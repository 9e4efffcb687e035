"""The snapshot of a node: frozen values with everything that the API and the dashboard show of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import isnan
from typing import Annotated

from pydantic import PlainSerializer

from neuroshard.status.computer import AccelerationStatus, MemoryStatus, PathsStatus, ResourceStatus
from neuroshard.status.data import DataStatus
from neuroshard.status.history import FeedEvent, SamplesStatus, WorkDone, WorkHistoryStatus
from neuroshard.status.owner_policy import OwnerPolicyStatus
from neuroshard.status.pipeline import PipelineStatus
from neuroshard.status.rounds import AcceptedWork, StageRoundsStatus, accepted_work
from neuroshard.status.values import EXCLUDED, Counts, Number, Stale, about, derived
from neuroshard.types import Architecture, LayerRange, NodeId, Role, RunId, ShardId, WalletId

SUM_OF_DRIVERS = "sum over training nodes with the first layers"
PEERS_IN_STATUS = 32  # every dashboard gets the status several times per second
EVENTS_IN_STATUS = 8


class NodeState(StrEnum):
    """Activity of the node; `NodeStatus.state_reason` gives the reason."""

    STARTING = "starting"
    WAITING_FOR_DATA = "waiting_for_data"
    WAITING_FOR_STAGES = "waiting_for_stages"  # no node can work on some layers of the model
    TRAINING = "training"
    PAUSED = "paused"
    NOT_TRAINING = "not_training"
    FAILED = "failed"
    STOPPING = "stopping"


class StartupStepState(StrEnum):
    """State of one step of the start-up."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class StartupStep:
    """One line of the start-up progress, which the dashboard shows from the first second."""

    name: Annotated[str, about('for people, such as "Reading the Genesis manifest"')]
    state: StartupStepState = StartupStepState.PENDING
    detail: str = ""
    fraction: Annotated[Number | None, about("progress; null: not known", "0..1")] = None


@dataclass(frozen=True)
class ModelStatus:
    """The model, and the part of it that this node holds."""

    architecture: Architecture
    parameter_count: Annotated[int, about("of the whole model")]
    layers: Annotated[LayerRange | None, about("layers that this node holds; null: none, or none yet")]
    roles: tuple[Role, ...]


@dataclass(frozen=True)
class RunStatus:
    """The run that this node serves, and the reason."""

    run_id: Annotated[RunId, about(brief="run")]
    is_own: bool
    is_demo: bool
    explanation: Annotated[str, about("one sentence", brief="about the run")]


@dataclass(frozen=True)
class LossPoint:
    """One point of the training curve."""

    step: int
    time: Annotated[float, about(unit="s since 1970")]
    loss: Annotated[Number, about(unit="nats/token")]
    lr: Number
    tokens: Annotated[int, about(unit="tokens")]


@dataclass(frozen=True)
class HeldOutPoint:
    """One evaluation on the pinned held-out sequences."""

    step: int
    time: Annotated[float, about(unit="s since 1970")]
    loss: Annotated[Number, about("mean loss on text that the model never trains on", "nats/token")]
    improvement: Annotated[Number, about("mean paired improvement over the first evaluation", "nats/token")]
    standard_error: Annotated[Number, about("of the improvement", "nats/token")]
    measured_by: Annotated[
        tuple[NodeId, ...], about("other nodes that signed it; empty: this node measured it itself")
    ] = ()


@dataclass(frozen=True)
class TrainingStatus:
    """Progress of the inner steps on this node."""

    steps: Annotated[
        int, about("inner steps", over_swarm="sum over nodes with the first layers", counter="steps", brief="steps")
    ] = 0
    tokens: Annotated[
        int,
        about(
            "tokens trained on",
            "tokens",
            over_swarm="sum over nodes with the first layers",
            counter="tokens",
            brief="tokens",
        ),
    ] = 0
    inherited_steps: Annotated[int, about("part of the steps: made by others before this node took over")] = 0
    inherited_tokens: Annotated[int, about("part of the tokens: seen by others before", "tokens")] = 0
    loss: Annotated[Number | None, about("last step", "nats/token", gauge="loss")] = None
    loss_ema: Annotated[
        Number | None,
        about(
            "smoothed training loss", "nats/token", over_swarm="mean weighted by tokens", gauge="loss_ema", brief="loss"
        ),
    ] = None
    initial_loss: Annotated[Number | None, about("mean of the run's first steps", "nats/token")] = None
    lr: Annotated[Number, about("inner learning rate", gauge="learning_rate")] = 0.0
    tokens_per_second: Annotated[
        Number,
        about(
            "training rate",
            "tokens/s",
            over_swarm=SUM_OF_DRIVERS,
            stale=Stale.NOT_TRAINING,
            gauge="tokens_per_second",
            brief="speed",
        ),
    ] = 0.0
    step_seconds: Annotated[
        Number, about("duration of an inner step", "s", stale=Stale.NOT_TRAINING, gauge="step_seconds")
    ] = 0.0
    batch_size: int = 0
    sequences_per_step: int = 0
    skipped_steps: Annotated[int, about("steps skipped for a non-finite loss or gradient", counter="skipped_steps")] = 0
    precision: str = "fp32"
    held_out: tuple[HeldOutPoint, ...] = ()
    held_out_sequences: int = 0
    unigram_entropy: Annotated[
        Number | None, about("held-out loss of a model that knows token frequencies only", "nats/token")
    ] = None

    @derived(
        "loss of the last evaluation on the pinned held-out sequences",
        "nats/token",
        gauge="held_out_loss",
        brief="held-out loss",
    )
    @property
    def held_out_loss(self) -> Number | None:
        return self.held_out[-1].loss if self.held_out else None


class LearningVerdict(StrEnum):
    """Answer to the question whether the model learns."""

    VERIFIED = "verified"
    IMPROVING = "improving"
    INSUFFICIENT_DATA = "insufficient_data"
    STALLED = "stalled"
    DIVERGED = "diverged"
    NOT_TRAINING = "not_training"


class LossTrend(StrEnum):
    """Direction of the recent loss."""

    IMPROVING = "improving"
    STABLE = "stable"
    NEEDS_ATTENTION = "needs_attention"
    INSUFFICIENT_DATA = "insufficient_data"


@dataclass(frozen=True)
class VerificationStatus:
    """Verdict on learning from held-out data, in words that a user can act on."""

    training_verified: Annotated[
        bool, about("held-out data shows that the model learns", gauge="training_verified")
    ] = False
    status: LearningVerdict = LearningVerdict.INSUFFICIENT_DATA
    reason: Annotated[str, about(brief="verdict")] = "No held-out evaluation yet."
    action: Annotated[str, about("what the user can do", brief="to do")] = (
        "Nothing to do: wait for the first evaluations."
    )
    loss_trend: LossTrend = LossTrend.INSUFFICIENT_DATA

    @property
    def is_converging(self) -> bool:
        """Whether the model improves now."""
        return self.status is not LearningVerdict.DIVERGED and (
            self.training_verified or self.loss_trend is LossTrend.IMPROVING
        )


@dataclass(frozen=True)
class DilocoStatus:
    """Outer steps of this node, and the progress towards the next one."""

    inner_step: Annotated[int, about("inner steps since the last outer step", gauge="inner_step")] = 0
    inner_steps_total: Annotated[int, about("inner steps between two outer steps", gauge="inner_steps_wanted")] = 0
    outer_steps: Annotated[int, about("outer steps", counter="outer_steps")] = 0
    last_sync: Annotated[float | None, about(unit="s since 1970")] = None
    members: Annotated[int, about("nodes of the last round, this node included")] = 1
    lone_outer: str = "keep"
    strategy: Annotated[
        str, about("of the next round: diloco, streaming, sparta or averaging; empty: not known yet")
    ] = ""
    part: Annotated[str, about('part of the state in the next round: "all weights", "quarter 2 of 4"')] = ""
    codec: Annotated[str, about("encoding of the contributions to the next round")] = ""
    explanation: Annotated[str, about(brief="learning together")] = (
        "Alone: outer steps move the anchor only; there is nobody to synchronise with."
    )
    state_root: Annotated[str, about("hash of the replicated state after the last outer step")] = ""
    certified_root: Annotated[
        str, about("root that the certificate of this outer step names; without one, equal to state_root")
    ] = ""
    successful_syncs: Annotated[int, about("rounds that completed", counter="successful_syncs")] = 0
    failed_syncs: Annotated[int, about("rounds that were aborted", counter="failed_syncs")] = 0
    version: Annotated[int, about("newest version of the run's parameters that its owner has signed")] = 1
    version_from: Annotated[
        int | None, about("outer step from which that version applies; null: the chain does not have it yet")
    ] = 0
    rounds: Annotated[tuple[StageRoundsStatus, ...], EXCLUDED] = ()  # for each stage that this node holds

    @derived("progress towards the next outer step", "0..1")
    @property
    def progress(self) -> float:
        """Completed share of the inner steps between two outer steps, 0..1; 0 if there are no outer steps."""
        total = self.inner_steps_total
        return min(1.0, max(0.0, self.inner_step / total)) if total > 0 else 0.0

    @property
    def sync_success_rate(self) -> float | None:
        """Share of the rounds that completed; None without a round with others.

        It covers the rounds since this node's start. Before the first of them, it follows from the two counts of syncs.
        """
        completed = sum(stage.completed for stage in self.rounds)
        abandoned = sum(count for stage in self.rounds for _, count in stage.abandoned)
        if completed + abandoned > 0:
            return completed / (completed + abandoned)
        rounds = self.successful_syncs + self.failed_syncs
        return None if self.members <= 1 or rounds == 0 else self.successful_syncs / rounds


@dataclass(frozen=True)
class StageStatus:
    """One stage that this node holds; stages advance on their own clocks."""

    index: Annotated[int, about("counted from 0", label="stage", alias="stage")]
    layers: LayerRange
    steps: Annotated[int, about("optimizer steps of a stage that this node holds", counter="stage_steps")]
    outer_step: int
    loss: Annotated[Number | None, about("last step; null in the middle of the pipeline", "nats/token")]
    grad_norm: Annotated[Number | None, about("last step, before clipping")]
    sequences_accumulated: Annotated[int, about("sequences of the step in progress", gauge="stage_sequences")]
    sequences_wanted: Annotated[int, about("for one step")]
    open_microbatches: Annotated[
        int, about("microbatches between their forward and their backward pass", gauge="stage_open_microbatches")
    ]
    sessions: Annotated[int, about("open sessions of drivers")]
    state_root: Annotated[str, about("hash of the stage's replicated state after the last outer step")]
    last_saved_step: int | None
    tokens_per_second: Annotated[
        Number,
        about(
            "tokens that pass through it, forward and backward",
            "tokens/s",
            stale=Stale.NOT_TRAINING,
            gauge="stage_tokens_per_second",
        ),
    ] = 0.0


@dataclass(frozen=True)
class CheckpointGeneration:
    """One restorable state on disk."""

    step: int
    outer_step: int
    time: Annotated[float, about(unit="s since 1970")]
    loss: Annotated[Number | None, about(unit="nats/token")]
    bytes: Annotated[int, about(unit="bytes")]
    path: str


@dataclass(frozen=True)
class CheckpointStatus:
    """State that is safe on disk, and the loss that a kill at this moment would cause."""

    folder: str = ""
    generations: Annotated[tuple[CheckpointGeneration, ...], about("newest first")] = ()
    last_saved_step: int | None = None
    last_saved_time: Annotated[float | None, about(unit="s since 1970")] = None
    interval_seconds: Annotated[float, about(unit="s")] = 30.0
    could_lose: Annotated[str, about("work that a kill now would lose", brief="a kill could lose")] = (
        "everything since the start: no checkpoint yet"
    )
    could_lose_steps: Annotated[int, about("steps that a kill now would lose", gauge="checkpoint_could_lose_steps")] = 0
    could_lose_seconds: Annotated[float, about(unit="s")] = 0.0
    last_write_seconds: Annotated[float, about("duration of the last write", "s")] = 0.0
    last_stall_seconds: Annotated[float, about("time for which the last write stopped training", "s")] = 0.0
    alarm: Annotated[str | None, about("visible trouble, such as a full disk", brief="alarm")] = None
    restored: Annotated[str | None, about("checkpoint that the start found")] = None


class ConnectionKind(StrEnum):
    """Kind of path over which a peer is reached."""

    DIRECT = "direct"
    PUNCHED = "punched"  # direct, through a hole punched into a router
    RELAYED = "relayed"
    IN_MEMORY = "in_memory"


class PeerRating(StrEnum):
    """A peer's score in a word."""

    GOOD = "good"
    NEUTRAL = "neutral"
    DOUBTFUL = "doubtful"
    BAD = "bad"
    BANNED = "banned"


BANNED_BELOW = -100.0
BAD_BELOW = -50.0
ROUNDING = 1.0  # a score this close to 0 is neutral


def rating_of(score: float) -> PeerRating:
    """A score in a word. NaN is neutral."""
    if isnan(score) or abs(score) < ROUNDING:
        return PeerRating.NEUTRAL
    if score > 0:
        return PeerRating.GOOD
    if score < BANNED_BELOW:
        return PeerRating.BANNED
    return PeerRating.BAD if score < BAD_BELOW else PeerRating.DOUBTFUL


@dataclass(frozen=True)
class PeerStatus:
    """Another node of the run, from its last verified report and announcement."""

    node_id: Annotated[NodeId, about("libp2p peer id of the node", brief="node")]
    wallet_id: Annotated[WalletId, about("public name of the wallet that vouches for the node")]
    roles: Annotated[tuple[Role, ...], about("roles that follow from its layers")]
    layers: Annotated[LayerRange | None, about("layers that it holds; null: none, or none yet")]
    loss_ema: Annotated[Number | None, about("smoothed training loss", "nats/token", brief="loss")]
    tokens_per_second: Annotated[
        Number,
        about("training rate", "tokens/s", over_swarm=SUM_OF_DRIVERS, stale=Stale.IDLE_PEER, brief="speed"),
    ]
    last_seen: Annotated[float, about("last time at which it was known to be alive", "s since 1970")]
    steps: Annotated[int, about("inner steps that it made")] = 0
    tokens: Annotated[int, about("tokens that it trained on", "tokens")] = 0
    shard: Annotated[ShardId | None, about("shard in use")] = None
    outer_step: Annotated[int, about("outer steps that its state contains")] = 0
    state_hash: Annotated[str, about("root of its replicated state after the last outer step")] = ""
    state: Annotated[str, about("its state, as in /api/status; empty before the first report", brief="state")] = ""
    started_at: Annotated[float | None, about("time at which the node started", "s since 1970")] = None
    first_seen: Annotated[float | None, about("time at which this node first saw it", "s since 1970")] = None
    version: Annotated[str, about("version of its program")] = ""
    connection: Annotated[
        ConnectionKind | None,
        about("path over which it is reached; null: known only through others", brief="connection"),
    ] = None
    address: Annotated[str, about("address of that connection")] = ""
    rtt_seconds: Annotated[Number | None, about("round-trip time", "s", brief="round trip")] = None
    bytes_sent: Annotated[int, about("sent from this node to the peer", "bytes")] = 0
    bytes_received: Annotated[int, about("received from the peer", "bytes")] = 0
    score: Annotated[Number, about("reputation at this node; 0 is neutral, misbehaviour lowers it")] = 0.0

    @derived('roles joined by "+", for people')
    @property
    def role(self) -> str:
        return "+".join(self.roles)

    @derived("the score in a word", brief="rating")
    @property
    def rating(self) -> PeerRating:
        return rating_of(self.score)


class NetworkState(StrEnum):
    """State of this node's connection to the run's network."""

    OFF = "off"
    STARTING = "starting"
    ALONE = "alone"  # running, but no other node was found
    CONNECTED = "connected"
    FAILED = "failed"  # training continues; the node tries again


@dataclass(frozen=True)
class NetworkStatus:
    """This node's connections. Traffic counts from the start."""

    state: Annotated[NetworkState, about("state of this node's network", gauge="network_state", brief="network")] = (
        NetworkState.OFF
    )
    explanation: Annotated[str, about("the state in a sentence", brief="about the network")] = "The network is off."
    addresses: Annotated[tuple[str, ...], about("addresses at which others can reach this node", brief="address")] = ()
    connections: Annotated[int, about("open connections to other nodes", gauge="connections")] = 0
    bytes_sent: Annotated[int, about("sent to other nodes since the start", "bytes", counter="network_sent_bytes")] = 0
    bytes_received: Annotated[
        int, about("received from other nodes since the start", "bytes", counter="network_received_bytes")
    ] = 0
    upload_rate: Annotated[
        Number,
        about("upload rate", "bytes/s", stale=Stale.NETWORK_DOWN, gauge="network_upload_bytes_per_second"),
    ] = 0.0
    download_rate: Annotated[
        Number,
        about("download rate", "bytes/s", stale=Stale.NETWORK_DOWN, gauge="network_download_bytes_per_second"),
    ] = 0.0
    upload_limit: Annotated[
        Number | None,
        about("upload limit that the owner set; null: none", "bytes/s", gauge="network_upload_limit_bytes_per_second"),
    ] = None
    line_upload: Annotated[
        Number | None,
        about("measured upload speed of the line; null: not measured yet", "bytes/s", gauge="line_bytes_per_second"),
    ] = None
    line_measured_at: Annotated[
        Number | None, about("time at which the line was measured; null: not yet", "s since 1970")
    ] = None
    banned_peers: Annotated[int, about("peers that are banned now", gauge="banned_peers")] = 0
    refused: Annotated[
        Counts, about("refused messages of peers, by reason", counter="network_refused", label="reason")
    ] = ()
    join_line: Annotated[
        str, about("command with which others join this run through this node; may be empty", brief="join with")
    ] = ""
    reachable: Annotated[
        bool | None,
        about(
            "whether the organiser of the run reached this node at its public address; null: not checked",
            brief="reached from outside",
        ),
    ] = None


@dataclass(frozen=True)
class SwarmStatus:
    """All nodes of the run together, this node included. Totals never fall when nodes leave."""

    nodes: Annotated[int, about("nodes of the run", gauge="swarm_nodes")] = 1
    training_nodes: Annotated[int, about("nodes of the run that train", gauge="swarm_training_nodes")] = 0
    global_loss: Annotated[
        Number | None,
        about(
            "mean loss of the nodes, weighted by tokens", "nats/token", gauge="swarm_loss", brief="loss of all nodes"
        ),
    ] = None
    min_loss: Annotated[Number | None, about("lowest loss that a node reported", "nats/token")] = None
    total_steps: Annotated[int, about("inner steps of all nodes", counter="swarm_steps")] = 0
    total_tokens: Annotated[int, about("tokens that the run has trained on", "tokens", counter="swarm_tokens")] = 0
    shards_covered: Annotated[int, about("shards that some node has read", gauge="swarm_shards_covered")] = 0
    tokens_per_second: Annotated[
        Number,
        about(
            "sum over the training nodes with the first layers",
            "tokens/s",
            stale=Stale.OLD_SNAPSHOT,
            gauge="swarm_tokens_per_second",
            brief="speed of all nodes",
        ),
    ] = 0.0
    model_hashes: Annotated[tuple[tuple[NodeId, str], ...], EXCLUDED] = ()


def _total(history: WorkHistoryStatus) -> WorkDone | None:
    return history.total


def _newest_events(events: tuple[FeedEvent, ...]) -> tuple[FeedEvent, ...]:
    return events[:EVENTS_IN_STATUS]


def _first_peers(peers: tuple[PeerStatus, ...]) -> tuple[PeerStatus, ...]:
    return peers[:PEERS_IN_STATUS]


WorkTotal = Annotated[WorkHistoryStatus, PlainSerializer(_total, return_type=WorkDone | None)]
NewestEvents = Annotated[tuple[FeedEvent, ...], PlainSerializer(_newest_events, return_type=tuple[FeedEvent, ...])]
FirstPeers = Annotated[tuple[PeerStatus, ...], PlainSerializer(_first_peers, return_type=tuple[PeerStatus, ...])]


@dataclass(frozen=True)
class NodeStatus:
    """Everything that the API reports about this node. A snapshot is published as a whole and never changed."""

    version: str
    started_at: Annotated[float, about(unit="s since 1970")]
    time: Annotated[float, about("time of this snapshot", "s since 1970", gauge="snapshot_timestamp_seconds")]
    state: Annotated[NodeState, about(gauge="state", brief="state")] = NodeState.STARTING
    state_reason: Annotated[str, about(brief="reason")] = "Starting."
    is_standing_by: Annotated[bool, about("it could train, but no node uses its layers now")] = False
    startup: tuple[StartupStep, ...] = ()
    node_id: Annotated[NodeId | None, about(brief="node")] = None
    wallet_id: Annotated[WalletId | None, about(brief="wallet")] = None
    data_dir: str = ""
    paths: PathsStatus = field(default_factory=PathsStatus)
    is_demo: bool = False
    paused_until: Annotated[float | None, about(unit="s since 1970", brief="paused until")] = None
    owner_policy: OwnerPolicyStatus = field(default_factory=OwnerPolicyStatus)
    warnings: Annotated[tuple[str, ...], about(brief="warning")] = ()
    model: ModelStatus | None = None
    memory: MemoryStatus | None = None
    run: RunStatus | None = None
    training: TrainingStatus = field(default_factory=TrainingStatus)
    verification: VerificationStatus = field(default_factory=VerificationStatus)
    diloco: DilocoStatus = field(default_factory=DilocoStatus)
    data: Annotated[DataStatus | None, about("null before the manifest was read")] = None
    checkpoints: CheckpointStatus = field(default_factory=CheckpointStatus)
    stages: Annotated[tuple[StageStatus, ...], EXCLUDED] = ()  # stages that this node holds, in order of layers
    pipeline: Annotated[PipelineStatus | None, about("null before the run and its stages are known")] = None
    resources: ResourceStatus = field(default_factory=ResourceStatus)
    acceleration: Annotated[AccelerationStatus | None, about("null while this node holds no layers")] = None
    peers: Annotated[FirstPeers, about("the first 32; /api/peers has all", brief="peer")] = ()
    feed: Annotated[NewestEvents, about("newest first; /api/feed has all")] = ()
    network: NetworkStatus = field(default_factory=NetworkStatus)
    swarm: Annotated[SwarmStatus | None, about("null before the first look at the network")] = None
    history: Annotated[tuple[LossPoint, ...], EXCLUDED] = ()  # at most 1,000 points, oldest first
    contribution: Annotated[WorkTotal, about("since the beginning of the record; null: no work yet")] = field(
        default_factory=WorkHistoryStatus
    )
    samples: Annotated[SamplesStatus, EXCLUDED] = field(default_factory=SamplesStatus)
    uptime_seconds: Annotated[float, about("at this snapshot, by a clock that does not jump", "s")] = 0.0

    @derived("other nodes of the run", gauge="peers", brief="other nodes")
    @property
    def peer_count(self) -> int:
        return len(self.peers)

    @derived("other nodes of the run by the path over which they are reached", gauge="connected_peers", label="kind")
    @property
    def peer_connections(self) -> Counts:
        return tuple((kind, sum(peer.connection is kind for peer in self.peers)) for kind in ConnectionKind)

    @derived("roles of this node")
    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of this node; empty without layers."""
        return self.model.roles if self.model else ()

    @derived("layers that this node holds; null: none, or none yet")
    @property
    def layers(self) -> LayerRange | None:
        return self.model.layers if self.model else None

    @derived("compute device")
    @property
    def device(self) -> str:
        return self.resources.device

    @derived("shape of the run's model; null before it is known")
    @property
    def architecture(self) -> Architecture | None:
        return self.model.architecture if self.model else None

    @derived("this computer's work that certificates accepted")
    @property
    def accepted(self) -> AcceptedWork:
        length = self.architecture.sequence_length if self.architecture else 0
        return accepted_work(self.diloco.rounds, self.node_id, length)
