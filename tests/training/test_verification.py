from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.flat_curves import flat_runs
from benchmarks.flat_curves import noisy_evaluation as evaluation
from neuroshard.status.snapshot import LearningVerdict, LossPoint, LossTrend
from neuroshard.training.learning_verdict import Evidence, loss_trend, verify


def curve(losses: Sequence[float], first_step: int = 1) -> tuple[LossPoint, ...]:
    return tuple(LossPoint(first_step + i, float(i), loss, 1e-3, i) for i, loss in enumerate(losses))


def evidence(held_out: Sequence[float], seed: int = 1, noise: float = 0.05) -> Evidence:
    """A run whose held-out loss takes these values and whose training loss follows them."""
    random = np.random.default_rng(seed)
    steps = range(0, 100 * len(held_out), 100)
    length = 100 * len(held_out) - 99
    training = np.interp(range(length), steps, held_out) + random.normal(0, 0.1, length)
    evaluations = [evaluation(step, loss, random, noise) for step, loss in zip(steps, held_out, strict=True)]
    return Evidence(evaluations, curve(training.tolist()), initial_loss=held_out[0], learning_rate=1e-3)


def test_who_does_not_drive_says_who_measures() -> None:
    assert "The nodes that feed text" in verify(Evidence(is_measured_here=False)).reason
    assert "not measured on held-out text yet" in verify(Evidence()).reason


def test_a_learning_run_is_verified_by_the_second_evaluation_after_the_first() -> None:
    losses = [7.5, 5.3, 4.7, 4.1]
    assert verify(evidence(losses[:1])).status is LearningVerdict.INSUFFICIENT_DATA
    assert verify(evidence(losses[:2])).status is LearningVerdict.IMPROVING
    for count in (3, 4):
        verdict = verify(evidence(losses[:count]))
        assert verdict.training_verified
        assert verdict.status is LearningVerdict.VERIFIED
        assert verdict.loss_trend is LossTrend.IMPROVING


@pytest.mark.parametrize("shift", [0.0, 0.005])
def test_flat_noisy_curves_are_not_verified(shift: float) -> None:
    """1,000 runs that learn nothing, 20 evaluations each, looked at after every one of them."""
    false = 0
    for verdicts in flat_runs(shift):
        false += any(verdict.training_verified for verdict in verdicts)
        assert not any(verdict.status is LearningVerdict.DIVERGED for verdict in verdicts)
    assert false < 10


def test_an_unchanged_model_is_never_verified() -> None:
    one = evaluation(0, 7.0, np.random.default_rng(1))
    same = [replace(one, step=step) for step in range(0, 1000, 100)]
    verdict = verify(Evidence(same, curve([7.0] * 100), 7.0, learning_rate=0.0))
    assert not verdict.training_verified
    assert verdict.status is LearningVerdict.STALLED
    assert "learning rate is 0" in verdict.reason


def test_rounding_that_shifts_all_sequences_alike_is_no_learning() -> None:
    one = evaluation(0, 7.0, np.random.default_rng(1))
    shifted = [replace(one, step=i, losses=tuple(loss - 1e-4 for loss in one.losses)) for i in range(1, 9)]
    assert not verify(Evidence([one, *shifted], curve([7.0] * 100), 7.0)).training_verified


@pytest.mark.parametrize("after", [6.0, 7.5, 40.0])
def test_divergence_seen_in_held_out_data_clears_the_verdict(after: float) -> None:
    before = evidence([7.5, 5.3, 4.7, 4.1])
    assert verify(before).training_verified
    diverged = verify(evidence([7.5, 5.3, 4.7, 4.1, after]))
    assert not diverged.training_verified
    assert diverged.status is LearningVerdict.DIVERGED
    assert diverged.loss_trend is LossTrend.NEEDS_ATTENTION


def test_divergence_seen_in_the_training_loss_alone_clears_the_verdict() -> None:
    good = evidence([7.5, 5.3, 4.7, 4.1])
    rising = curve([*np.linspace(4.1, 8.0, 30), *([8.0] * 16)], first_step=301)
    diverged = verify(replace(good, recent=(*good.recent, *rising)))
    assert (diverged.training_verified, diverged.status) == (False, LearningVerdict.DIVERGED)


def test_training_loss_above_held_out_loss_is_not_divergence() -> None:
    """Another shard may be harder than the held-out text."""
    good = evidence([7.5, 5.3, 4.7, 4.1])
    harder = curve([4.5] * 50, first_step=301)
    assert verify(replace(good, recent=(*good.recent, *harder))).training_verified


def test_a_non_finite_step_clears_the_verdict_until_two_evaluations_later() -> None:
    losses = [7.5, 5.3, 4.7, 4.5, 4.3]
    cleared = verify(replace(evidence(losses[:3]), last_non_finite_step=250))
    assert (cleared.training_verified, cleared.status) == (False, LearningVerdict.INSUFFICIENT_DATA)
    assert not verify(replace(evidence(losses[:4]), last_non_finite_step=250)).training_verified
    assert verify(replace(evidence(losses), last_non_finite_step=250)).training_verified


def test_a_pause_keeps_what_was_shown_and_says_that_nothing_happens() -> None:
    paused = verify(replace(evidence([7.5, 5.3, 4.7]), is_training=False, state_reason="Paused by the user."))
    assert paused.training_verified
    assert paused.status is LearningVerdict.NOT_TRAINING
    assert paused.reason.startswith("Paused by the user.")


def test_a_flat_run_is_called_stalled_after_some_evaluations() -> None:
    assert verify(evidence([7.0] * 4)).status is LearningVerdict.INSUFFICIENT_DATA
    stalled = verify(evidence([7.0] * 6))
    assert (stalled.training_verified, stalled.status) == (False, LearningVerdict.STALLED)


def test_trend_of_the_training_loss() -> None:
    noise = np.random.default_rng(3).normal(0, 0.1, 100)
    assert loss_trend(curve([5.0] * 10)) is LossTrend.INSUFFICIENT_DATA
    assert loss_trend(curve((np.linspace(6, 5, 100) + noise).tolist())) is LossTrend.IMPROVING
    assert loss_trend(curve((5 + noise).tolist())) is LossTrend.STABLE
    assert loss_trend(curve((np.linspace(5, 6, 100) + noise).tolist())) is LossTrend.NEEDS_ATTENTION
