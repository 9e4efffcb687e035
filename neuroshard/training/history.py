"""The training curve in bounded memory: points are merged in pairs when there are too many."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from neuroshard.status.snapshot import LossPoint

CAPACITY = 2_000
SNAPSHOT_POINTS = 1_000
RECENT_POINTS = 200


class LossHistory:
    """Points of the curve, oldest first; `tokens` of a point is the total up to its step.

    All points stand for equally many steps: when the capacity is reached, neighbours are merged and from then on
    twice as many steps make a point.
    """

    def __init__(self, points: Sequence[LossPoint] = (), capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._points = list(points)
        self._stride = _stride(points)
        self._open: LossPoint | None = None  # the point to come, so far
        self._open_steps = 0
        self._recent = deque(points[-RECENT_POINTS:], maxlen=RECENT_POINTS)
        self._snapshot: tuple[LossPoint, ...] | None = None
        self._shown: list[LossPoint] = []  # complete groups of the last snapshot, so that the next only adds to them
        self._shown_size = 1
        self._make_room()

    def __len__(self) -> int:
        return len(self._points) + (self._open is not None)

    def add(self, point: LossPoint) -> None:
        """Add a step."""
        self._recent.append(point)
        mean = 0.0 if self._open is None else self._open.loss
        self._open_steps += 1
        self._open = replace(point, loss=mean + (point.loss - mean) / self._open_steps)
        self._snapshot = None
        if self._open_steps >= self._stride:
            self._points.append(self._open)
            self._open, self._open_steps = None, 0
            self._make_room()

    def recent(self, count: int) -> tuple[LossPoint, ...]:
        """The newest steps one by one, oldest first; at most 200 are kept."""
        return tuple(self._recent)[-count:]

    def snapshot(self) -> tuple[LossPoint, ...]:
        """At most 1,000 points for display; the same object until a step is added."""
        if self._snapshot is None:
            size = max(1, -(-len(self) // SNAPSHOT_POINTS))
            if size != self._shown_size:
                self._shown, self._shown_size = [], size
            complete = len(self._points) - len(self._points) % size
            self._shown += merge_neighbours(self._points[len(self._shown) * size : complete], size)
            rest = self._points[complete:] if self._open is None else [*self._points[complete:], self._open]
            self._snapshot = (*self._shown, *merge_neighbours(rest, size))
        return self._snapshot

    def _make_room(self) -> None:
        while len(self._points) >= self._capacity:
            self._points = merge_neighbours(self._points, 2)
            self._stride *= 2
            self._shown = []


def merge_neighbours(points: Sequence[LossPoint], size: int) -> list[LossPoint]:
    """One point for each `size` neighbours: their mean loss at the place of the last one."""
    if size == 1:
        return list(points)
    return [_merged(points[i : i + size]) for i in range(0, len(points), size)]


def successive_noise(losses: Sequence[float]) -> float:
    """Standard deviation of a curve around its trend: from successive differences, so a trend does not count.

    sigma^2 = sum (x_{i+1} - x_i)^2 / (2 (n - 1)), von Neumann et al. 1941. Zero for fewer than two losses.
    """
    if len(losses) < 2:
        return 0.0
    squares = [(b - a) ** 2 for a, b in pairwise(losses)]
    return (sum(squares) / (2 * len(squares))) ** 0.5


def _merged(points: Sequence[LossPoint]) -> LossPoint:
    last = points[-1]
    loss = sum(point.loss for point in points) / len(points)
    return LossPoint(last.step, last.time, loss, last.lr, last.tokens)


def _stride(points: Sequence[LossPoint]) -> int:
    """How many steps a point of a stored curve stands for."""
    if len(points) < 2:
        return 1
    gaps = sorted(b.step - a.step for a, b in pairwise(points))
    return max(1, gaps[len(gaps) // 2])
