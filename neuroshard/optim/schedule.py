"""Learning rate and clipping norm of an inner step. Pure."""

from __future__ import annotations

from math import cos, pi, sqrt
from typing import assert_never

from neuroshard.config.run_parameters import InnerOptimization, InnerOptimizerName


def learning_rate_at(step: int, parameters: InnerOptimization) -> float:
    """Learning rate of inner step 0, 1, ...: linear warm-up, then the schedule down to its final fraction.

    Step s of the warm-up has (s + 1) / warmup_steps of the rate; the decay spans decay_steps after the warm-up.
    """
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    if step < parameters.warmup_steps:
        return parameters.learning_rate * (step + 1) / parameters.warmup_steps
    done = min(1.0, (step - parameters.warmup_steps) / max(1, parameters.decay_steps))
    match parameters.schedule:
        case "constant":
            remaining = 1.0
        case "linear":
            remaining = 1.0 - done
        case "cosine":
            remaining = 0.5 * (1.0 + cos(pi * done))
        case _:
            assert_never(parameters.schedule)
    if parameters.schedule == "constant":
        return parameters.learning_rate
    return parameters.learning_rate * (parameters.final_fraction + (1 - parameters.final_fraction) * remaining)


MUON_RATE = 2.0  # in AdamW's rates: at width 64, twice to four times its rate was best for Muon


def scaled_learning_rate(hidden_size: int, optimizer: InnerOptimizerName = "adamw") -> float:
    """Learning rate of a local run: 2e-3 at width 192, falling as 1 / width, never below 1e-4; for Muon twice that.

    The best AdamW rate shrinks with the width (Yang et al. 2022); narrower models than 192 stay at 2e-3.
    """
    if hidden_size < 1:
        raise ValueError(f"hidden_size must be positive, got {hidden_size}")
    return max(1e-4, min(2e-3, 2e-3 * 192 / hidden_size)) * (MUON_RATE if optimizer == "muon" else 1.0)


def stage_clip_norm(stage: int, stage_count: int, max_norm: float) -> float:
    """Clipping norm of one of S stages: max_norm / sqrt(S), and 5 / sqrt(S) times it for the last."""
    if not 0 <= stage < stage_count:
        raise ValueError(f"stage must be in 0..{stage_count - 1}, got {stage}")
    if stage_count == 1:
        return max_norm
    return max_norm * (5.0 if stage == stage_count - 1 else 1.0) / sqrt(stage_count)
