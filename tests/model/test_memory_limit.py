"""Tiers, limits and proposals: stable, monotone, and clear when there is too little."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.errors import TooLittleMemoryError
from neuroshard.model.architecture import architecture_for, parameter_count
from neuroshard.model.memory_limit import (
    Bounds,
    MemoryBound,
    MemoryProbe,
    available_mb,
    memory_bound,
    probe_memory,
    read_cgroup_limit,
    reserve_mb,
    tier_mb,
)
from neuroshard.model.memory_need import batch_size_for, estimated_step_seconds, memory_need, propose_architecture
from neuroshard.types import Architecture

GB = 10**9


def write(root: Path, file: str, text: str) -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("available", [6_568, 6_622, 6_500.0, 6_999.9])
def test_nearby_sizes_share_tier_and_architecture(available: float) -> None:
    assert tier_mb(available) == 6_500
    assert propose_architecture(tier_mb(available), 32_000) == propose_architecture(6_500, 32_000)


def test_tiers_at_the_edges() -> None:
    assert [tier_mb(mb) for mb in (0, 499, 500, 1_000)] == [0, 0, 500, 1_000]


def test_available_memory_is_the_tightest_bound() -> None:
    probe = MemoryProbe(total_bytes=32 * GB, cgroup_limit_bytes=None)
    assert memory_bound(probe, None) == MemoryBound(28_000, Bounds.COMPUTER)
    assert memory_bound(probe, 6_622) == MemoryBound(6_622, Bounds.OWNER)
    assert memory_bound(probe, 64_000) == MemoryBound(28_000, Bounds.COMPUTER)
    assert memory_bound(MemoryProbe(32 * GB, 4 * GB), 6_622) == MemoryBound(4_000, Bounds.CGROUP)
    assert available_mb(MemoryProbe(32 * GB, 4 * GB), 6_622) == 4_000


@given(total=st.integers(1, 2_000_000))
def test_the_reserve_leaves_most_of_the_computer(total: int) -> None:
    assert 0 <= reserve_mb(total) <= total / 4


def test_cgroup_v2_takes_the_tightest_group_up_to_the_root(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/user.slice/node.service\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/node.service/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/user.slice/memory.max", "3000000000\n")
    assert read_cgroup_limit(tmp_path) == 3 * GB
    write(tmp_path, "sys/fs/cgroup/user.slice/node.service/memory.max", "2000000000\n")
    assert read_cgroup_limit(tmp_path) == 2 * GB


def test_cgroup_v1_inside_a_container_reads_the_mounted_group(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:cpu,cpuacct:/docker/ab\n4:memory:/docker/ab\n0::/docker/ab\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "1500000000\n")
    assert read_cgroup_limit(tmp_path) == 1_500_000_000
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert read_cgroup_limit(tmp_path) is None


@pytest.mark.parametrize("listing", ["", "nonsense", "0::/../../etc\n", "0::/none\n", "4:memory:\n"])
def test_odd_or_missing_cgroups_are_no_limit(tmp_path: Path, listing: str) -> None:
    assert read_cgroup_limit(tmp_path) is None
    write(tmp_path, "proc/self/cgroup", listing)
    write(tmp_path, "etc/memory.max", "5\n")
    assert read_cgroup_limit(tmp_path) is None


def test_this_computer_can_be_probed() -> None:
    probe = probe_memory()
    assert probe.total_bytes > 10**8
    assert available_mb(probe, None) > 0


@given(first=st.integers(1_000, 200_000), more=st.integers(0, 50_000), vocabulary=st.sampled_from([1_766, 32_000]))
def test_more_memory_never_gives_a_smaller_model(first: int, more: int, vocabulary: int) -> None:
    small = propose_architecture(tier_mb(first), vocabulary)
    large = propose_architecture(tier_mb(first + more), vocabulary)
    assert parameter_count(small) <= parameter_count(large)
    assert memory_need(small, None, batch_size_for(small, None, tier_mb(first))).fits(first)


def test_the_largest_fitting_member_and_batch_are_taken() -> None:
    proposed = propose_architecture(6_500, 32_000)
    next_member = architecture_for(proposed.layer_count + 1, 32_000)
    assert not memory_need(next_member).fits(6_500)
    batch = batch_size_for(proposed, None, 6_500)
    assert memory_need(proposed, None, batch).fits(6_500)
    assert batch == 8 or not memory_need(proposed, None, batch + 1).fits(6_500)


def test_a_long_step_gives_a_smaller_model_and_the_smallest_is_always_taken() -> None:
    def seconds(architecture: Architecture) -> float:
        return estimated_step_seconds(architecture, 4, 2e11)

    proposed = propose_architecture(64_000, 2_000, step_seconds=seconds)
    assert seconds(proposed) <= 3.0
    assert seconds(architecture_for(proposed.layer_count + 1, 2_000)) > 3.0
    assert propose_architecture(64_000, 2_000, step_seconds=lambda _: 1e9).layer_count == 2


def test_an_accelerator_has_a_limit_of_its_own() -> None:
    tight = propose_architecture(64_000, 32_000, device="cuda", device_tier_mb=4_000)
    roomy = propose_architecture(64_000, 32_000, device="cuda", device_tier_mb=16_000)
    assert parameter_count(tight) < parameter_count(roomy)
    assert memory_need(tight, device="cuda").device_bytes <= 4e9


def test_too_little_memory_names_the_megabytes_that_are_enough() -> None:
    with pytest.raises(TooLittleMemoryError, match=r"needs 1000 MB of memory; 500 MB") as raised:
        propose_architecture(500, 32_000)
    assert "1000 MB" in raised.value.action
    propose_architecture(1_000, 32_000)
    with pytest.raises(TooLittleMemoryError, match="on the device"):
        propose_architecture(64_000, 32_000, device="cuda", device_tier_mb=500)
    with pytest.raises(TooLittleMemoryError, match="needs"):
        batch_size_for(architecture_for(19, 32_000), None, 4_000)
