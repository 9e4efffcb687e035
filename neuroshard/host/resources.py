"""Device, speed and load of this computer: matrix speed, CPU time per thread, disk and accelerator."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from neuroshard.errors import UsageError
from neuroshard.model.memory_need import DeviceKind
from neuroshard.status.computer import ResourceStatus
from neuroshard.telemetry.counters import sample_threads, thread_shares

PROBE_SECONDS = 0.3
USABLE_SHARE = 0.9  # of an accelerator's memory: the rest belongs to the desktop
PROBE_SIZE = 768  # large enough to leave the caches of one core, small enough to repeat in the time above


@dataclass(frozen=True)
class Device:
    """The device that holds the model and computes."""

    kind: DeviceKind
    name: str
    memory_mb: int | None = None  # the accelerator's own, MB of 10**6 bytes; None where it shares the computer's
    gpu_uuid: str | None = None  # as NVIDIA's driver writes it; None for all others

    def torch_device(self) -> torch.device:
        return torch.device(self.kind)


def choose_device(wanted: str) -> Device:
    """Return the device for a `--device` setting. Raises UsageError if this computer does not have it."""
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
    """Measure an fp32 matrix product with this thread's settings; floating-point operations per second."""
    left = torch.ones(PROBE_SIZE, PROBE_SIZE, device=device)
    right = torch.ones(PROBE_SIZE, PROBE_SIZE, device=device)
    (left @ right).sum().item()  # the first product includes the set-up time
    count = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < PROBE_SECONDS:
        (left @ right)[0, 0].item()  # waits for an accelerator to finish
        count += 1
    return 2.0 * PROBE_SIZE**3 * count / elapsed


DISK_SECONDS = 60.0  # walking the data folder costs more than the rest together


class ResourceSampler:
    """Measures the load; CPU shares cover the time since the previous sample. Runs in a worker thread."""

    def __init__(self, device: Device, data_dir: Path, threads_limit: int) -> None:
        self._device = device
        self._data_dir = data_dir
        self._threads_limit = threads_limit
        self._threads = sample_threads(time.monotonic())
        self._disk_used = 0
        self._disk_time = float("-inf")

    def sample(self) -> ResourceStatus:
        """Measure the load now. The size of the data folder may be up to DISK_SECONDS old."""
        now = time.monotonic()
        before, self._threads = self._threads, sample_threads(now)
        shares = thread_shares(before, self._threads)
        if now - self._disk_time >= DISK_SECONDS:
            self._disk_used, self._disk_time = folder_bytes(self._data_dir), now
        gpu_used, gpu_total, gpu_utilisation = self._accelerator()
        return ResourceStatus(
            device=self._device.kind,
            device_name=self._device.name,
            cpu_cores=sum(share.cores for share in shares),
            cpu_threads_limit=self._threads_limit,
            disk_free_bytes=self._free_bytes(),
            disk_used_bytes=self._disk_used,
            gpu_memory_bytes=gpu_used,
            gpu_memory_total_bytes=gpu_total,
            gpu_utilisation=gpu_utilisation,
            threads=shares,
        )

    def _free_bytes(self) -> int:
        """Free bytes of the disk; 0 while the data folder is missing, because nothing can be written."""
        try:
            return shutil.disk_usage(self._data_dir).free
        except OSError:
            return 0

    def _accelerator(self) -> tuple[int | None, int | None, float | None]:
        """Bytes in use by this process, bytes in total, utilisation 0..1; None where it is not known."""
        if self._device.kind != "cuda":
            return None, None, None
        _free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_reserved(), total, torch.cuda.utilization() / 100


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; files that vanish or may not be read count as 0."""
    total = 0
    for root, _folders, files in os.walk(folder):
        for name in files:
            try:
                total += (Path(root) / name).stat().st_size
            except OSError:
                continue
    return total
