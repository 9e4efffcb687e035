"""Runs that learn nothing: held-out losses and training curves of noise alone, and what the verdict says of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.sizes import size
from neuroshard.data.held_out_losses import Evaluation
from neuroshard.status.snapshot import LossPoint, VerificationStatus
from neuroshard.training.learning_verdict import Evidence, verify

RUNS = size(1000, 3)
EVALUATIONS = 20
SEQUENCES = 32
LOSS = 7.0
DIFFICULTY = np.random.default_rng(5).normal(0, 0.4, SEQUENCES)  # of each pinned sequence, nats


def noisy_evaluation(step: int, loss: float, random: np.random.Generator, noise: float = 0.05) -> Evaluation:
    """The pinned sequences at a step, each measured with noise."""
    losses = loss + DIFFICULTY + random.normal(0, noise, SEQUENCES)
    return Evaluation(step, float(step), tuple(losses.tolist()))


def flat_runs(shift: float) -> Iterator[list[VerificationStatus]]:
    """Of each simulated run the verdicts after every evaluation; `shift` is noise that all sequences share, in nats."""
    for seed in range(RUNS):
        random = np.random.default_rng(seed)
        evaluations = [noisy_evaluation(i * 100, LOSS + random.normal(0, shift), random) for i in range(EVALUATIONS)]
        losses = (LOSS + random.normal(0, 0.3, 100)).tolist()
        recent = tuple(LossPoint(1 + i, float(i), loss, 1e-3, i) for i, loss in enumerate(losses))
        yield [
            verify(Evidence(evaluations[:count], recent, LOSS, learning_rate=1e-3))
            for count in range(1, EVALUATIONS + 1)
        ]


def falsely_verified(shift: float) -> float:
    """The share of flat runs that were called verified at any time."""
    return sum(any(verdict.training_verified for verdict in verdicts) for verdicts in flat_runs(shift)) / RUNS
