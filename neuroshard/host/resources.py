"""Device and load of this computer: CPU time per thread, disk and accelerator."""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, assert_never, cast

import torch

from neuroshard.errors import UsageError
from neuroshard.host.nvidia import nvml
from neuroshard.model.memory_need import DeviceKind
from neuroshard.status.computer import ResourceStatus
from neuroshard.telemetry.counters import sample_threads, thread_shares

_LOG = logging.getLogger(__name__)

USABLE_SHARE = 0.9  # of an accelerator's memory: the rest belongs to the desktop
CONTEXT_BYTES = 500_000_000  # of a process on an accelerator, outside the memory that PyTorch counts
KINDS: tuple[DeviceKind, ...] = ("cuda", "xpu", "mps", "cpu")  # the preferred first


@dataclass(frozen=True)
class Device:
    """The device that holds the model and computes."""

    kind: DeviceKind
    name: str
    index: int = 0  # among the devices of its kind
    memory_mb: int | None = (
        None  # usable, MB of 10**6 bytes; None for the CPU and for Apple's GPU, which shares its own
    )
    gpu_uuid: str | None = None  # as NVIDIA's driver writes it; None for all others
    version: str = ""  # compute capability or architecture, and driver, where PyTorch knows them
    total_bytes: int | None = None  # of its memory; None where memory_mb is None

    @property
    def label(self) -> str:
        """The name with PyTorch's, for example "NVIDIA H200 (cuda:0)"."""
        return self.name if self.kind == "cpu" else f"{self.name} ({self.torch_device()})"

    def torch_device(self) -> torch.device:
        """PyTorch's name of the device; only the kinds of which a computer can have several have an index there."""
        match self.kind:
            case "cuda" | "xpu":
                return torch.device(self.kind, self.index)
            case "mps" | "cpu":
                return torch.device(self.kind)
            case _:
                assert_never(self.kind)

    def make_current(self) -> None:
        """Make it the current device of the calling thread, so that nothing is allocated on another one.

        PyTorch then takes no more memory of it than `memory_mb`, so that other programs find some.
        """
        if self.kind in ("cuda", "xpu"):
            torch.accelerator.set_device_index(self.index)
            if self.memory_mb is not None and self.total_bytes:
                limit = max(0, self.memory_mb * 1_000_000 - CONTEXT_BYTES)
                _module(self.kind).set_per_process_memory_fraction(min(1.0, limit / self.total_bytes), self.index)

    def limited_to(self, max_memory_mb: int | None) -> Device:
        """The same device with the owner's limit on the use of its memory; None: the owner sets none."""
        if max_memory_mb is None or self.memory_mb is None:
            return self
        return replace(self, memory_mb=min(self.memory_mb, max_memory_mb))


def choose_device(wanted: str) -> Device:
    """Return the device for a `--device` setting. Raises UsageError if this computer does not have it."""
    if wanted == "auto":
        return next(device for kind in KINDS for device in devices_of(kind))
    kind, _, number = wanted.partition(":")
    devices = devices_of(cast("DeviceKind", kind))
    index = int(number or 0)
    if index < len(devices):
        return devices[index]
    found = [device for kind in KINDS for device in devices_of(kind)]
    names = ["cpu" if device.kind == "cpu" else f"{device.torch_device()} ({device.name})" for device in found]
    here = f"This computer has: {', '.join(names)}."
    if devices:
        raise UsageError(f"There is no device {wanted}.", here)
    reason, advice = obstacle(cast("DeviceKind", kind))
    raise UsageError(f"The device {wanted} cannot be used: {reason}.", f"{advice} {here}".strip())


def devices_of(kind: DeviceKind) -> list[Device]:
    """The devices of a kind that PyTorch can use, in the order of their indices."""
    match kind:
        case "cpu":
            return [Device("cpu", "CPU")]
        case "mps":
            return [Device("mps", "Apple GPU")] if torch.backends.mps.is_available() else []
        case "cuda" | "xpu":
            with warnings.catch_warnings(record=True) as caught:  # the reasons why a GPU is not used
                warnings.simplefilter("always")
                torch_kind = _module(kind)
                count = int(torch_kind.device_count()) if torch_kind.is_available() else 0
                devices = [_described(kind, index, torch_kind.get_device_properties(index)) for index in range(count)]
            for warning in caught:
                _LOG.warning("PyTorch warns about %s devices: %s.", kind, _first_sentence(warning.message))
            return devices
        case _:
            assert_never(kind)


def obstacle(kind: DeviceKind) -> tuple[str, str]:
    """The reason why PyTorch can use no device of a kind, in one line without a full stop, and advice or ""."""
    install = "Install the build of PyTorch that pytorch.org names for this computer."
    match kind:
        case "cpu":
            return "", ""
        case "mps":
            return "PyTorch sees no Apple GPU", "" if torch.backends.mps.is_built() else install
        case "cuda" | "xpu":
            try:
                _module(kind).init()
            except AssertionError:  # as PyTorch reports that it has no code for this kind
                return f"PyTorch {torch.__version__} is built without {kind.upper()}", install
            except RuntimeError as error:
                reason = _first_sentence(error)
                return reason, "Install or update the driver." if "driver" in reason.lower() else ""
            return "PyTorch finds none", ""
        case _:
            assert_never(kind)


def _module(kind: Literal["cuda", "xpu"]) -> Any:
    """torch.cuda or torch.xpu, which have the same functions. AMD's GPUs are "cuda" in a ROCm build of PyTorch."""
    return torch.get_device_module(kind)


def _described(kind: Literal["cuda", "xpu"], index: int, properties: Any) -> Device:
    name, total = str(properties.name), int(properties.total_memory)
    device = Device(kind, name, index, int(total * USABLE_SHARE) // 1_000_000, total_bytes=total)
    if kind == "xpu":
        return replace(device, version=f"driver {properties.driver_version}")
    if torch.version.hip is not None:
        name = name if name.startswith("AMD") else f"AMD {name}"
        return replace(device, name=f"{name} (ROCm)", version=f"{properties.gcnArchName}, ROCm {torch.version.hip}")
    version = f"compute capability {properties.major}.{properties.minor}"
    return replace(device, gpu_uuid=f"GPU-{properties.uuid}", version=version)


def _first_sentence(error: object) -> str:
    return str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")


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
            device=str(self._device.torch_device()),
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
        kind, index = self._device.kind, self._device.index
        match kind:
            case "cpu" | "mps":
                return None, None, None
            case "cuda" | "xpu":
                total = int(_module(kind).get_device_properties(index).total_memory)
                return int(_module(kind).memory_reserved(index)), total, _utilisation(kind, index)
            case _:
                assert_never(kind)


def _utilisation(kind: Literal["cuda", "xpu"], index: int) -> float | None:
    """Share of the time in which the device was busy, 0..1; None if its driver or library does not show it."""
    if torch.version.hip is not None:  # PyTorch asks AMD's amdsmi, which pip does not install with this program
        return None
    try:
        return float(_module(kind).utilization(index)) / 100
    except (AttributeError, ImportError, RuntimeError, nvml().NVMLError):  # the first: PyTorch < 2.13
        return None


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
