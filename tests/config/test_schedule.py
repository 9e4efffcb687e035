from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.config.loading import load_settings
from neuroshard.config.saving import save_settings
from neuroshard.config.weekly_schedule import DAYS, Schedule, checked_spans
from neuroshard.errors import UsageError

MONDAY = datetime(2026, 11, 23)  # noqa: DTZ001 - the owner's own clock
TIMES = st.datetimes(min_value=MONDAY - timedelta(days=400), max_value=MONDAY + timedelta(days=400))
CLOCKS = st.tuples(st.integers(0, 23), st.integers(0, 59))


@st.composite
def spans(draw: st.DrawFn) -> str:
    days = draw(st.sampled_from(["", *DAYS, *(f"{a}-{b}" for a in DAYS for b in DAYS)]))
    begin, end = draw(CLOCKS), draw(CLOCKS)
    clock = "" if begin == end and days else f"{begin[0]:02d}:{begin[1]:02d}-{end[0]:02d}:{end[1]:02d}"
    return f"{days} {clock}".strip() if begin != end or days else "mon"


def at(day: int, hour: int, minute: int = 0) -> datetime:
    return MONDAY + timedelta(days=day, hours=hour, minutes=minute)


def test_nights_and_weekends() -> None:
    schedule = Schedule.of(["Mon-Fri 18:00-08:00", "sat-sun"])
    assert not schedule.allows(at(0, 8))
    assert not schedule.allows(at(0, 17, 59))
    assert schedule.allows(at(0, 18))
    assert schedule.allows(at(1, 7, 59))
    assert all(schedule.allows(at(day, hour)) for day in (5, 6) for hour in range(24))
    assert not schedule.allows(at(0, 3))  # Sunday's day ends at midnight, and nothing began on Sunday evening
    assert schedule.next_change(at(1, 12)) == at(1, 18)
    assert schedule.next_change(at(4, 20)) == at(7, 0)
    assert schedule.next_change(at(1, 12) + timedelta(seconds=59.5)) == at(1, 18)


def test_no_spans_and_the_whole_week_mean_always() -> None:
    for schedule in (Schedule(), Schedule.of(["mon-sun"]), Schedule.of(["00:00-24:00"])):
        assert schedule.is_always
        assert schedule.allows(at(2, 4))
        assert schedule.next_change(at(2, 4)) is None


def test_sunday_evening_goes_on_into_monday() -> None:
    schedule = Schedule.of(["sun 22:00-06:00"])
    assert schedule.allows(at(6, 23))
    assert schedule.allows(at(0, 5, 59))
    assert not schedule.allows(at(0, 6))
    assert schedule.next_change(at(6, 23)) == at(7, 6)


@given(st.lists(spans(), min_size=1, max_size=4), TIMES)
def test_the_next_change_is_the_first_one(texts: list[str], local: datetime) -> None:
    schedule = Schedule.of(texts)
    change = schedule.next_change(local)
    if change is None:
        assert all(schedule.allows(local + timedelta(minutes=30 * step)) for step in range(7 * 48))
        return
    assert local < change <= local + timedelta(days=7)
    assert schedule.allows(change) is not schedule.allows(local)
    assert schedule.allows(change - timedelta(minutes=1)) is schedule.allows(local)
    step = (change - local) / 37
    assert all(schedule.allows(local + number * step) is schedule.allows(local) for number in range(37))


@given(st.lists(spans(), min_size=1, max_size=4), TIMES)
def test_more_spans_allow_more(texts: list[str], local: datetime) -> None:
    assert Schedule.of(texts).allows(local) is any(Schedule.of([text]).allows(local) for text in texts)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("whenever", '"whenever" is not a span of time'),
        ("", '"" is not a span of time'),
        ("mon-fry 10:00-11:00", '"fry" is not a day'),
        ("10:00-10:00", "is empty"),
        ("24:00-25:00", "25:00 is not a time of day"),
        ("10:60-11:00", "10:60 is not a time of day"),
        ("mon 10-11", "is not a span of time"),
        ("24:00-01:00", "is empty"),
    ],
)
def test_nonsense_is_refused_with_its_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        checked_spans((text,))


def test_nonsense_by_hand_in_the_file_gets_the_usual_error(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        'training_schedule = ["nights"]\nidle_minutes = -1\ncpu_percent = true\ntrain_when = "sometimes"\n'
        'pause_for_programs = ["/usr/bin/blender"]\ngpu_max_temperature = 1000\npause_on_battery = "perhaps"\n'
    )
    with pytest.raises(UsageError) as raised:
        load_settings({}, {}, tmp_path)
    told = str(raised.value)
    lines = {"training_schedule": 1, "idle_minutes": 2, "cpu_percent": 3, "train_when": 4, "pause_for_programs": 5}
    for name, line in lines.items():
        assert f"{name} (from {tmp_path / 'config.toml'}, line {line}) cannot be" in told
    assert '"nights" is not a span of time' in told
    assert "gpu_max_temperature" in told
    assert "pause_on_battery" in told


def test_spans_come_from_the_environment_and_the_dashboard_as_well(tmp_path: Path) -> None:
    variables = {"NEUROSHARD_TRAINING_SCHEDULE": "Mon-Fri 18:00-08:00, sat-sun", "NEUROSHARD_TRAIN_WHEN": "idle"}
    settings = load_settings({}, variables, tmp_path).settings
    assert settings.training_schedule == ("mon-fri 18:00-08:00", "sat-sun")
    assert settings.train_when == "idle"
    saved = save_settings(tmp_path, {"training_schedule": "22:00-06:00", "pause_for_programs": "blender, Game.exe"})
    assert set(saved.at_once) == {"training_schedule", "pause_for_programs"}
    again = load_settings({}, {}, tmp_path).settings
    assert again.training_schedule == ("22:00-06:00",)
    assert again.pause_for_programs == ("blender", "Game.exe")
