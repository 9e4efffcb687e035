"""The work of this computer over time: three spans in bounded memory, and their form on disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, replace
from itertools import pairwise
from math import floor
from typing import Annotated, Final, Literal, Self, TypeAlias

from msgspec import Meta, Struct, structs

from neuroshard.status.history import WorkDone, WorkHistoryStatus, WorkSpan

DAY_INTERVAL_SECONDS: Final = 300.0  # width of an interval; a day has 288
WEEK_INTERVAL_SECONDS: Final = 3_600.0
ALL_INTERVAL_SECONDS: Final = 600.0  # initial width; it doubles when there are too many intervals
DAY_STRETCHES: Final = 288
WEEK_STRETCHES: Final = 168
MOST_STRETCHES: Final = 400  # limit of intervals in the span of all time
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)]
_Amount: TypeAlias = Annotated[float, Meta(ge=0, le=2.0**62)]


class WorkRow(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Work of one period, as WorkDone: a list in the file."""

    start: _Amount
    tokens: _Count
    steps: _Count
    bytes_sent: _Count
    bytes_received: _Count
    training_seconds: _Amount
    loss: _Amount | None


class WorkRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """A work history in the file contribution.json."""

    total: WorkRow | None
    day: Annotated[list[WorkRow], Meta(max_length=DAY_STRETCHES)]
    week: Annotated[list[WorkRow], Meta(max_length=WEEK_STRETCHES)]
    all: Annotated[list[WorkRow], Meta(max_length=MOST_STRETCHES)]
    all_width_seconds: float
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        """Raise ValueError for periods out of order, or of a width that no history has."""
        if self.all_width_seconds not in {ALL_INTERVAL_SECONDS * 2**power for power in range(40)}:
            raise ValueError("all_width_seconds is not a width of this record")
        for name in ("day", "week", "all"):
            rows: list[WorkRow] = getattr(self, name)
            if any(later.start <= earlier.start for earlier, later in pairwise(rows)):
                raise ValueError(f"the periods in {name} are out of order")


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
        self._day = RecentSpan(DAY_INTERVAL_SECONDS, DAY_STRETCHES)
        self._week = RecentSpan(WEEK_INTERVAL_SECONDS, WEEK_STRETCHES)
        self._all = WholeSpan(ALL_INTERVAL_SECONDS, MOST_STRETCHES)

    def add(self, work: WorkDone) -> None:
        """Add work done at about `work.start`, in seconds since the epoch."""
        self._total = work if self._total is None else together(self._total, work)
        for span in (self._day, self._week, self._all):
            span.add(work)

    def status(self, now: float) -> WorkHistoryStatus:
        """The work for the snapshot at `now`, in seconds since the epoch."""
        return WorkHistoryStatus(self._total, self._day.status(now), self._week.status(now), self._all.status())

    def record(self, now: float) -> WorkRecord:
        """The form for the disk, which is at most about 100 kB as JSON."""
        status = self.status(now)
        return WorkRecord(
            None if status.total is None else _row(status.total),
            [_row(point) for point in status.day.points],
            [_row(point) for point in status.week.points],
            [_row(point) for point in status.all.points],
            status.all.width_seconds,
        )

    @classmethod
    def of(cls, record: WorkRecord) -> Self:
        """The history that was written down as this record."""
        history = cls()
        history._total = None if record.total is None else _work(record.total)
        history._day = RecentSpan(DAY_INTERVAL_SECONDS, DAY_STRETCHES, map(_work, record.day))
        history._week = RecentSpan(WEEK_INTERVAL_SECONDS, WEEK_STRETCHES, map(_work, record.week))
        history._all = WholeSpan(record.all_width_seconds, MOST_STRETCHES, map(_work, record.all))
        return history


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


def _row(work: WorkDone) -> WorkRow:
    seconds, loss = round(work.training_seconds, 1), None if work.loss is None else round(work.loss, 5)
    return WorkRow(*astuple(replace(work, training_seconds=seconds, loss=loss)))


def _work(row: WorkRow) -> WorkDone:
    return WorkDone(*structs.astuple(row))
