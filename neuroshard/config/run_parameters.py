"""RunParameters: everything that all nodes of a run must agree on. The run's owner signs them.

The annotations are the bounds of every value; `neuroshard/identity/run_parameters.py` checks how values fit together.

A run's id is a hash of its parameters, so a field added later must not change the JSON of runs that do not use it. Its
metadata `since` is the first format with the field, and JSON omits the field while it has its default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from neuroshard.types import LARGEST_REAL, Architecture, HexDigest, HexKey, PositiveCount, PositiveReal

MAX_SEEDS = 16
MAX_AUTHORITIES = 3
MAX_UNEQUAL_STAGES = 128
SUBSPACE_CACHE_MB = 64
CodecName: TypeAlias = Literal["fp32", "bf16", "int8", "int4", "topk"]
WirePrecisionName: TypeAlias = Literal["fp32", "bf16", "int8", "int4", "int4-rank8"]
InnerOptimizerName: TypeAlias = Literal["adamw", "muon"]
StrategyName: TypeAlias = Literal["diloco", "sparta", "streaming", "averaging"]
_Whole: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_BelowOne: TypeAlias = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True)
class GenesisPins:
    """The pinned data of a run. The pins do not change when the data set grows, so the run does not change either."""

    root: HexDigest  # hash over tokenizer and digest pages, or of the minimal manifest when unsigned
    total_shards: PositiveCount
    signing_key: HexKey | None  # Ed25519 key of the manifest, None for unverified data
    tokenizer_sha256: HexDigest
    next_merge_id: _Whole  # ids at or above this are not part of the run's vocabulary


@dataclass(frozen=True)
class InnerOptimization:
    """Settings of the inner optimizer and of its learning-rate schedule."""

    learning_rate: PositiveReal = 1e-4
    beta1: _BelowOne = 0.9
    beta2: _BelowOne = 0.95
    weight_decay: Annotated[float, Meta(ge=0, le=LARGEST_REAL)] = 0.1  # on matrices only
    max_grad_norm: PositiveReal = 1.0
    warmup_steps: _Whole = 100
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    decay_steps: _Whole = 100_000
    final_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.1  # share of the learning rate that is left after the decay
    # Muon trains the matrices of layers; AdamW, to which the betas belong, all other parameters
    optimizer: InnerOptimizerName = field(default="adamw", metadata={"since": 5})


@dataclass(frozen=True)
class OuterOptimization:
    """Settings of the synchronisation between replicas: DiLoCo's outer step, or that of another strategy."""

    inner_steps: PositiveCount = 100  # the longest interval between two rounds
    learning_rate: PositiveReal = 1.0
    momentum: _BelowOne = 0.75
    lone_outer: Literal["keep", "apply"] = "keep"
    aggregator: Literal["trimmed_mean", "median", "mean", "krum", "centred_clipping"] = "mean"
    trim_fraction: Annotated[float, Meta(ge=0, lt=0.5)] = 0.1
    codec: CodecName = "int4"  # encoding of the contributions in a round with several nodes
    max_round_seconds: PositiveReal = 3600.0
    strategy: StrategyName = field(default="diloco", metadata={"since": 4})
    overlap: bool = field(default=False, metadata={"since": 4})  # inner steps continue during a round with others
    averaged_sequences: PositiveCount = field(
        default=1024, metadata={"since": 4}
    )  # of the group, per averaged gradient step
    # of averaged gradients: matrices travel as two factors of this rank (PowerSGD); 0: whole, in the codec
    rank: _Whole = field(default=0, metadata={"since": 4})
    # "growing": rounds come often at first and rarely later, by the inner steps that the line has certified
    interval: Literal["growing", "fixed"] = field(default="growing", metadata={"since": 5})
    round_share: Annotated[float, Meta(gt=0, le=1)] = field(
        default=0.1, metadata={"since": 5}
    )  # of the time, that exchanges take at most
    # of the outer step: by its "law", or "measured" by the seats among that, half the momentum and the plain mean
    choice: Literal["law", "measured"] = field(default="law", metadata={"since": 5})


@dataclass(frozen=True)
class BranchPoint:
    """The state of another run from which a run continues, and the run whose id divides the data."""

    run_id: HexDigest  # of the other run
    outer_step: _Whole  # of the state
    data_run_id: HexDigest  # the first run of the line: its held-out text was never trained on
    # Of states that were chosen, for each stage: the root, and the certified sequences at which the learning rate warms
    # up again because the moments are new. None: the newest states, with their moments.
    roots: Annotated[tuple[HexDigest, ...], Meta(max_length=MAX_UNEQUAL_STAGES)] = field(
        default=(), metadata={"since": 10}
    )
    sequences: Annotated[tuple[_Whole, ...], Meta(max_length=MAX_UNEQUAL_STAGES)] = field(
        default=(), metadata={"since": 10}
    )


@dataclass(frozen=True)
class RunParameters:
    """A run: its architecture, stages, optimisation and data."""

    name: Annotated[str, Meta(max_length=256)]
    version: PositiveCount
    architecture: Architecture
    stage_count: PositiveCount
    batch_size: PositiveCount  # sequences per microbatch
    sequences_per_step: PositiveCount  # sequences per inner step of one stage
    initial_weights_seed: _Whole
    genesis: GenesisPins
    inner: InnerOptimization = field(default_factory=InnerOptimization)
    outer: OuterOptimization = field(default_factory=OuterOptimization)
    admission: Literal["friends", "admitted", "strangers"] = field(default="friends", metadata={"since": 2})
    holds_from_outer_step: _Whole = field(default=0, metadata={"since": 2})  # a later version applies from this step
    seeds: Annotated[tuple[str, ...], Meta(max_length=MAX_SEEDS)] = field(
        default=(), metadata={"since": 2}
    )  # multiaddrs of nodes that know the run
    # Encoding of activations between stages, and of their gradients ("": the same), whether stages hand them to each
    # other or to the driver, and how drivers choose among a stage's replicas.
    wire_precision: WirePrecisionName = field(default="fp32", metadata={"since": 3})
    wire_precision_gradients: Literal["", WirePrecisionName] = field(default="", metadata={"since": 7})
    data_plane: Literal["chain", "star"] = field(default="chain", metadata={"since": 8})
    routing: Literal["lanes", "balanced"] = field(default="lanes", metadata={"since": 3})
    branch: BranchPoint | None = field(default=None, metadata={"since": 6})  # None: it begins with untrained weights
    stage_layers: Annotated[tuple[PositiveCount, ...], Meta(max_length=MAX_UNEQUAL_STAGES)] = field(
        default=(), metadata={"since": 7}
    )  # layers of each stage; none: as equal as possible
    # Of the basis of the subspace, which every node computes and compares; "" without a subspace. And the memory for
    # the frozen rows of tokens on each device.
    subspace_sha256: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = field(default="", metadata={"since": 7})
    subspace_cache_mb: PositiveCount = field(default=SUBSPACE_CACHE_MB, metadata={"since": 7})
    authority: Annotated[tuple[HexKey, ...], Meta(max_length=MAX_AUTHORITIES)] = field(
        default=(), metadata={"since": 9}
    )  # keys whose holders, the organisers, admit nodes to an organised run
    # The run with which the owner continues this one: members follow. "": none.
    successor: Annotated[str, Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = field(default="", metadata={"since": 10})

    @property
    def admits_strangers(self) -> bool:
        """Whether nodes that are not friends may take part: any node, or any that an organiser admits."""
        return self.admission != "friends"
