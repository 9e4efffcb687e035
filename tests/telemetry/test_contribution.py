"""The record of work adds up, stays small, and survives being written down and dates that jump."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis.strategies import builds, floats, integers, lists, none

from neuroshard.decoders import read_json
from neuroshard.host.contribution_recorder import MOST_BYTES
from neuroshard.status.history import WorkDone, WorkSpan
from neuroshard.telemetry.work_history import (
    ALL_INTERVAL_SECONDS,
    DAY_STRETCHES,
    MOST_STRETCHES,
    WEEK_STRETCHES,
    WorkHistory,
    WorkRecord,
)

NOON = 1_800_000_000.0
HOUR = 3_600.0
works = builds(
    WorkDone,
    start=floats(0, 2e9),
    tokens=integers(0, 10**6),
    steps=integers(0, 100),
    bytes_sent=integers(0, 10**9),
    bytes_received=integers(0, 10**9),
    training_seconds=floats(0, 10),
    loss=none() | floats(0, 12),
)


def record_of(*works: WorkDone) -> WorkHistory:
    record = WorkHistory()
    for work in works:
        record.add(work)
    return record


def test_work_of_one_stretch_is_one_point_with_the_mean_loss_of_its_tokens() -> None:
    first = WorkDone(NOON + 10, tokens=300, steps=3, bytes_sent=5, bytes_received=7, training_seconds=4.0, loss=4.0)
    record = record_of(first, WorkDone(NOON + 200, tokens=100, steps=1, training_seconds=1.0, loss=2.0))
    (point,) = record.status(NOON + 200).day.points
    assert point == WorkDone(NOON, 400, 4, 5, 7, 5.0, pytest.approx(3.5))
    total = record.status(NOON + 200).total
    assert total is not None
    assert (total.start, total.tokens) == (NOON + 10, 400)


def test_the_day_and_the_week_end_now_and_all_of_time_does_not() -> None:
    record = record_of(*(WorkDone(NOON + hour * HOUR, tokens=1) for hour in range(24 * 30)))
    now = NOON + (24 * 30 - 1) * HOUR
    status = record.status(now)
    assert (len(status.day.points), len(status.week.points)) == (24, 168)
    assert status.day.points[0].start > now - 24 * HOUR
    assert sum(point.tokens for point in status.all.points) == 24 * 30
    later = record.status(now + 48 * HOUR)
    assert (later.day.points, len(later.week.points)) == ((), 168 - 48)


@given(lists(works, max_size=60))
def test_nothing_of_all_time_is_lost_whatever_the_dates(given_works: list[WorkDone]) -> None:
    status = record_of(*given_works).status(2e9)
    assert sum(point.tokens for point in status.all.points) == sum(work.tokens for work in given_works)
    starts = [point.start for point in status.all.points]
    assert starts == sorted(set(starts))
    assert all(start % status.all.width_seconds == 0 for start in starts)


def test_ten_years_of_five_minutes_stay_small() -> None:
    record = WorkHistory()
    for number in range(0, 10 * 365 * 288, 7):
        record.add(WorkDone(NOON + number * 300, 10**6, 100, 10**8, 10**8, 300.0, 3.21987654))
    now = NOON + 10 * 365 * 86_400
    status = record.status(now)
    assert len(status.all.points) <= MOST_STRETCHES
    assert len(status.day.points) <= DAY_STRETCHES
    assert len(status.week.points) <= WEEK_STRETCHES
    assert status.all.width_seconds > ALL_INTERVAL_SECONDS
    assert len(msgspec.json.encode(record.record(now))) < 100_000


def test_a_date_that_was_far_ahead_leaves_nothing_in_the_future() -> None:
    record = record_of(WorkDone(NOON, tokens=1), WorkDone(NOON + 10**9, tokens=2), WorkDone(NOON + 60, tokens=4))
    assert record.status(NOON + 60).day == WorkSpan(300.0, (WorkDone(NOON, tokens=7),))


@given(lists(works, max_size=30))
def test_what_was_written_down_is_read_again(given_works: list[WorkDone]) -> None:
    record = record_of(*given_works)
    written = msgspec.json.encode(record.record(2e9))
    again = WorkHistory.of(read_json(written, WorkRecord, MOST_BYTES))
    assert msgspec.json.encode(again.record(2e9)) == written
    again.add(WorkDone(2e9, tokens=5))
    assert sum(p.tokens for p in again.status(2e9).all.points) == sum(w.tokens for w in given_works) + 5


ROW = [NOON, 1, 1, 1, 1, 1.0, 2.0]
EMPTY = {"format": 1, "total": None, "day": [], "week": [], "all": [], "all_width_seconds": 600.0}


@pytest.mark.parametrize(
    ("damaged", "place"),
    [
        (None, "object"),
        ([], "object"),
        ({**EMPTY, "format": 2}, r"\$\.format"),
        ({**EMPTY, "more": 2}, "`more`"),
        ({**EMPTY, "all_width_seconds": 0}, "all_width_seconds"),
        ({**EMPTY, "all_width_seconds": 601}, "all_width_seconds"),
        ({**EMPTY, "day": "many"}, r"\$\.day"),
        ({**EMPTY, "day": [ROW, ROW]}, "periods in day"),
        ({**EMPTY, "day": [[*ROW[:1], -1, *ROW[2:]]]}, r"\$\.day\[0\]\[1\]"),
        ({**EMPTY, "day": [[*ROW[:1], 2**63, *ROW[2:]]]}, r"\$\.day\[0\]\[1\]"),
        ({**EMPTY, "day": [[NOON + n * 300, *ROW[1:]] for n in range(DAY_STRETCHES + 1)]}, r"\$\.day"),
        ({**EMPTY, "total": [True, *ROW[1:]]}, r"\$\.total\[0\]"),
        ({**EMPTY, "total": ROW[:-1]}, r"\$\.total"),
    ],
)
def test_what_is_no_record_is_refused(damaged: object, place: str) -> None:
    with pytest.raises(ValueError, match=place):
        read_json(json.dumps(damaged).encode(), WorkRecord, MOST_BYTES)


def test_a_loss_that_nobody_told_does_not_count() -> None:
    told = WorkDone(NOON, tokens=10, loss=3.0)
    record = record_of(told, replace(told, loss=None), WorkDone(NOON, bytes_sent=4))
    (point,) = record.status(NOON).day.points
    assert (point.tokens, point.bytes_sent, point.loss) == (20, 4, 3.0)
