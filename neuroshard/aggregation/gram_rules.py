"""Aggregators that need only the dot products of the contributions with each other; in Python floats, equal everywhere.

They take the Gram matrix g of n vectors, g_ij = <x_i, x_j>; squared distances are g_ii + g_jj - 2 g_ij.
"""

from __future__ import annotations

from math import fsum, sqrt
from statistics import median

from neuroshard.aggregation.slice_statistics import Matrix
from neuroshard.errors import NeuroShardError

CLIPPING_ITERATIONS = 10  # each costs n^2 multiplications


class TooFewContributionsError(NeuroShardError):
    """An aggregator that cannot hold its promise with so few contributions."""


def fewest_for_krum(tolerated: int) -> int:
    """2 f + 3: with fewer, f liars can be each other's nearest neighbours."""
    return 2 * tolerated + 3


def check_krum_count(count: int, tolerated: int) -> None:
    """Raises TooFewContributionsError unless count >= 2 f + 3, or there is only one contribution: nothing to choose."""
    fewest = fewest_for_krum(tolerated)
    if 1 < count < fewest:
        raise TooFewContributionsError(
            f"Krum against {tolerated} wrong members needs {fewest} contributions, and there are {count}.",
            "Wait for more members, or let the run's owner choose the aggregator trimmed_mean.",
        )


def krum_order(gram: Matrix, tolerated: int) -> tuple[int, ...]:
    """Rows from the most to the least trusted: by the sum of squared distances to their n - f - 2 nearest others.

    Blanchard, El Mhamdi, Guerraoui and Stainer 2017. The first is Krum's choice, the first n - f are multi-Krum's. Two
    rows that are each other's only neighbour have equal scores; then the shorter one comes first. Raises
    TooFewContributionsError when n < 2 f + 3 and n > 1.
    """
    count = len(gram)
    check_krum_count(count, tolerated)

    def score(row: int) -> float:
        return fsum(sorted(squared_distance(gram, row, other) for other in range(count) if other != row)[:neighbours])

    neighbours = max(0, count - tolerated - 2)
    return tuple(sorted(range(count), key=lambda row: (score(row), gram[row][row], row)))


def squared_distance(gram: Matrix, left: int, right: int) -> float:
    """|x_left - x_right|^2, never below zero."""
    return max(0.0, gram[left][left] + gram[right][right] - 2.0 * gram[left][right])


def centred_clipping_weights(gram: Matrix) -> tuple[float, ...]:
    """Weights c of the center v = sum_i c_i x_i that centred clipping comes to, beginning at zero.

    Karimireddy, He and Jaggi 2021: v <- v + 1/n sum_i (x_i - v) min(1, r / |x_i - v|). The radius r is in every
    iteration the median of the distances |x_i - v|, so that no run needs to know a scale beforehand: half of the
    vectors count as they are, and what lies further off pulls no harder than from the distance r.
    """
    count = len(gram)
    weights = [0.0] * count
    for _ in range(CLIPPING_ITERATIONS):
        distances = _distances(gram, weights)
        radius = median(distances)
        shares = [1.0 if distance <= radius else radius / distance for distance in distances]
        kept = 1.0 - fsum(shares) / count
        weights = [weight * kept + share / count for weight, share in zip(weights, shares, strict=True)]
    return tuple(weights)


def _distances(gram: Matrix, weights: list[float]) -> list[float]:
    """|x_i - v| for v = sum_j c_j x_j: its square is g_ii - 2 (g c)_i + c g c."""
    dots = [fsum(weight * value for weight, value in zip(weights, row, strict=True)) for row in gram]
    center = fsum(weight * dot for weight, dot in zip(weights, dots, strict=True))
    return [sqrt(max(0.0, row[i] - 2.0 * dots[i] + center)) for i, row in enumerate(gram)]
