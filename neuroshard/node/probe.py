"""Measures this computer: device, threads, and how fast it multiplies matrices."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

import torch

from neuroshard.errors import UsageError
from neuroshard.model.memory_need import DeviceKind

PROBE_SECONDS = 0.3
USABLE_SHARE = 0.9  # of an accelerator's memory: the rest belongs to the desktop
PROBE_SIZE = 768  # large enough to leave the caches of one core, small enough to repeat in the time above


@dataclass(frozen=True)
class Device:
    """Where the model lives."""

    kind: DeviceKind
    name: str
    memory_mb: int | None = None  # the accelerator's own, MB of 10**6 bytes; None where it shares the computer's
    gpu_uuid: str | None = None  # as NVIDIA's driver writes it; None for all others

    def torch_device(self) -> torch.device:
        """The device for torch calls."""
        return torch.device(self.kind)


def choose_device(wanted: str) -> Device:
    """The device of a `--device` setting. Raises UsageError when it is not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda, but PyTorch sees no CUDA device here.", "Use --device cpu or auto.")
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise UsageError("--device mps, but PyTorch sees no Apple GPU here.", "Use --device cpu or auto.")
    if wanted in ("auto", "cuda") and torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info()
        properties = cast("Any", torch.cuda.get_device_properties())  # pyright: ignore[reportUnknownMemberType]
        uuid = f"GPU-{properties.uuid}"
        return Device("cuda", torch.cuda.get_device_name(), int(total * USABLE_SHARE) // 1_000_000, uuid)
    if wanted in ("auto", "mps") and torch.backends.mps.is_available():
        return Device("mps", "Apple GPU")
    return Device("cpu", "CPU")


def matmul_flops_per_second(device: torch.device) -> float:
    """Speed of an fp32 matrix product on this thread's settings, in floating-point operations a second."""
    left = torch.ones(PROBE_SIZE, PROBE_SIZE, device=device)
    right = torch.ones(PROBE_SIZE, PROBE_SIZE, device=device)
    (left @ right).sum().item()  # the first product pays for set-up
    count = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < PROBE_SECONDS:
        (left @ right)[0, 0].item()  # waits for an accelerator to finish
        count += 1
    return 2.0 * PROBE_SIZE**3 * count / elapsed
