"""The plateau rule, threshold by threshold."""

from __future__ import annotations

import math

import msgspec
import pytest

from neuroshard.data.shard_assignment import Rotation, RotationReason, RotationRule, plateau_reason
from neuroshard.types import ShardId


def test_memorised_needs_both_low_mean_and_low_variance() -> None:
    assert plateau_reason([0.04] * 20, None) is RotationReason.MEMORISED
    assert plateau_reason([0.06] * 20, None) is None
    assert plateau_reason([4.0] * 20, None) is None  # flat but high: a plateau that is not memorisation
    assert plateau_reason([0.0] * 19 + [0.9], None) is None  # mean 0.045, variance 0.038
    assert plateau_reason([5.0] * 50 + [0.01] * 20, None) is RotationReason.MEMORISED


def test_fewer_losses_decide_nothing() -> None:
    assert plateau_reason([0.01] * 19, 9.0) is None


def test_overfitting_is_the_distance_to_held_out_loss() -> None:
    assert plateau_reason([2.0] * 20, 3.1) is RotationReason.OVERFITTED
    assert plateau_reason([2.0] * 20, 2.9) is None
    assert plateau_reason([2.0] * 20, 2.9, RotationRule(held_out_margin=0.5)) is RotationReason.OVERFITTED


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_losses_never_rotate(value: float) -> None:
    assert plateau_reason([0.01] * 19 + [value], None) is None


def test_rotation_as_json() -> None:
    rotation = Rotation(ShardId(7), 120, RotationReason.EXHAUSTED)
    assert msgspec.to_builtins(rotation) == {"shard": 7, "first_step": 120, "reason": "exhausted"}
    assert all(reason.explanation for reason in RotationReason)
