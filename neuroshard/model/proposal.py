"""Memory proposes an architecture and a batch size: pure functions, the same answer at every start."""

from __future__ import annotations

from collections.abc import Callable

from neuroshard.errors import TooLittleMemoryError
from neuroshard.model.family import LARGEST_DEPTH, SMALLEST_DEPTH, architecture_for, flops_per_token
from neuroshard.model.memory_limit import TIER_MB
from neuroshard.model.memory_need import MEGABYTE, DeviceKind, memory_need
from neuroshard.model.network_memory import least_limit_mb
from neuroshard.types import Architecture, LayerRange

LARGEST_BATCH = 8
LONGEST_STEP_SECONDS = 3.0

StepSeconds = Callable[[Architecture], float]


def propose_architecture(
    tier_mb: int,
    vocabulary_size: int,
    sequence_length: int = 512,
    device: DeviceKind = "cpu",
    *,
    device_tier_mb: int | None = None,
    step_seconds: StepSeconds | None = None,
    longest_step_seconds: float = LONGEST_STEP_SECONDS,
) -> Architecture:
    """The largest member of the family that fits with a batch of one, and whose step is estimated short enough.

    tier_mb limits the process, device_tier_mb an accelerator's own memory. The smallest member that fits is taken even
    when its step is long. More memory never gives a smaller model. Raises TooLittleMemoryError with the MB needed.
    """
    members = (architecture_for(d, vocabulary_size, sequence_length) for d in range(SMALLEST_DEPTH, LARGEST_DEPTH + 1))
    proposed: Architecture | None = None
    for member in members:
        if not memory_need(member, device=device).fits(tier_mb, device_tier_mb):
            break
        if proposed is not None and step_seconds is not None and step_seconds(member) > longest_step_seconds:
            break
        proposed = member
    if proposed is None:
        smallest = architecture_for(SMALLEST_DEPTH, vocabulary_size, sequence_length)
        raise _too_little(smallest, None, device, tier_mb, device_tier_mb)
    return proposed


def batch_size_for(
    architecture: Architecture,
    layers: LayerRange | None,
    tier_mb: int,
    device: DeviceKind = "cpu",
    *,
    device_tier_mb: int | None = None,
) -> int:
    """The largest batch in 1..8 with which these layers (None: all) fit. Raises TooLittleMemoryError when none does."""
    for batch_size in range(LARGEST_BATCH, 0, -1):
        if memory_need(architecture, layers, batch_size, device).fits(tier_mb, device_tier_mb):
            return batch_size
    raise _too_little(architecture, layers, device, tier_mb, device_tier_mb)


def estimated_step_seconds(architecture: Architecture, sequences: int, flops_per_second: float) -> float:
    """Seconds of an inner step of so many sequences at a sustained rate of floating-point operations."""
    return flops_per_token(architecture) * sequences * architecture.sequence_length / flops_per_second


def _too_little(
    architecture: Architecture,
    layers: LayerRange | None,
    device: DeviceKind,
    tier_mb: int,
    device_tier_mb: int | None,
) -> TooLittleMemoryError:
    need = memory_need(architecture, layers, 1, device)
    where, wanted_mb, given = "memory", least_limit_mb(need.host_bytes), tier_mb
    if device_tier_mb is not None and need.device_bytes > device_tier_mb * MEGABYTE:
        where, wanted_mb, given = "memory on the device", -(-need.device_bytes // MEGABYTE), device_tier_mb
    wanted_tier = -(-wanted_mb // TIER_MB) * TIER_MB
    return TooLittleMemoryError(
        f"Training this model needs {wanted_tier} MB of {where}; {given} MB may be used, counted in steps of 500 MB.",
        f"Raise --memory or the container's limit to {wanted_tier} MB, or use a computer that has them.",
    )
