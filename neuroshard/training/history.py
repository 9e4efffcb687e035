"""The training curve in bounded memory: old points are merged in pairs, so the newest stay finest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite

from neuroshard.errors import CheckpointError
from neuroshard.status.snapshot import LossPoint
from neuroshard.types import JsonValue

CAPACITY = 2_000
SNAPSHOT_POINTS = 1_000


class LossHistory:
    """Points of the curve, oldest first; `tokens` of a point is the total up to its step."""

    def __init__(self, points: Sequence[LossPoint] = (), capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._points: list[LossPoint] = []
        self._snapshot: tuple[LossPoint, ...] | None = ()
        for point in points:
            self.add(point)

    def __len__(self) -> int:
        return len(self._points)

    def add(self, point: LossPoint) -> None:
        """Append a point; when the capacity is reached, neighbours are merged and half of it is free again."""
        self._points.append(point)
        if len(self._points) >= self._capacity:
            self._points = merge_neighbours(self._points, 2)
        self._snapshot = None

    def recent(self, count: int) -> tuple[LossPoint, ...]:
        """The newest points, oldest first."""
        return tuple(self._points[-count:])

    def snapshot(self) -> tuple[LossPoint, ...]:
        """At most 1,000 points for display; the same object until a point is added."""
        if self._snapshot is None:
            size = -(-len(self._points) // SNAPSHOT_POINTS)
            self._snapshot = tuple(merge_neighbours(self._points, max(1, size)))
        return self._snapshot

    def to_json(self) -> JsonValue:
        """Rows for a checkpoint."""
        return [[p.step, p.time, p.loss, p.lr, p.tokens] for p in self._points]

    @classmethod
    def from_json(cls, rows: JsonValue, capacity: int = CAPACITY) -> LossHistory:
        """The history of a checkpoint. Raises CheckpointError for rows that `to_json` cannot have written."""
        if not isinstance(rows, list) or len(rows) > capacity:
            raise CheckpointError("The loss history of the checkpoint is malformed.")
        return cls([_point(row) for row in rows], capacity)


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


def _point(row: JsonValue) -> LossPoint:
    match row:
        case [int(step), float() | int() as time, float() | int() as loss, float() | int() as lr, int(tokens)]:
            if all(isfinite(value) for value in (time, loss, lr)):
                return LossPoint(step, float(time), float(loss), float(lr), tokens)
        case _:
            pass
    raise CheckpointError("A point of the checkpoint's loss history is malformed.")
