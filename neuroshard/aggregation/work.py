"""What members say they did since the last round: how much it may weigh, and who did too little to hand anything in."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

MAX_WEIGHT_RATIO = 2.0  # to the median declared weight
MIN_WORK_RATIO = 0.25  # of the median declared work
MOST_WORK = 2.0**53  # tokens; who says more than that is not believed at all


def capped_weights(declared: Sequence[float]) -> tuple[float, ...]:
    """Weights that contributions may have: at most twice the (lower) median of those who did any work.

    Work is self-declared. What is not finite, negative or beyond 2^53 is none; where nobody did any, all weigh alike.
    """
    work = _believed(declared)
    done = [amount for amount in work if amount > 0]
    if not done:
        return (1.0,) * len(work)
    cap = MAX_WEIGHT_RATIO * median_low(done)
    return tuple(min(amount, cap) for amount in work)


def abstaining(declared: Sequence[float]) -> tuple[int, ...]:
    """Members, by number, with less than a quarter of the (lower) median work of those who did any.

    Noise would be most of what they add. Where nobody did any work, nobody abstains.
    """
    work = _believed(declared)
    done = [amount for amount in work if amount > 0]
    fewest = MIN_WORK_RATIO * median_low(done) if done else 0.0
    return tuple(i for i, amount in enumerate(work) if amount < fewest)


def _believed(declared: Sequence[float]) -> list[float]:
    return [amount if 0 < amount <= MOST_WORK else 0.0 for amount in declared]  # neither holds for NaN
