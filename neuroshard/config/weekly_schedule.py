"""Weekly schedules in text form: "mon-fri 18:00-08:00, sat-sun". Pure: the local time is an argument."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES
SCHEDULE_FORM = 'spans like "mon-fri 18:00-08:00", "sat-sun" or "22:00-06:00" (every day)'

_SPAN = re.compile(r"(?:([a-z]{3})(?:-([a-z]{3}))?)?\s*(?:(\d{1,2}):(\d\d)-(\d{1,2}):(\d\d))?")


@dataclass(frozen=True)
class Schedule:
    """The spans of a week in which something is allowed, in minutes since Monday 00:00; no spans mean always.

    The spans are in order and separate, and none crosses the end of the week.
    """

    spans: tuple[tuple[int, int], ...] = ()  # (first minute, first minute after it)

    @classmethod
    def of(cls, texts: Iterable[str]) -> Schedule:
        """Parse several spans into their union. Raises ValueError with the wrong span and its defect."""
        pieces = [piece for text in texts for piece in _pieces(text)]
        return cls(_merged(pieces))

    @property
    def is_always(self) -> bool:
        """Whether every minute of the week is allowed."""
        return self.spans in {(), ((0, WEEK_MINUTES),)}

    def allows(self, local: datetime) -> bool:
        """Whether the schedule allows this time; `local` is the owner's local time without a time zone."""
        minute = _minute_of_week(local)
        return self.is_always or any(start <= minute < end for start, end in self.spans)

    def next_change(self, local: datetime) -> datetime | None:
        """Next local time at which `allows` changes; None if it never does."""
        if self.is_always:
            return None
        minute = _minute_of_week(local)
        now = local.replace(second=0, microsecond=0)
        edges = {edge % WEEK_MINUTES for span in self.spans for edge in span}
        waits = sorted((edge - minute - 1) % WEEK_MINUTES + 1 for edge in edges)
        later = (now + timedelta(minutes=wait) for wait in waits)
        return next(time for time in later if self.allows(time) is not self.allows(local))


def checked_spans(texts: tuple[str, ...]) -> tuple[str, ...]:
    """The spans in lower case, without duplicates. Raises ValueError with the wrong span and its defect."""
    spans = tuple(dict.fromkeys(" ".join(text.lower().split()) for text in texts))
    Schedule.of(spans)
    return spans


def _pieces(text: str) -> list[tuple[int, int]]:
    match = _SPAN.fullmatch(" ".join(text.lower().split()))
    if match is None or not match[0]:
        raise ValueError(f'"{text[:40]}" is not a span of time')
    first, last, *clock = match.groups()
    days = range(7) if first is None else _days(first, last or first)
    if clock[0] is None:
        return [(day * DAY_MINUTES, (day + 1) * DAY_MINUTES) for day in days]
    begin, end = _minute_of_day(clock[0], clock[1]), _minute_of_day(clock[2], clock[3])
    if begin in (DAY_MINUTES, end):
        raise ValueError(f'"{text[:40]}" is empty')
    length = end - begin if end > begin else end - begin + DAY_MINUTES  # past midnight
    return [piece for day in days for piece in _within_week(day * DAY_MINUTES + begin, length)]


def _days(first: str, last: str) -> list[int]:
    for day in (first, last):
        if day not in DAYS:
            raise ValueError(f'"{day}" is not a day: {", ".join(DAYS)}')
    begin, end = DAYS.index(first), DAYS.index(last)
    return [(begin + number) % 7 for number in range((end - begin) % 7 + 1)]


def _minute_of_day(hours: str, minutes: str) -> int:
    value = int(hours) * 60 + int(minutes)
    if int(minutes) > 59 or value > DAY_MINUTES:
        raise ValueError(f"{hours}:{minutes} is not a time of day")
    return value


def _within_week(start: int, length: int) -> list[tuple[int, int]]:
    """Split a span that crosses the end of the week, from Sunday to Monday, into two."""
    end = start + length
    return [(start, end)] if end <= WEEK_MINUTES else [(start, WEEK_MINUTES), (0, end - WEEK_MINUTES)]


def _merged(pieces: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(pieces):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def _minute_of_week(local: datetime) -> int:
    return local.weekday() * DAY_MINUTES + local.hour * 60 + local.minute
