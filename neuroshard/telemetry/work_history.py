"""The work of this computer over time: three spans in bounded memory, and their JSON form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, replace
from itertools import pairwise
from math import floor, isfinite
from typing import Final, Self

from neuroshard.status.history import WorkDone, WorkHistoryStatus, WorkSpan
from neuroshard.types import JsonValue

DAY_SECONDS: Final = 300.0  # width of an interval; a day has 288
WEEK_SECONDS: Final = 3_600.0
ALL_SECONDS: Final = 600.0  # initial width; it doubles when there are too many intervals
DAY_STRETCHES: Final = 288
WEEK_STRETCHES: Final = 168
MOST_STRETCHES: Final = 400  # limit of intervals in the span of all time
FORMAT: Final = 1
_LARGEST: Final = 2.0**62


class MalformedWorkHistoryError(ValueError):
    """The data is not a record of work. The message contains the reason."""


def together(first: WorkDone, second: WorkDone) -> WorkDone:
    """Add up the work of two intervals. The result starts at the first; its loss is the mean weighted by tokens."""
    tokens = first.tokens + second.tokens
    return WorkDone(
        first.start,
        tokens,
        first.steps + second.steps,
        first.bytes_sent + second.bytes_sent,
        first.bytes_received + second.bytes_received,
        first.training_seconds + second.training_seconds,
        _mean_loss(first, second),
    )


class RecentSpan:
    """Work in the newest `stretches` intervals of `width_seconds`; older intervals are dropped."""

    def __init__(self, width_seconds: float, stretches: int, points: Iterable[WorkDone] = ()) -> None:
        self.width_seconds = width_seconds
        self._stretches = stretches
        self._points = list(points)

    def add(self, work: WorkDone) -> None:
        """Add work done at `work.start`. If the clock was set back, later intervals are merged into this one."""
        self._points = with_work(self._points, work, self.width_seconds)

    def status(self, now: float) -> WorkSpan:
        """The intervals within the span that ends at `now`, in seconds since the epoch."""
        first = _beginning(now, self.width_seconds) - (self._stretches - 1) * self.width_seconds
        self._points = [point for point in self._points[-self._stretches :] if point.start >= first]
        return WorkSpan(self.width_seconds, tuple(self._points))


class WholeSpan:
    """Work of all time in at most `most` intervals; if there are more, every interval becomes twice as wide."""

    def __init__(self, width_seconds: float, most: int, points: Iterable[WorkDone] = ()) -> None:
        self._width_seconds = width_seconds
        self._most = most
        self._points = list(points)

    def add(self, work: WorkDone) -> None:
        """Add work as in RecentSpan; nothing is dropped."""
        self._points = with_work(self._points, work, self._width_seconds)
        while len(self._points) > self._most:
            self._width_seconds *= 2
            merged = list[WorkDone]()
            for point in self._points:
                merged = with_work(merged, point, self._width_seconds)
            self._points = merged

    def status(self) -> WorkSpan:
        """All intervals with their current width."""
        return WorkSpan(self._width_seconds, tuple(self._points))


class WorkHistory:
    """Adds up work over the last day, the last week and all time. It is not thread-safe."""

    def __init__(self) -> None:
        self._total: WorkDone | None = None
        self._day = RecentSpan(DAY_SECONDS, DAY_STRETCHES)
        self._week = RecentSpan(WEEK_SECONDS, WEEK_STRETCHES)
        self._all = WholeSpan(ALL_SECONDS, MOST_STRETCHES)

    def add(self, work: WorkDone) -> None:
        """Add work done at about `work.start`, in seconds since the epoch."""
        self._total = work if self._total is None else together(self._total, work)
        for span in (self._day, self._week, self._all):
            span.add(work)

    def status(self, now: float) -> WorkHistoryStatus:
        """The work for the snapshot at `now`, in seconds since the epoch."""
        return WorkHistoryStatus(self._total, self._day.status(now), self._week.status(now), self._all.status())

    def to_json(self, now: float) -> dict[str, JsonValue]:
        """Convert the record to its JSON form, which is at most about 100 kB as text."""
        status = self.status(now)
        return {
            "format": FORMAT,
            "total": None if status.total is None else _row(status.total),
            "day": [_row(point) for point in status.day.points],
            "week": [_row(point) for point in status.week.points],
            "all": [_row(point) for point in status.all.points],
            "all_width_seconds": status.all.width_seconds,
        }

    @classmethod
    def from_json(cls, value: JsonValue) -> Self:
        """Read the JSON form. Raises MalformedWorkHistoryError."""
        record = cls()
        match value:
            case {"format": 1, "total": total, "all_width_seconds": int() | float() as width, **spans} if width in {
                ALL_SECONDS * 2**power for power in range(40)
            }:
                record._total = None if total is None else _work(total)
                record._day = RecentSpan(DAY_SECONDS, DAY_STRETCHES, _points(spans, "day", DAY_STRETCHES))
                record._week = RecentSpan(WEEK_SECONDS, WEEK_STRETCHES, _points(spans, "week", WEEK_STRETCHES))
                record._all = WholeSpan(float(width), MOST_STRETCHES, _points(spans, "all", MOST_STRETCHES))
                return record
            case _:
                raise MalformedWorkHistoryError("it has other members than a record of work")


def with_work(points: list[WorkDone], work: WorkDone, width_seconds: float) -> list[WorkDone]:
    """Add work to the last of the points (oldest first), or as a new point after it. `points` is changed in place."""
    start = _beginning(work.start, width_seconds)
    added = replace(work, start=start)
    while points and points[-1].start >= start:  # the clock was set back: no point may stay in what is now the future
        added = replace(together(points.pop(), added), start=start)
    points.append(added)
    return points


def _beginning(time: float, width_seconds: float) -> float:
    return floor(time / width_seconds) * width_seconds


def _mean_loss(first: WorkDone, second: WorkDone) -> float | None:
    if first.loss is None or second.loss is None:
        return second.loss if first.loss is None else first.loss
    tokens = first.tokens + second.tokens
    if tokens == 0:
        return second.loss
    return (first.loss * first.tokens + second.loss * second.tokens) / tokens


def _row(work: WorkDone) -> list[JsonValue]:
    seconds, loss = round(work.training_seconds, 1), None if work.loss is None else round(work.loss, 5)
    return list(astuple(replace(work, training_seconds=seconds, loss=loss)))


def _points(spans: Mapping[str, JsonValue], name: str, most: int) -> list[WorkDone]:
    rows = spans.get(name)
    if not isinstance(rows, list) or len(rows) > most:
        raise MalformedWorkHistoryError(f"it has no list of at most {most} stretches of {name}")
    points = [_work(row) for row in rows]
    if any(later.start <= earlier.start for earlier, later in pairwise(points)):
        raise MalformedWorkHistoryError("its stretches are out of order")
    return points


def _work(row: JsonValue) -> WorkDone:
    match row:
        case [
            int() | float() as start,
            int() as tokens,
            int() as steps,
            int() as sent,
            int() as received,
            int() | float() as seconds,
            int() | float() | None as loss,
        ] if all(_is_amount(value) for value in (start, tokens, steps, sent, received, seconds, loss or 0)):
            return WorkDone(float(start), tokens, steps, sent, received, float(seconds), loss)
        case _:
            raise MalformedWorkHistoryError("a stretch has unexpected fields")


def _is_amount(value: float) -> bool:
    return not isinstance(value, bool) and isfinite(value) and 0 <= value < _LARGEST
