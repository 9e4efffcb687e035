"""RunParameters: everything all nodes of a run must agree on. Signed by the run's owner, identical on every node.

A run's id is a hash of its parameters, so a field that comes later must not show in runs that do not use it: its
metadata say `since` which format it is there, and JSON leaves it out while it has its default.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from neuroshard.types import Architecture

MAX_SEEDS = 16
CodecName: TypeAlias = Literal["fp32", "bf16", "int8", "int4", "topk", "powersgd"]
StrategyName: TypeAlias = Literal["diloco", "sparta", "streaming", "averaging"]


@dataclass(frozen=True)
class GenesisPins:
    """The data of a run: growth of the data set moves nobody, because these stay."""

    root: str  # hex; hash over tokenizer and digest pages, or of the minimal manifest when unsigned
    total_shards: int
    signing_key: str | None  # hex Ed25519 key of the manifest, None for unverified data
    tokenizer_sha256: str
    next_merge_id: int  # ids at or above this are not part of the run's vocabulary


@dataclass(frozen=True)
class InnerOptimization:
    """AdamW and its schedule (DESIGN 4.1)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1  # on matrices only
    max_grad_norm: float = 1.0
    warmup_steps: int = 100
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    decay_steps: int = 100_000
    final_fraction: float = 0.1  # of the learning rate, after the decay


@dataclass(frozen=True)
class OuterOptimization:
    """How replicas synchronise: DiLoCo's outer step (DESIGN 4.3), or another strategy's (DESIGN 4.7)."""

    inner_steps: int = 500
    learning_rate: float = 0.7
    momentum: float = 0.9
    lone_outer: Literal["keep", "apply"] = "keep"
    aggregator: Literal["trimmed_mean", "median", "mean", "krum", "multi_krum", "centred_clipping"] = "trimmed_mean"
    trim_fraction: float = 0.1
    codec: CodecName = "int8"  # how contributions travel in a round of several
    max_round_seconds: float = 3600.0
    strategy: StrategyName = field(default="diloco", metadata={"since": 4})
    overlap: bool = field(default=False, metadata={"since": 4})  # inner steps go on while a round of several runs
    averaged_sequences: int = field(default=1024, metadata={"since": 4})  # of a group, to a step of averaged gradients
    rank: int = field(default=64, metadata={"since": 4})  # of powersgd's factors


@dataclass(frozen=True)
class RunParameters:
    """A run: its architecture, stages, optimisation and data."""

    name: str
    version: int
    architecture: Architecture
    stage_count: int
    batch_size: int  # sequences a microbatch
    sequences_per_step: int  # of one stage's inner step
    initial_weights_seed: int
    genesis: GenesisPins
    inner: InnerOptimization = field(default_factory=InnerOptimization)
    outer: OuterOptimization = field(default_factory=OuterOptimization)
    admission: Literal["friends", "strangers"] = field(default="friends", metadata={"since": 2})
    holds_from_outer_step: int = field(default=0, metadata={"since": 2})  # of a later version; 0: from the start
    seeds: tuple[str, ...] = field(default=(), metadata={"since": 2})  # multiaddrs of nodes that know the run
    # How activations and their gradients travel between stages, and how drivers choose among a stage's replicas.
    wire_precision: Literal["fp32", "bf16", "int8"] = field(default="fp32", metadata={"since": 3})
    routing: Literal["lanes", "balanced"] = field(default="lanes", metadata={"since": 3})
