"""Devices of this computer: which one is chosen, what is said about a missing one, and whose load is measured.

Simulated are only PyTorch's own questions to the drivers; no accelerator is needed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neuroshard.cli.doctor import Case, device, memory, speed
from neuroshard.config.loading import load_settings
from neuroshard.errors import UsageError
from neuroshard.host import computer, matmul_speed, nvidia
from neuroshard.host.resources import Device, ResourceSampler, choose_device, devices_of
from neuroshard.pipeline.executor import ComputeThread

OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: ..."
)
H200, A100 = "NVIDIA H200", "NVIDIA A100"


def properties(name: str, gigabytes: int) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        total_memory=gigabytes * 10**9,
        major=9,
        minor=0,
        uuid=f"{gigabytes}-{name[-4:]}",
        gcnArchName="gfx1100",
        driver_version="1.6.31294",
    )


def has(monkeypatch: pytest.MonkeyPatch, module: Any, devices: Sequence[SimpleNamespace]) -> None:
    """Let torch.cuda or torch.xpu have these devices."""
    monkeypatch.setattr(module, "is_available", lambda: bool(devices))
    monkeypatch.setattr(module, "device_count", lambda: len(devices))
    monkeypatch.setattr(module, "get_device_properties", lambda index: devices[index])


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, torch.cuda, [properties(H200, 140), properties(A100, 80)])


def refusal(wanted: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        choose_device(wanted)
    return caught.value


def test_auto_takes_cuda_before_xpu_before_mps_before_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, torch.cuda, [])
    has(monkeypatch, torch.xpu, [])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device("auto") == Device("cpu", "CPU")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("auto").torch_device() == torch.device("mps")
    has(monkeypatch, torch.xpu, [properties("Intel Arc B580", 12)])
    assert choose_device("auto").torch_device() == torch.device("xpu", 0)
    has(monkeypatch, torch.cuda, [properties(H200, 140)])
    assert choose_device("auto").torch_device() == torch.device("cuda", 0)
    assert choose_device("cpu").kind == "cpu"


@pytest.mark.usefixtures("two_gpus")
def test_a_number_chooses_the_device_with_its_memory_and_uuid() -> None:
    first, second = choose_device("cuda"), choose_device("cuda:1")
    assert first == choose_device("cuda:0") == choose_device("auto")
    assert (first.index, first.memory_mb, first.label) == (0, 126_000, "NVIDIA H200 (cuda:0)")
    assert (second.index, second.memory_mb, second.label) == (1, 72_000, "NVIDIA A100 (cuda:1)")
    assert second.torch_device() == torch.device("cuda", 1)
    assert second.gpu_uuid == "GPU-80-A100"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("limit_mb", "planned_mb"), [(None, 72_000), (20_000, 20_000), (500_000, 72_000)])
def test_pytorch_takes_no_more_of_the_gpu_than_the_owner_allows(
    monkeypatch: pytest.MonkeyPatch, limit_mb: int | None, planned_mb: int
) -> None:
    """Of 80 GB; the context of the process counts, too, and PyTorch does not count it."""
    fractions = dict[int, float]()
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, index: fractions.update({index: part})
    )
    device = choose_device("cuda:1").limited_to(limit_mb)
    assert device.memory_mb == planned_mb
    device.make_current()
    assert fractions == {1: pytest.approx((planned_mb - 500) / 80_000)}


def test_the_processor_has_no_limit_of_a_gpu() -> None:
    device = choose_device("cpu").limited_to(4_000)
    assert device == Device("cpu", "CPU")
    device.make_current()


@pytest.mark.usefixtures("two_gpus")
def test_a_number_too_high_is_refused_with_the_devices_that_there_are() -> None:
    assert str(refusal("cuda:7")) == (
        "There is no device cuda:7. This computer has: cuda:0 (NVIDIA H200), cuda:1 (NVIDIA A100), cpu."
    )


def test_a_build_without_code_for_the_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise AssertionError("Torch not compiled with XPU enabled")

    has(monkeypatch, torch.cuda, [])
    has(monkeypatch, torch.xpu, [])
    monkeypatch.setattr(torch.xpu, "init", init)
    error = refusal("xpu:1")
    assert error.message == f"The device xpu:1 cannot be used: PyTorch {torch.__version__} is built without XPU."
    assert "pytorch.org" in error.action
    assert error.action.endswith("This computer has: cpu.")


def test_an_old_driver_is_named_with_torchs_reason_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def is_available() -> bool:
        warnings.warn(f"CUDA initialization: {OLD_DRIVER}", stacklevel=1)
        return False

    def init() -> None:
        raise RuntimeError(OLD_DRIVER)

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "init", init)
    assert str(refusal("cuda")) == (
        "The device cuda cannot be used: The NVIDIA driver on your system is too old (found version 11040). "
        "Install or update the driver. This computer has: cpu."
    )
    caplog.clear()
    assert choose_device("auto").kind == "cpu"  # the node trains on the CPU, and its log has the reason
    assert "The NVIDIA driver on your system is too old (found version 11040)." in caplog.text


def test_a_gpu_of_amd_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, torch.cuda, [properties("Radeon RX 7900 XTX", 24)])
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    (found,) = devices_of("cuda")
    assert (found.name, found.version, found.gpu_uuid) == ("AMD Radeon RX 7900 XTX (ROCm)", "gfx1100, ROCm 6.4.1", None)
    assert found.torch_device() == torch.device("cuda", 0)


def load_of(chosen: Device, folder: Path) -> tuple[str, int | None, int | None, float | None]:
    sampled = ResourceSampler(chosen, folder, 1).sample()
    return sampled.device, sampled.gpu_memory_bytes, sampled.gpu_memory_total_bytes, sampled.gpu_utilisation


@pytest.mark.usefixtures("two_gpus")
def test_the_load_of_the_chosen_device_is_measured_and_of_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: {1: 5_000}[index])
    monkeypatch.setattr(torch.cuda, "utilization", lambda index: {1: 40}[index])
    assert load_of(choose_device("cuda:1"), tmp_path) == ("cuda:1", 5_000, 80 * 10**9, 0.4)


def test_a_driver_that_does_not_show_its_use_leaves_that_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def utilization(index: int) -> float:
        raise ImportError(f"pyzes is required to read device {index}")

    has(monkeypatch, torch.xpu, [properties("Intel Arc B580", 12)])
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda _index: 7)
    monkeypatch.setattr(torch.xpu, "utilization", utilization)
    assert load_of(choose_device("xpu"), tmp_path) == ("xpu:0", 7, 12 * 10**9, None)
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    has(monkeypatch, torch.cuda, [properties("AMD Instinct MI300X", 192)])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _index: 9)
    assert load_of(choose_device("cuda"), tmp_path) == ("cuda:0", 9, 192 * 10**9, None)


@pytest.mark.usefixtures("two_gpus")
def test_the_compute_thread_works_on_the_chosen_device(monkeypatch: pytest.MonkeyPatch, compute: ComputeThread) -> None:
    chosen = list[int]()
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *_: None)
    compute.submit(choose_device("cuda:1").make_current).result()
    compute.submit(choose_device("cpu").make_current).result()
    assert chosen == [1]


@pytest.mark.usefixtures("two_gpus")
def test_the_doctor_shows_the_chosen_device_with_memory_and_capability(tmp_path: Path) -> None:
    loaded = load_settings({"device": "cuda:1", "cpu_threads": 2, "data_dir": tmp_path}, {})
    finding = device(Case(loaded, None))
    assert finding.is_well
    assert finding.detail.startswith("NVIDIA A100 (cuda:1), 72,000 MB, compute capability 9.0, driver ")
    assert finding.detail.endswith(", 2 CPU threads")


def test_the_doctor_says_what_the_processor_reaches_and_why_not_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_speed, "matmul_flops_per_second", lambda *_: 1.2e12)
    monkeypatch.setattr(computer, "default_threads", lambda: 4)
    settings = {"device": "cpu", "cpu_threads": 2, "cpu_percent": 50, "data_dir": tmp_path}
    finding = speed(Case(load_settings(settings, {}), None))
    assert finding.is_well
    assert finding.detail == (
        "matrix products at 1.20 TFLOP/s (measured now); training reaches 50%: "
        "1,000 tokens/s with 100 M parameters, 100 with 1 B"
    )
    assert finding.action == "cpu_threads allows 2 of 4 cores. cpu_percent allows 50 % of the time."
    whole = speed(Case(load_settings({"device": "cpu", "data_dir": tmp_path}, {}), None))
    assert whole.action == ""


def test_the_doctor_shows_the_speed_of_the_running_node(tmp_path: Path) -> None:
    status = {"acceleration": {"tokens_per_second": 1e5, "mfu": 0.42, "peak_flops": 989e12, "peak_source": "table"}}
    finding = speed(Case(load_settings({"data_dir": tmp_path}, {}), status))
    assert finding.detail == "the running node trains at 100,000 tokens/s, 42% of 989.00 TFLOP/s (table)"


@pytest.mark.usefixtures("two_gpus")
def test_the_doctor_says_what_a_gpu_reaches_and_why_not_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "driver_advice", lambda _cuda: "The driver is old.")
    settings = {"device": "cuda:0", "compile": "off", "max_gpu_memory": 9_000, "data_dir": tmp_path}
    finding = speed(Case(load_settings(settings, {}), None))
    assert finding.detail.startswith("matrix products at 989.00 TFLOP/s (data sheet); training reaches 50%: ")
    assert finding.action == ("The driver is old. compile = off: training stays eager. max_gpu_memory allows 9,000 MB.")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: turing(H200, 140))
    assert "Its compute capability is 7.5, and bf16 needs 8.0." in speed(Case(load_settings(settings, {}), None)).action
    shown = memory(Case(load_settings({**settings, "memory": 100_000}, {}), None)).detail
    assert re.search(r"; 9,000 MB of the GPU: up to \d+ M parameters, or \d+ M with the optimizer in", shown)


def turing(name: str, gigabytes: int) -> SimpleNamespace:
    found = properties(name, gigabytes)
    found.major, found.minor = 7, 5
    return found


class OldDriver:
    """As much of pynvml as shows the version of CUDA."""

    class NVMLError(Exception):
        """As in pynvml."""

    def __init__(self, version: int | None) -> None:
        self._version = version

    def nvmlInit(self) -> None:  # noqa: N802 - as in pynvml
        if self._version is None:
            raise self.NVMLError

    def nvmlSystemGetCudaDriverVersion(self) -> int | None:  # noqa: N802 - as in pynvml
        return self._version


@pytest.mark.parametrize(
    ("version", "built_for", "is_old"),
    [
        (12_040, "12.8", True),
        (12_080, "12.8", False),
        (13_000, "12.8", False),
        (None, "12.8", False),
        (12_040, None, False),
    ],
)
def test_a_driver_for_an_older_cuda_than_pytorchs_is_named(
    *, version: int | None, built_for: str | None, is_old: bool
) -> None:
    told = nvidia.driver_advice(built_for, OldDriver(version))
    assert told == ("The driver is for CUDA 12.4, and PyTorch was built for 12.8: update the driver." if is_old else "")
