"""The snapshot of a node: frozen values with everything that the API and the dashboard show of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from neuroshard.status.data import DataStatus
from neuroshard.status.history import SamplesStatus, WorkHistoryStatus
from neuroshard.status.owner_policy import OwnerPolicyStatus
from neuroshard.status.pipeline import PipelineStatus
from neuroshard.status.rounds import StageRoundsStatus
from neuroshard.types import Architecture, LayerRange, NodeId, Role, RunId, ShardId, WalletId


@dataclass(frozen=True)
class PathsStatus:
    """Where the node keeps what on this computer."""

    data_dir: str = ""
    config_file: str = ""
    data_cache: str = ""
    checkpoints: str = ""  # of all wallets, runs and stages
    logs: str = ""
    node_key: str = ""
    api_secret: str = ""


class NodeState(StrEnum):
    """What the node does right now; `NodeStatus.state_reason` says why in words."""

    STARTING = "starting"
    WAITING_FOR_DATA = "waiting_for_data"
    WAITING_FOR_STAGES = "waiting_for_stages"  # nobody can work on some layers of the model
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
    """One line of the start-up progress shown in the dashboard from the first second."""

    name: str  # for people: "Reading the Genesis manifest"
    state: StartupStepState = StartupStepState.PENDING
    detail: str = ""
    fraction: float | None = None  # 0..1 when it can be told


@dataclass(frozen=True)
class MemoryStatus:
    """Memory limits of this node, in MB of 10**6 bytes."""

    tier_mb: int
    limit_mb: int
    limit_source: str  # what set the limit, in words
    need_mb: int  # what the formula says this model and batch need
    resident_mb: int
    peak_mb: int


@dataclass(frozen=True)
class ModelStatus:
    """The model this node holds (a part of)."""

    architecture: Architecture
    parameter_count: int
    layers: LayerRange | None  # None: no part of it, or none yet
    roles: tuple[Role, ...]


@dataclass(frozen=True)
class RunStatus:
    """The run this node serves and why it serves it."""

    run_id: RunId
    is_own: bool
    is_demo: bool
    explanation: str  # one clear sentence


@dataclass(frozen=True)
class LossPoint:
    """One point of the training curve; loss in nats a token."""

    step: int
    time: float  # seconds since the epoch
    loss: float
    lr: float
    tokens: int


@dataclass(frozen=True)
class HeldOutPoint:
    """One evaluation on the pinned held-out sequences."""

    step: int
    time: float
    loss: float  # mean nats a token
    improvement: float  # mean paired improvement over the first evaluation, nats a token
    standard_error: float  # of that improvement
    measured_by: tuple[NodeId, ...] = ()  # other nodes that signed it; (): this node measured it itself


@dataclass(frozen=True)
class TrainingStatus:
    """Progress of the inner steps on this node."""

    steps: int = 0
    tokens: int = 0
    inherited_steps: int = 0  # of them, what others had made before this node took over
    inherited_tokens: int = 0
    loss: float | None = None  # last step
    loss_ema: float | None = None
    initial_loss: float | None = None  # mean of the run's first steps
    lr: float = 0.0
    tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    batch_size: int = 0
    sequences_per_step: int = 0
    skipped_steps: int = 0  # non-finite loss or gradient
    precision: str = "fp32"
    held_out: tuple[HeldOutPoint, ...] = ()
    held_out_sequences: int = 0
    unigram_entropy: float | None = None  # nats a token of the held-out text: what knowing only frequencies gives


class LearningVerdict(StrEnum):
    """Answer to: is the model really learning?"""

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
    """Verdict on learning, resting on held-out data, in words a user can act on."""

    training_verified: bool = False
    status: LearningVerdict = LearningVerdict.INSUFFICIENT_DATA
    reason: str = "No held-out evaluation yet."
    action: str = "Nothing to do: wait for the first evaluations."
    loss_trend: LossTrend = LossTrend.INSUFFICIENT_DATA


@dataclass(frozen=True)
class DilocoStatus:
    """Progress towards the next outer step."""

    inner_step: int = 0
    inner_steps_total: int = 0
    outer_steps: int = 0
    last_sync: float | None = None  # seconds since the epoch
    members: int = 1  # of the last round, this node included
    lone_outer: str = "keep"
    strategy: str = ""  # of the round that comes next, as part and codec; "" while it is not known
    part: str = ""  # what it is about, in words
    codec: str = ""
    explanation: str = "Alone: outer steps move the anchor only; there is nobody to synchronise with."
    state_root: str = ""  # hash of the replicated state after the last outer step
    certified_root: str = ""  # that the certificate of this outer step names; without one equal to state_root
    successful_syncs: int = 0
    failed_syncs: int = 0
    rounds: tuple[StageRoundsStatus, ...] = ()  # of each stage that this node holds


@dataclass(frozen=True)
class StageStatus:
    """One stage that this node holds; stages advance on their own clocks."""

    index: int  # of the run's stages
    layers: LayerRange
    steps: int
    outer_step: int
    loss: float | None  # of the last step: where this node drives, and of the last stage
    grad_norm: float | None
    sequences_accumulated: int  # for the step in work
    sequences_wanted: int
    open_microbatches: int  # between their forward and their backward pass
    sessions: int
    state_root: str
    last_saved_step: int | None


@dataclass(frozen=True)
class CheckpointGeneration:
    """One restorable state on disk."""

    step: int
    outer_step: int
    time: float
    loss: float | None
    bytes: int
    path: str


@dataclass(frozen=True)
class CheckpointStatus:
    """What is safe on disk and what a kill at this moment could lose."""

    folder: str = ""
    generations: tuple[CheckpointGeneration, ...] = ()  # newest first
    last_saved_step: int | None = None
    last_saved_time: float | None = None
    interval_seconds: float = 30.0
    could_lose: str = "everything since the start: no checkpoint yet"
    could_lose_steps: int = 0
    could_lose_seconds: float = 0.0
    last_write_seconds: float = 0.0
    last_stall_seconds: float = 0.0
    alarm: str | None = None  # visible trouble, for example a full disk
    restored: str | None = None  # what the start found, in words


@dataclass(frozen=True)
class ThreadShare:
    """CPU use of one thread since the previous snapshot, in cores (1.0 = one full core)."""

    name: str
    cores: float


@dataclass(frozen=True)
class ResourceStatus:
    """What the node uses of this computer."""

    device: str = "cpu"
    device_name: str = ""
    cpu_cores: float = 0.0  # used by this process
    cpu_threads_limit: int = 0
    disk_free_bytes: int = 0
    disk_used_bytes: int = 0  # by the data folder
    gpu_memory_bytes: int | None = None
    gpu_memory_total_bytes: int | None = None
    gpu_utilisation: float | None = None  # 0..1
    threads: tuple[ThreadShare, ...] = ()


class ConnectionKind(StrEnum):
    """How a peer is reached."""

    DIRECT = "direct"
    PUNCHED = "punched"  # direct, through a hole punched into a router
    RELAYED = "relayed"
    IN_MEMORY = "in_memory"


@dataclass(frozen=True)
class PeerStatus:
    """Another node of the run, as its last verified report and announcement describe it."""

    node_id: NodeId
    wallet_id: WalletId
    roles: tuple[Role, ...]
    layers: LayerRange | None  # None: it holds no part of the model, or none yet
    loss_ema: float | None
    tokens_per_second: float
    last_seen: float  # seconds since the epoch
    steps: int = 0
    tokens: int = 0
    shard: ShardId | None = None
    outer_step: int = 0
    state_hash: str = ""
    state: str = ""  # of the node, as NodeState
    started_at: float | None = None
    first_seen: float | None = None
    version: str = ""
    connection: ConnectionKind | None = None  # None: known only through others
    address: str = ""
    rtt_seconds: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    score: float = 0.0  # 0 is neutral, below it the peer misbehaved


class NetworkState(StrEnum):
    """How this node is connected."""

    OFF = "off"
    STARTING = "starting"
    ALONE = "alone"  # running, but nobody was found
    CONNECTED = "connected"
    FAILED = "failed"  # training goes on; it is tried again


@dataclass(frozen=True)
class NetworkStatus:
    """This node's connections; traffic in bytes since the start and bytes a second."""

    state: NetworkState = NetworkState.OFF
    explanation: str = "The network is off."
    addresses: tuple[str, ...] = ()
    connections: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    upload_rate: float = 0.0
    download_rate: float = 0.0
    upload_limit: float | None = None
    banned_peers: int = 0
    refused: tuple[tuple[str, int], ...] = ()  # reason and how often, for everything a peer sent that was refused
    join_line: str = ""  # what others type to join this run through this node


@dataclass(frozen=True)
class SwarmStatus:
    """Numbers of all nodes of the run together, this one included; totals never fall when nodes leave."""

    nodes: int = 1
    training_nodes: int = 0
    global_loss: float | None = None
    min_loss: float | None = None
    total_steps: int = 0
    total_tokens: int = 0
    shards_covered: int = 0
    tokens_per_second: float = 0.0
    model_hashes: tuple[tuple[NodeId, str], ...] = ()


@dataclass(frozen=True)
class NodeStatus:
    """Everything the API tells about this node; published as a whole, never changed."""

    version: str
    started_at: float  # seconds since the epoch
    time: float  # of this snapshot, seconds since the epoch
    state: NodeState = NodeState.STARTING
    state_reason: str = "Starting."
    is_standing_by: bool = False  # it trains, but nobody asks anything of the stages that it holds at present
    startup: tuple[StartupStep, ...] = ()
    node_id: NodeId | None = None
    wallet_id: WalletId | None = None
    data_dir: str = ""
    paths: PathsStatus = field(default_factory=PathsStatus)
    is_demo: bool = False
    paused_until: float | None = None
    kindness: OwnerPolicyStatus = field(default_factory=OwnerPolicyStatus)
    warnings: tuple[str, ...] = ()
    model: ModelStatus | None = None
    memory: MemoryStatus | None = None
    run: RunStatus | None = None
    training: TrainingStatus = field(default_factory=TrainingStatus)
    verification: VerificationStatus = field(default_factory=VerificationStatus)
    diloco: DilocoStatus = field(default_factory=DilocoStatus)
    data: DataStatus | None = None
    checkpoints: CheckpointStatus = field(default_factory=CheckpointStatus)
    stages: tuple[StageStatus, ...] = ()  # that this node holds, in the order of their layers
    pipeline: PipelineStatus | None = None  # None before the run and its stages are known
    resources: ResourceStatus = field(default_factory=ResourceStatus)
    peers: tuple[PeerStatus, ...] = ()
    network: NetworkStatus = field(default_factory=NetworkStatus)
    swarm: SwarmStatus | None = None  # None before the first look at the network
    history: tuple[LossPoint, ...] = ()  # at most 1,000 points, oldest first
    contribution: WorkHistoryStatus = field(default_factory=WorkHistoryStatus)
    samples: SamplesStatus = field(default_factory=SamplesStatus)
    uptime_seconds: float = 0.0  # at this snapshot, by a clock that does not jump
