"""NVIDIA's driver: the GPUs of this computer, and temperature, power and other programs' use of one of them.

Everything here is read through NVML (the package nvidia-ml-py), which does not create a context on the GPU."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

import psutil

from neuroshard.host.owner_policy import GpuReading, Unknown

HOLD_SECONDS = 10.0  # after another program's last use of the GPU, so that its pauses between two frames do not count
FIRST_LOOK_SECONDS = 2.0  # the first look asks for the use of this time before it


def nvml() -> Any:
    """The module pynvml, with NVML's functions."""
    return import_module("pynvml")


class GpuSensor:
    """Reads one GPU by its unique id. The first look starts the driver's library. Use it from one thread at a time."""

    def __init__(
        self,
        uuid: str,
        library: Any = None,
        *,
        process: int | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`uuid` has the driver's form, "GPU-..."; `library` is pynvml, and `process` this one, by default."""
        self._uuid = uuid
        self._library: Any = library or nvml()
        self._process = process or os.getpid()
        self._wall_clock = wall_clock
        self._handle: Any = None
        self._seen = 0  # time of the newest sample of use, microseconds since the epoch
        self._uses = deque[tuple[float, float]]()  # times and percentages of the last HOLD_SECONDS

    def look(self, *, others: bool = False) -> GpuReading | Unknown:
        """Read temperature and power now, and with `others` the use by other programs.

        After an error the next look connects to the driver again.
        """
        library = self._library
        try:
            if self._handle is None:
                library.nvmlInit()
                self._handle = library.nvmlDeviceGetHandleByUUID(self._uuid)
            return GpuReading(self._celsius(), self._watts(), self._others() if others else None)
        except library.NVMLError as error:
            self._handle = None
            return Unknown(f"the NVIDIA driver reports: {error}")

    def _celsius(self) -> int | None:
        library = self._library
        try:
            return int(library.nvmlDeviceGetTemperature(self._handle, library.NVML_TEMPERATURE_GPU))
        except library.NVMLError_NotSupported:
            return None

    def _watts(self) -> float | None:
        library = self._library
        try:
            return library.nvmlDeviceGetPowerUsage(self._handle) / 1000  # milliwatts
        except library.NVMLError_NotSupported:
            return None

    def _others(self) -> float | Unknown:
        """Highest use by other programs within HOLD_SECONDS, in percent of the GPU's multiprocessors."""
        library, now = self._library, self._wall_clock()
        try:
            present = {int(process.pid) for process in library.nvmlDeviceGetComputeRunningProcesses(self._handle)}
            if self._process not in present:  # in a container, the driver reports the ids that processes have outside
                return Unknown("the driver does not report this node among the programs on the GPU")
            self._uses.append((now, self._use_by_others(now)))
        except library.NVMLError_NotSupported:
            return Unknown("this GPU does not report its use by program")
        while now - self._uses[0][0] > HOLD_SECONDS:
            self._uses.popleft()
        return max(percent for _, percent in self._uses)

    def _use_by_others(self, now: float) -> float:
        """Sum of the other programs' mean uses since the last look."""
        since = self._seen or int((now - FIRST_LOOK_SECONDS) * 1e6)
        try:
            samples = self._library.nvmlDeviceGetProcessUtilization(self._handle, since)
        except self._library.NVMLError_NotFound:  # no samples: no program has used it
            return 0.0
        used = dict[int, list[int]]()
        for sample in samples:
            if sample.timeStamp > since:
                self._seen = max(self._seen, int(sample.timeStamp))
                used.setdefault(int(sample.pid), []).append(int(sample.smUtil))
        used.pop(self._process, None)
        own = children_of(self._process) if any(map(any, used.values())) else set[int]()
        return sum((sum(values) / len(values) for process, values in used.items() if process not in own), 0.0)


def children_of(process: int) -> set[int]:
    """Ids of the processes that a process has started, such as the ranks of a site."""
    try:
        return {child.pid for child in psutil.Process(process).children(recursive=True)}
    except psutil.Error:
        return set()


def training_gpus(system: str = sys.platform, machine: str = platform.machine(), library: Any = None) -> list[str]:
    """Names of the GPUs that PyTorch may train on, with their memory. Empty without one, or without its driver."""
    if system == "darwin":
        return ["Apple GPU"] if machine == "arm64" else []
    library = library or nvml()
    try:
        library.nvmlInit()
        handles = [library.nvmlDeviceGetHandleByIndex(number) for number in range(library.nvmlDeviceGetCount())]
        return [
            f"{library.nvmlDeviceGetName(handle)} ({library.nvmlDeviceGetMemoryInfo(handle).total / 1e9:.0f} GB)"
            for handle in handles
        ]
    except library.NVMLError:
        return []


def driver_version(library: Any = None) -> str | None:
    """Version of the installed driver; None without one."""
    library = library or nvml()
    try:
        library.nvmlInit()
        return str(library.nvmlSystemGetDriverVersion())
    except library.NVMLError:
        return None


def driver_advice(built_for: str | None, library: Any = None) -> str:
    """A sentence if the driver is made for an older CUDA than `built_for`, PyTorch's, such as "12.8"; otherwise ""."""
    library = library or nvml()
    try:
        library.nvmlInit()
        number = int(library.nvmlSystemGetCudaDriverVersion())
    except library.NVMLError:
        return ""
    major, minor = number // 1000, number % 1000 // 10
    if built_for is None or (major, minor) >= tuple(int(part) for part in built_for.split(".")[:2]):
        return ""
    return f"The driver is for CUDA {major}.{minor}, and PyTorch was built for {built_for}: update the driver."
