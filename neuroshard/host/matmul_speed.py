"""Speed of matrix products on a device: the figure of its data sheet, or a measurement."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from neuroshard.host.resources import Device
from neuroshard.status.computer import PeakSource

PROBE_SECONDS = 0.3
PROBE_SIZE = 768  # large enough to leave the caches of one core, small enough to repeat in the time above
ACCELERATOR_PROBE_SIZE = 4_096  # a smaller product measures the start of the work; three such matrices take 100 MB

# FLOP/s of dense matrix products in bf16, added up in fp32. By the whole name that the driver reports: a laptop's GPU
# and a part of a GPU (MIG) have longer names and other speeds.
BF16_PEAKS: Final = {
    # NVIDIA's data sheets of these products; the larger figures there are "with sparsity"
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,  # SXM
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A30": 165e12,
    "NVIDIA A40": 149.7e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    # "Peak BF16 Tensor TFLOPS with FP32 Accumulate" in the white papers on the architectures Ampere (GA102), Ada and
    # Blackwell (RTX)
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
}


@dataclass(frozen=True)
class PeakSpeed:
    """Highest speed of matrix products on a device."""

    flops_per_second: float
    source: PeakSource


def peak_speed(device: Device, dtype: torch.dtype) -> PeakSpeed:
    """The device's speed in bf16 by its data sheet. For others it is measured in the type that training uses."""
    if device.name in BF16_PEAKS:
        return PeakSpeed(BF16_PEAKS[device.name], "table")
    size = PROBE_SIZE if device.kind == "cpu" else ACCELERATOR_PROBE_SIZE
    return PeakSpeed(matmul_flops_per_second(device.torch_device(), dtype, size), "measured")


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype = torch.float32, size: int = PROBE_SIZE) -> float:
    """Floating-point operations per second of matrix products with this thread's settings.

    On a processor, time in which other programs compute does not count. Each kind of product is measured once per
    process.
    """
    return _measured(device, dtype, size, torch.get_num_threads())


@cache
def _measured(device: torch.device, dtype: torch.dtype, size: int, threads: int) -> float:
    left = torch.ones(size, size, device=device, dtype=dtype)
    right = torch.ones(size, size, device=device, dtype=dtype)
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)[0, 0].item()  # the first product includes the set-up time
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    count, began, deadline = 0, clock(), time.perf_counter() + PROBE_SECONDS
    while time.perf_counter() < deadline or clock() == began:  # the clock of a thread may be coarse
        torch.mm(left, right, out=out)[0, 0].item()  # waits for an accelerator to finish
        count += 1
    return 2.0 * size**3 * count / (clock() - began)
