"""The memory formula against measured peaks: a loop like a node's stays under its need, and not absurdly far under."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.model.architecture import StagePlan, architecture_for, parameter_count
from neuroshard.model.memory_need import PROCESS_BYTES, PipelineLoad, batch_size_for, memory_need, propose_architecture
from neuroshard.types import LayerRange

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("memory_peaks.py")

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read as on Linux")


def measured_peak(
    depth: int, vocabulary: int, sequence: int, batch: int, *, threads: int, bf16: bool = False, muon: bool = False
) -> int:
    return peak_of("training", depth, vocabulary, sequence, batch, threads, bf16, muon)


def peak_of(work: str, *values: int) -> int:
    arguments = [str(int(value)) for value in values]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), work, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return int(result.stdout)


@pytest.mark.parametrize(
    ("limit_mb", "vocabulary", "sequence", "threads", "bf16"),
    [
        (1_000, 2_000, 128, 1, False),
        pytest.param(1_300, 8_192, 256, 2, True, marks=pytest.mark.long),
        pytest.param(1_600, 32_000, 256, 2, False, marks=pytest.mark.long),
    ],
)
@pytest.mark.process
def test_measured_peaks_stay_under_the_need_and_the_limit(
    limit_mb: int, vocabulary: int, sequence: int, threads: int, bf16: bool
) -> None:
    architecture = propose_architecture(limit_mb, vocabulary, sequence)
    batch = batch_size_for(architecture, None, limit_mb)
    peak = measured_peak(architecture.layer_count, vocabulary, sequence, batch, threads=threads, bf16=bf16)
    need = memory_need(architecture, None, batch).host_bytes
    assert peak < need <= limit_mb * 1e6
    assert need < 1.6 * peak


@pytest.mark.long
@pytest.mark.process
def test_the_measured_peak_with_muon_stays_under_its_need() -> None:
    architecture = architecture_for(8, 2_000, 64)
    peak = measured_peak(architecture.layer_count, 2_000, 64, 1, threads=1, muon=True)
    assert peak < memory_need(architecture, None, 1, optimizer="muon").host_bytes < 1.6 * peak


@pytest.mark.parametrize("kept_graphs", [8, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 0))])
@pytest.mark.process
def test_a_middle_stage_with_eight_microbatches_open_stays_under_its_need(kept_graphs: int) -> None:
    depth, vocabulary, sequence, batch, opened = 6, 2_000, 128, 2, 8
    layers = LayerRange(1, depth - 1)
    peak = peak_of("stage", depth, vocabulary, sequence, batch, opened, kept_graphs)
    load = PipelineLoad((layers,), opened, kept_graphs)
    need = memory_need(architecture_for(depth, vocabulary, sequence), layers, batch, load=load).host_bytes
    assert peak < need < 1.6 * peak


@given(depth=st.integers(2, 60), batch=st.integers(1, 7), vocabulary=st.integers(300, 64_000))
def test_need_grows_with_depth_and_batch(depth: int, batch: int, vocabulary: int) -> None:
    small = architecture_for(depth, vocabulary)
    assert memory_need(small, None, batch).host_bytes < memory_need(small, None, batch + 1).host_bytes
    larger = architecture_for(depth + 1, vocabulary)
    assert memory_need(small, None, batch).host_bytes < memory_need(larger, None, batch).host_bytes


def test_items_follow_the_contract() -> None:
    architecture = architecture_for(7, 8_192)
    count = parameter_count(architecture)
    need = memory_need(architecture)
    assert need.device.weights + need.device.gradients + need.device.moments == 16 * count
    host_vectors = need.host.total - need.host.process
    assert host_vectors >= 28 * count
    assert need.device_bytes == 0
    assert need.host_bytes >= PROCESS_BYTES + 44 * count


def test_muon_needs_one_moment_for_each_matrix_of_a_layer() -> None:
    architecture, layers = architecture_for(7, 8_192), LayerRange(1, 4)
    adamw, muon = (memory_need(architecture, layers, optimizer=optimizer) for optimizer in ("adamw", "muon"))
    count = parameter_count(architecture, layers) - 2 * 3 * architecture.hidden_size  # without the norms' scales
    assert adamw.device.moments - muon.device.moments == 4 * count
    assert adamw.host.checkpoint_staging - muon.host.checkpoint_staging == 4 * count
    assert muon.device.backward >= adamw.device.backward


def test_an_accelerator_takes_the_training_part() -> None:
    architecture = architecture_for(7, 8_192)
    on_cpu, on_gpu = memory_need(architecture), memory_need(architecture, device="cuda")
    assert on_gpu.host_bytes < on_cpu.host_bytes
    assert on_gpu.device_bytes > 16 * parameter_count(architecture)


@pytest.mark.parametrize("stages", [2, 3, 7])
def test_a_stage_needs_less_than_the_whole(stages: int) -> None:
    architecture = architecture_for(7, 8_192)
    whole = memory_need(architecture).host_bytes
    needs = [memory_need(architecture, layers).host_bytes for layers in StagePlan.even(7, stages)]
    assert max(needs) < whole
    assert memory_need(architecture, LayerRange(1, 2)).device.logits == 0


def test_a_codec_that_loses_something_needs_room_for_a_residual_and_less_for_what_travels() -> None:
    architecture = architecture_for(6, 4096, 256)
    averaging = memory_need(architecture, codec="fp32", averages_gradients=True)
    assert averaging.host.velocity == 2.5 * averaging.host.anchor  # two moments, and factors
    exact, lossy = memory_need(architecture, codec="fp32"), memory_need(architecture, codec="int8")
    assert (exact.host.residual, lossy.host.residual) == (0, 4 * parameter_count(architecture))
    assert lossy.host.exchange == 4 * parameter_count(architecture) * 2
    assert exact.host.exchange == 4 * parameter_count(architecture) * 5
    assert lossy.device == exact.device


def test_a_divided_stage_needs_its_share_on_each_device() -> None:
    """Each rank has 1/N of the tensors and gathers some blocks; the host of rank 0 still has one of everything."""
    architecture = architecture_for(16, 4096, 512)
    whole = memory_need(architecture, device="cuda", ranks=4)
    needs = {ranks: memory_need(architecture, device="cuda", ranks=ranks, mode="shard") for ranks in (2, 4, 8)}
    assert whole == memory_need(architecture, device="cuda")
    for ranks, need in needs.items():
        held = need.device.weights + need.device.moments + need.device.gradients
        assert held == pytest.approx(16 * parameter_count(architecture) / ranks, rel=1e-6)
        assert need.device.activations == whole.device.activations
        assert need.host == whole.host
        block = 4 * parameter_count(architecture, LayerRange(1, 2))
        assert need.device.gathered >= 2 * block
    assert needs[8].device_bytes < needs[4].device_bytes < needs[2].device_bytes < whole.device_bytes
    assert whole.device.gathered == 0
