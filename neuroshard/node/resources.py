"""Samples what the node uses of this computer: CPU by thread, disk, accelerator."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import torch

from neuroshard.node.probe import Device
from neuroshard.status.snapshot import ResourceStatus
from neuroshard.telemetry.counters import sample_threads, thread_shares

DISK_SECONDS = 60.0  # walking the data folder costs more than the rest together


class ResourceSampler:
    """Takes samples; CPU shares are those since the previous sample. Runs in a worker thread."""

    def __init__(self, device: Device, data_dir: Path, threads_limit: int) -> None:
        self._device = device
        self._data_dir = data_dir
        self._threads_limit = threads_limit
        self._threads = sample_threads(time.monotonic())
        self._disk_used = 0
        self._disk_time = float("-inf")

    def sample(self) -> ResourceStatus:
        """Measure now."""
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
        """0 while the data folder is not there: nothing can be written."""
        try:
            return shutil.disk_usage(self._data_dir).free
        except OSError:
            return 0

    def _accelerator(self) -> tuple[int | None, int | None, float | None]:
        """Memory in use by this process, total memory, utilisation 0..1; None where it cannot be told."""
        if self._device.kind != "cuda":
            return None, None, None
        _free, total = torch.cuda.mem_get_info()
        return torch.cuda.memory_reserved(), total, torch.cuda.utilization() / 100


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; files that vanish meanwhile, or may not be seen, count as nothing."""
    total = 0
    for root, _folders, files in os.walk(folder):
        for name in files:
            try:
                total += (Path(root) / name).stat().st_size
            except OSError:
                continue
    return total
