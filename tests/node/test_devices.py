"""Devices of this computer: which one is chosen, what is said about a missing one, and whose load is measured.

Simulated are only PyTorch's own questions to the drivers; no accelerator is needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neuroshard.cli.doctor import Case, device
from neuroshard.config.loading import load_settings
from neuroshard.errors import UsageError
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
