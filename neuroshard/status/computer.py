"""This computer as the node sees it: its files, its memory limits, and its use of processor, GPU and disk.

This module must not load PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import nan
from typing import Annotated, Literal, TypeAlias

from neuroshard.status.values import Number, Stale, about, derived


@dataclass(frozen=True)
class PathsStatus:
    """Places of the node's files on this computer."""

    data_dir: Annotated[str, about(brief="data folder")] = ""
    config_file: Annotated[str, about("exists only when a setting was stored", brief="settings file")] = ""
    data_cache: Annotated[str, about(brief="data cache")] = ""
    checkpoints: Annotated[str, about("of all wallets, runs and stages", brief="checkpoints")] = ""
    logs: Annotated[str, about(brief="logs")] = ""
    node_key: Annotated[str, about(brief="node key")] = ""
    api_secret: Annotated[str, about(brief="API secret")] = ""


@dataclass(frozen=True)
class MemoryStatus:
    """Memory tier and limits of this node."""

    tier_mb: Annotated[int, about(unit="MB")]
    limit_mb: Annotated[int, about("memory limit", "MB", gauge="memory_limit_bytes")]
    limit_source: Annotated[str, about("what set the limit")]
    need_mb: Annotated[int, about("need of this model and batch by the formula", "MB")]
    resident_mb: Annotated[int, about("resident memory", "MB", gauge="resident_memory_bytes")]
    peak_mb: Annotated[int, about(unit="MB")]


@dataclass(frozen=True)
class ThreadShare:
    """CPU use of one thread since the previous snapshot."""

    name: Annotated[str, about("name of the thread", label="thread")]
    cores: Annotated[Number, about("CPU use of a thread", "cores", stale=Stale.OLD_SNAPSHOT, gauge="thread_cpu_cores")]


@dataclass(frozen=True)
class ResourceStatus:
    """Use of this computer by the node."""

    device: str = "cpu"
    device_name: str = ""
    cpu_cores: Annotated[
        Number, about("CPU use of this process", "cores", stale=Stale.OLD_SNAPSHOT, gauge="cpu_cores")
    ] = 0.0
    cpu_threads_limit: int = 0
    disk_free_bytes: Annotated[int, about("free space of the data folder's disk", "bytes", gauge="disk_free_bytes")] = 0
    disk_used_bytes: Annotated[int, about("used by the data folder", "bytes")] = 0
    gpu_memory_bytes: Annotated[int | None, about(unit="bytes")] = None
    gpu_memory_total_bytes: Annotated[int | None, about(unit="bytes")] = None
    gpu_utilisation: Annotated[Number | None, about(unit="0..1", stale=Stale.OLD_SNAPSHOT)] = None
    threads: tuple[ThreadShare, ...] = ()


class CompilationState(StrEnum):
    """Progress of the compilation of the model's blocks."""

    OFF = "off"
    WAITING = "waiting"  # for the first optimizer step
    COMPILING = "compiling"
    USED = "used"
    REFUSED = "refused"


@dataclass(frozen=True)
class CompilationStatus:
    """Whether training runs compiled blocks."""

    state: Annotated[
        CompilationState, about("waiting: for the first step; used: the compiled form is right, and faster")
    ] = CompilationState.OFF
    reason: Annotated[str, about("why it is off or refused")] = ""


PeakSource: TypeAlias = Literal["table", "measured"]


@dataclass(frozen=True)
class AccelerationStatus:
    """Speed of training on this computer's device, in figures that compare devices.

    Pauses, evaluations and waits for data do not count as time.
    """

    device: Annotated[str, about("name of the device that computes", label="device")]
    precision: Annotated[str, about("number format of its matrix products: fp32 or bf16")]
    flops_per_token: Annotated[
        int,
        about(
            "floating-point operations per token, forward and backward, of the layers that this node holds; forward "
            "passes that are repeated to save memory do not count",
            "FLOP/token",
            gauge="flops_per_token",
        ),
    ]
    peak_flops: Annotated[
        Number, about("highest speed of its matrix products", "FLOP/s", gauge="peak_flops_per_second")
    ]
    peak_source: Annotated[
        PeakSource,
        about("table: NVIDIA's figure for dense products in bf16; measured: products at the start, in this precision"),
    ]
    ranks: Annotated[int, about("processes that compute, each on a device of its own; 1: this node has no site")] = 1
    mode: Annotated[
        Literal["replicate", "shard"] | None,
        about("replicate: each rank has all weights of the layers; shard: a part of each tensor; null: no site"),
    ] = None
    compile: CompilationStatus = CompilationStatus()
    tokens_per_second: Annotated[
        Number | None,
        about(
            "tokens that pass through its layers, forward and backward; null before the first step",
            "tokens/s",
            stale=Stale.NOT_TRAINING,
            gauge="device_tokens_per_second",
        ),
    ] = None

    @derived(
        "computing speed of training: tokens per second x operations per token",
        "FLOP/s",
        stale=Stale.NOT_TRAINING,
        gauge="flops_per_second",
    )
    @property
    def flops_per_second(self) -> Number:
        return nan if self.tokens_per_second is None else self.tokens_per_second * self.flops_per_token

    @derived(
        "model FLOPs utilisation: the share of the peak that training uses",
        "0..1",
        stale=Stale.NOT_TRAINING,
        gauge="mfu",
        brief="share of the device's peak (MFU)",
    )
    @property
    def mfu(self) -> Number:
        return self.flops_per_second / self.peak_flops
