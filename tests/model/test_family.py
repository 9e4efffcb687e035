"""The family: one dial, monotone, with the sizes that demos and benches need; counts equal to real models."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.model.architecture import (
    LARGEST_DEPTH,
    SMALLEST_DEPTH,
    StagePlan,
    architecture_for,
    parameter_count,
)
from neuroshard.model.transformer import StageModel
from neuroshard.types import LayerRange


def test_every_member_is_well_formed_and_more_depth_is_more_parameters() -> None:
    counts: list[int] = []
    for depth in range(SMALLEST_DEPTH, LARGEST_DEPTH + 1):
        a = architecture_for(depth, 32_000)
        assert a.hidden_size == a.head_count * a.head_size
        assert a.head_count % a.key_value_head_count == 0
        assert a.head_size % 2 == 0
        assert a.feed_forward_size % 64 == 0
        counts.append(parameter_count(a))
    assert all(a < b for a, b in pairwise(counts))
    assert counts[0] < 5e6
    assert counts[-1] > 50e9


@pytest.mark.parametrize(
    ("depth", "vocabulary", "millions"), [(4, 2_000, 2.45), (5, 4_096, 5.8), (7, 8_192, 17.6), (19, 32_000, 351)]
)
def test_sizes_for_demo_and_benches_exist(depth: int, vocabulary: int, millions: float) -> None:
    assert parameter_count(architecture_for(depth, vocabulary)) / 1e6 == pytest.approx(millions, rel=0.05)


def test_the_demo_member_has_width_192() -> None:
    architecture = architecture_for(4, 1_766, 128)
    assert (architecture.hidden_size, architecture.layer_count) == (192, 4)


@pytest.mark.parametrize("depth", [2, 3, 5, 8])
def test_counts_equal_those_of_real_stages(depth: int) -> None:
    architecture = architecture_for(depth, 500, 32)
    for stages in range(1, depth + 1):
        total = 0
        for layers in StagePlan.even(depth, stages):
            with torch.device("meta"):
                model = StageModel(architecture, layers)
            assert parameter_count(architecture, layers) == sum(p.numel() for p in model.parameters())
            total += parameter_count(architecture, layers)
        assert total == parameter_count(architecture)


@pytest.mark.parametrize("depth", [0, 1, 129])
def test_depths_outside_the_family_are_refused(depth: int) -> None:
    with pytest.raises(ValueError, match="depth"):
        architecture_for(depth, 32_000)


@given(layers=st.integers(1, 200), stages=st.integers(1, 200))
def test_even_plans_cover_every_layer_once(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ValueError, match="cannot be split"):
            StagePlan.even(layers, stages)
        return
    plan = StagePlan.even(layers, stages)
    assert [i for stage in plan for i in range(stage.start, stage.stop)] == list(range(layers))
    sizes = [len(stage) for stage in plan]
    assert len(sizes) == stages
    assert max(sizes) - min(sizes) <= 1


def test_plans_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="without gaps"):
        StagePlan.of(LayerRange(0, 2), LayerRange(3, 4))
    with pytest.raises(ValueError, match="without gaps"):
        StagePlan.of(LayerRange(1, 2))
