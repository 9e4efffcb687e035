"""Temperature and power of the NVIDIA GPU that trains, as its driver tells them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from neuroshard.node.kindness.policy import GpuReading, Unknown


class GpuSensor:
    """One GPU, by its unique id; the driver's library is loaded at the first look. For one thread at a time."""

    def __init__(self, uuid: str, library: Any = None) -> None:
        """`uuid` as the driver writes it: "GPU-..."; `library` is pynvml unless another one is given."""
        self._uuid = uuid
        self._library: Any = library or import_module("pynvml")
        self._handle: Any = None

    def look(self) -> GpuReading | Unknown:
        """What it tells now. A driver that was restarted is asked again at the next look."""
        library = self._library
        try:
            if self._handle is None:
                library.nvmlInit()
                self._handle = library.nvmlDeviceGetHandleByUUID(self._uuid)
            return GpuReading(self._celsius(), self._watts())
        except library.NVMLError as error:
            self._handle = None
            return Unknown(f"the NVIDIA driver says: {error}")

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
