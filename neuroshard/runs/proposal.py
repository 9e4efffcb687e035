"""Proposes a local run: the largest model that fits the memory and steps fast enough. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from neuroshard.config.run_parameters import GenesisPins, InnerOptimization, OuterOptimization, RunParameters
from neuroshard.config.settings import OptimizerMemory
from neuroshard.identity import hash_parts
from neuroshard.model.architecture import architecture_for
from neuroshard.model.memory_need import (
    LARGEST_BATCH,
    DeviceKind,
    batch_size_for,
    estimated_step_seconds,
    propose_architecture,
)
from neuroshard.optim.schedule import scaled_learning_rate
from neuroshard.types import Architecture

SEQUENCE_LENGTH = 512
STAGED_MICROBATCHES = 8  # in a step of a run with several stages: several are in flight at the same time
TRAINING_EFFICIENCY = 0.5  # fraction of the matrix-product speed that a training step reaches (measured)

DEMO_DEPTH = 4
DEMO_SEQUENCE_LENGTH = 256
DEMO_BATCH = 4
DEMO_STAGED_BATCH = 2
DEMO_LEARNING_RATE = 3e-3
DEMO_WARMUP_STEPS = 50
DEMO_DECAY_STEPS = 1_500


@dataclass(frozen=True)
class HardwareBudget:
    """Memory tiers of this computer in MB, and its matrix-product speed in floating-point operations per second."""

    tier_mb: int
    device: DeviceKind
    device_tier_mb: int | None
    flops_per_second: float
    ranks: int = 1  # that compute one microbatch each at the same time
    optimizer_memory: OptimizerMemory = "device"  # "auto": the host's only if a stage does not fit otherwise
    compiles: bool = False  # blocks, if there is memory for the copy of one
    site_mode: Literal["auto", "replicate", "shard"] = "auto"  # the owner's wish for the tensors on the ranks

    @property
    def moments_memory(self) -> OptimizerMemory:
        """Where AdamW's moments may be: a processor, and the ranks of a site, always keep them on the device."""
        return self.optimizer_memory if self.device != "cpu" and self.ranks == 1 else "device"


@dataclass(frozen=True)
class Proposal:
    """Size and schedule of a new run before it is pinned to a data set: architecture, batch, steps and stages."""

    architecture: Architecture
    batch_size: int
    inner: InnerOptimization
    stage_count: int = 1
    microbatches_per_step: int = 1


def propose(room: HardwareBudget, vocabulary_size: int) -> Proposal:
    """Choose the model of a new run. Raises TooLittleMemoryError with the number of MB that is needed."""
    on_host = room.moments_memory == "host"
    architecture = propose_architecture(
        room.tier_mb,
        vocabulary_size,
        SEQUENCE_LENGTH,
        room.device,
        device_tier_mb=room.device_tier_mb,
        step_seconds=partial(
            estimated_step_seconds,
            sequences=LARGEST_BATCH,
            flops_per_second=TRAINING_EFFICIENCY * room.flops_per_second,
        ),
        moments_on_host=on_host,
    )
    batch = batch_size_for(
        architecture, None, room.tier_mb, room.device, device_tier_mb=room.device_tier_mb, moments_on_host=on_host
    )
    inner = InnerOptimization(learning_rate=scaled_learning_rate(architecture.hidden_size))
    return Proposal(architecture, batch, inner, microbatches_per_step=room.ranks)


def propose_demo(vocabulary_size: int, stage_count: int = 1) -> Proposal:
    """Return the demo's fixed model, which is small enough to learn words within two minutes on two cores.

    With several stages it uses smaller microbatches and keeps several in flight. Its learning rate decays within a
    visit of about four minutes, which shows the most progress, and then stays at its final fraction.
    """
    architecture = architecture_for(DEMO_DEPTH, vocabulary_size, DEMO_SEQUENCE_LENGTH)
    inner = InnerOptimization(
        learning_rate=DEMO_LEARNING_RATE, warmup_steps=DEMO_WARMUP_STEPS, decay_steps=DEMO_DECAY_STEPS
    )
    if stage_count == 1:
        return Proposal(architecture, DEMO_BATCH, inner)
    return Proposal(architecture, DEMO_STAGED_BATCH, inner, stage_count, STAGED_MICROBATCHES)


def run_parameters(
    proposal: Proposal, pins: GenesisPins, *, name: str, inner_steps: int | None = None
) -> RunParameters:
    """Build the first version of a run's parameters. The data set's root determines the seed of the weights.

    `inner_steps` is the longest interval between two rounds; None for the default.
    """
    return RunParameters(
        name=name,
        version=1,
        architecture=proposal.architecture,
        stage_count=proposal.stage_count,
        batch_size=proposal.batch_size,
        sequences_per_step=proposal.batch_size * proposal.microbatches_per_step,
        initial_weights_seed=int.from_bytes(hash_parts("neuroshard/weights", pins.root)[:4]),
        genesis=pins,
        inner=proposal.inner,
        outer=OuterOptimization() if inner_steps is None else OuterOptimization(inner_steps=inner_steps),
    )
