"""What the network may hold is a part of the plan, and small where memory is."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.model.memory_limit import MEGABYTE, NetworkMemory, least_limit_mb, network_memory, planned_bytes
from neuroshard.model.memory_need import batch_size_for, memory_need, propose_architecture


@pytest.mark.parametrize("tier_mb", [500, 1_000, 2_000, 6_500, 64_000])
@pytest.mark.parametrize("vocabulary", [300, 800])
def test_the_model_and_the_network_stay_under_the_limit_together(tier_mb: int, vocabulary: int) -> None:
    architecture = propose_architecture(tier_mb, vocabulary, 256)
    need = memory_need(architecture, None, batch_size_for(architecture, None, tier_mb))
    assert need.host_bytes + network_memory(tier_mb).total <= tier_mb * MEGABYTE


def test_a_small_node_lets_others_fill_little() -> None:
    assert network_memory(500).total < 40 * MEGABYTE
    assert network_memory(6_500).total < 0.08 * 6_500 * MEGABYTE


@given(limit_mb=st.integers(1, 10**6), more=st.integers(0, 10**6))
def test_less_memory_means_no_more_for_the_network(limit_mb: int, more: int) -> None:
    small, large = network_memory(limit_mb), network_memory(limit_mb + more)
    assert all(getattr(small, part.name) <= getattr(large, part.name) for part in fields(NetworkMemory))
    assert small.total == sum(getattr(small, part.name) for part in fields(NetworkMemory))


@given(need=st.integers(0, 10**12))
def test_the_least_limit_is_enough_and_one_megabyte_less_is_not(need: int) -> None:
    limit_mb = least_limit_mb(need)
    assert planned_bytes(need, limit_mb) <= limit_mb * MEGABYTE
    assert planned_bytes(need, limit_mb - 1) > (limit_mb - 1) * MEGABYTE
