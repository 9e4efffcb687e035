"""The peak of a device: a figure of its data sheet by its whole name, else a measurement in the type of training."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from neuroshard.host import matmul_speed
from neuroshard.host.matmul_speed import PeakSpeed, matmul_flops_per_second, peak_speed
from neuroshard.host.resources import Device

CPU = torch.device("cpu")


def test_a_known_device_has_the_figure_of_its_data_sheet() -> None:
    assert peak_speed(Device("cuda", "NVIDIA H200"), torch.bfloat16) == PeakSpeed(989e12, "table")
    assert peak_speed(Device("cuda", "NVIDIA GeForce RTX 4090"), torch.bfloat16) == PeakSpeed(165.2e12, "table")


@pytest.mark.parametrize(
    "name", ["CPU", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA H200 MIG 1g.18gb"]
)
def test_a_device_with_another_name_is_measured(name: str) -> None:
    peak = peak_speed(Device("cpu", name), torch.float32)
    assert peak == PeakSpeed(matmul_flops_per_second(CPU), "measured")


def test_time_of_other_programs_does_not_count_and_each_type_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    size, types = 500, list[torch.dtype]()  # a size of no other test: each kind of product is measured once per process
    clocks = SimpleNamespace(own=0.0, wall=0.0)
    multiply = torch.mm

    def interrupted(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        """A product takes 10 ms, and another program 50 ms."""
        types.append(out.dtype)
        clocks.own, clocks.wall = clocks.own + 0.01, clocks.wall + 0.06
        return multiply(left, right, out=out)

    own_time = SimpleNamespace(thread_time=lambda: clocks.own, perf_counter=lambda: clocks.wall)
    monkeypatch.setattr(matmul_speed, "time", own_time)
    monkeypatch.setattr(torch, "mm", interrupted)
    speed = matmul_flops_per_second(CPU, torch.float32, size)
    assert speed == pytest.approx(2 * size**3 / 0.01)
    assert set(types) == {torch.float32}
    types.clear()
    assert matmul_flops_per_second(CPU, torch.float32, size) == speed
    assert types == []
    matmul_flops_per_second(CPU, torch.bfloat16, size)
    assert set(types) == {torch.bfloat16}
