from __future__ import annotations

from dataclasses import replace
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.config.settings import Settings
from neuroshard.config.weekly_schedule import Schedule
from neuroshard.host.owner_policy import (
    LEAST_SHARE,
    RECOVERY_STEP,
    USED_BY_OTHERS,
    GpuReading,
    HostReadings,
    Rules,
    Unknown,
    UserPause,
    decide,
    next_gpu_share,
    readings,
)
from neuroshard.status.owner_policy import USER, SensorReading, TrainingAction

UNKNOWN = st.builds(Unknown, st.just("nobody tells"))
MAYBE = st.one_of(st.none(), st.booleans(), UNKNOWN)
NAMES = st.frozensets(st.sampled_from(["blender", "game", "video"]), max_size=3)
GPUS = st.builds(
    GpuReading,
    st.none() | st.integers(0, 120),
    st.none() | st.floats(0, 1000, allow_nan=False, allow_infinity=False),
    st.one_of(st.none(), st.floats(0, 100), UNKNOWN),
)
OBSERVED = st.builds(
    HostReadings,
    idle_seconds=st.one_of(st.none(), st.floats(0, 1e6), UNKNOWN),
    on_battery=MAYBE,
    full_screen=MAYBE,
    programs=st.one_of(st.none(), NAMES, UNKNOWN),
    gpu=st.one_of(st.none(), GPUS, UNKNOWN),
)
SCHEDULES = st.sampled_from([[], ["sat-sun"], ["22:00-06:00"], ["mon-fri 18:00-08:00", "sat"]]).map(Schedule.of)
RULES = st.builds(
    Rules,
    only_idle=st.booleans(),
    idle_minutes=st.floats(0.1, 60),
    pause_on_battery=st.booleans(),
    pause_on_full_screen=st.booleans(),
    programs=NAMES.map(tuple),
    schedule=SCHEDULES,
    cpu_percent=st.integers(1, 100),
    gpu_share=st.integers(0, 100),
    gpu_celsius=st.none() | st.integers(30, 110),
    gpu_watts=st.none() | st.integers(10, 500),
)
TIMES = st.datetimes(min_value=datetime(2020, 1, 1), max_value=datetime(2040, 1, 1))  # noqa: DTZ001
SHARES = st.floats(LEAST_SHARE, 1.0)
USERS = st.builds(UserPause, st.just("Paused by the user."), st.none() | st.floats(0, 2e9))
NOON = datetime(2026, 11, 25, 12)  # noqa: DTZ001 - a Wednesday on the owner's clock


@given(RULES, OBSERVED, USERS, TIMES, SHARES)
def test_a_pause_by_hand_beats_all(
    rules: Rules, observed: HostReadings, user: UserPause, local: datetime, share: float
) -> None:
    decision = decide(rules, observed, user, local, share)
    assert (decision.action, decision.rule) == (TrainingAction.PAUSE, USER)
    assert (decision.reason, decision.until, decision.share) == (user.reason, user.until, 0.0)


@given(RULES, OBSERVED, TIMES, SHARES)
def test_training_never_runs_outside_the_schedule(
    rules: Rules, observed: HostReadings, local: datetime, share: float
) -> None:
    decision = decide(rules, observed, None, local, share)
    if not rules.schedule.allows(local):
        assert (decision.action, decision.rule) == (TrainingAction.PAUSE, "training_schedule")
        change = rules.schedule.next_change(local)
        assert change is not None
        assert decision.until == change.timestamp()
        assert f"{change:%H:%M}" in decision.reason
    else:
        assert decision.rule != "training_schedule"


@given(RULES, TIMES, SHARES)
def test_what_is_unknown_or_not_looked_at_never_pauses(rules: Rules, local: datetime, share: float) -> None:
    unknown = Unknown("nobody tells")
    for observed in (HostReadings(), HostReadings(unknown, unknown, unknown, unknown, unknown)):
        decision = decide(replace(rules, schedule=Schedule()), observed, None, local, share)
        assert decision.action is not TrainingAction.PAUSE
        assert next_gpu_share(share, rules, observed.gpu) == 1.0


@given(OBSERVED, TIMES, SHARES)
def test_rules_that_are_off_decide_nothing(observed: HostReadings, local: datetime, share: float) -> None:
    off = Rules(pause_on_battery=False, pause_on_full_screen=False, gpu_share=100)
    assert decide(off, observed, None, local, share).action is TrainingAction.RUN


@given(RULES, OBSERVED, TIMES, SHARES)
def test_decisions_are_whole(rules: Rules, observed: HostReadings, local: datetime, share: float) -> None:
    """Words end with a full stop, rules are settings, the share fits the action."""
    decision = decide(rules, observed, None, local, share)
    assert decision.reason.endswith(".")
    assert (decision.rule == "") is (decision.action is TrainingAction.RUN)
    assert decision.rule in {"", *Settings.model_fields}
    expected = {TrainingAction.RUN: decision.share == 1, TrainingAction.PAUSE: decision.share == 0}
    assert expected.get(decision.action, 0 < decision.share < 1)
    if decision.action is TrainingAction.THROTTLE:
        assert decision.share <= rules.cpu_percent / 100
    assert all(reading.value for reading in readings(observed))


def test_an_unknown_reading_is_the_reason_alone() -> None:
    """The dashboard writes "unknown:" in front of it."""
    (reading,) = readings(HostReadings(full_screen=Unknown("there is no display")))
    assert reading == SensorReading("Full screen", "there is no display", is_known=False)


@given(RULES, OBSERVED, TIMES)
def test_each_rule_is_obeyed_and_the_stronger_one_is_told(
    rules: Rules, observed: HostReadings, local: datetime
) -> None:
    holding = [
        ("training_schedule", not rules.schedule.allows(local)),
        ("pause_on_battery", rules.pause_on_battery and observed.on_battery is True),
        (
            "pause_for_programs",
            isinstance(observed.programs, frozenset) and bool(observed.programs & {*rules.programs}),
        ),
        ("pause_on_full_screen", rules.pause_on_full_screen and observed.full_screen is True),
        (
            "gpu_share",
            rules.gpu_share == 0
            and isinstance(observed.gpu, GpuReading)
            and isinstance(observed.gpu.others, float)
            and observed.gpu.others >= USED_BY_OTHERS,
        ),
        (
            "train_when",
            rules.only_idle
            and isinstance(observed.idle_seconds, float)
            and observed.idle_seconds < 60 * rules.idle_minutes,
        ),
    ]
    expected = next((name for name, holds in holding if holds), None)
    decision = decide(rules, observed, None, local)
    assert (decision.rule if decision.action is TrainingAction.PAUSE else None) == expected


@pytest.mark.parametrize(("celsius", "watts", "rule"), [(80, 100, "gpu_max_temperature"), (40, 600, "gpu_max_power")])
def test_of_two_limits_of_a_gpu_the_one_that_binds_is_told(celsius: int, watts: int, rule: str) -> None:
    rules = Rules(gpu_celsius=60, gpu_watts=500)
    decision = decide(rules, HostReadings(gpu=GpuReading(celsius, watts)), None, NOON, 0.5)
    assert decision.rule == rule


def test_the_words() -> None:
    def reason(rules: Rules, observed: HostReadings, share: float = 1.0) -> str:
        return decide(rules, observed, None, NOON, share).reason

    nights = Rules(schedule=Schedule.of(["mon-fri 18:00-08:00"]))
    assert reason(nights, HostReadings()) == "Paused until 18:00: that is outside the training schedule."
    weekend = Rules(schedule=Schedule.of(["sat-sun"]))
    assert reason(weekend, HostReadings()) == "Paused until Saturday 00:00: that is outside the training schedule."
    assert reason(Rules(), HostReadings(on_battery=True)) == "Paused: this computer runs on battery."
    assert reason(Rules(programs=("blender",)), HostReadings(programs=frozenset({"blender"}))) == (
        "Paused while blender runs."
    )
    assert reason(Rules(only_idle=True), HostReadings(idle_seconds=2.0)) == (
        "Paused while this computer is in use: resumes after 5 minutes without input."
    )
    assert reason(Rules(cpu_percent=40), HostReadings()) == "Slowed down to 40% of the time, as set."
    hot = Rules(gpu_celsius=70, gpu_watts=200)
    assert reason(hot, HostReadings(gpu=GpuReading(75, 100.0)), 0.5) == (
        "Slowed down to 50%, so that the GPU stays below 70 °C and 200 W."
    )


@given(SHARES, RULES, GPUS)
def test_a_gpu_above_its_limit_gets_less_and_a_cool_one_more(before: float, rules: Rules, gpu: GpuReading) -> None:
    after = next_gpu_share(before, rules, gpu)
    assert LEAST_SHARE <= after <= 1.0
    too_hot = rules.gpu_celsius is not None and gpu.celsius is not None and gpu.celsius > rules.gpu_celsius
    too_much = rules.gpu_watts is not None and gpu.watts is not None and gpu.watts > rules.gpu_watts
    if not rules.limits_gpu:
        assert after == 1.0
    elif too_hot or too_much:
        assert after < before or before == LEAST_SHARE
    else:
        assert after >= before


@given(st.integers(100, 300), st.integers(100, 500), st.floats(20, 60))
def test_a_gpu_settles_at_its_power_limit(limit: int, full_watts: int, idle_watts: float) -> None:
    """Its power follows the share of the time in which it works; it ends near the limit, or at full speed below it."""
    rules, share = Rules(gpu_watts=limit), 1.0
    looks: list[float] = []
    for _ in range(200):
        watts = idle_watts + (full_watts - idle_watts) * share
        looks.append(watts)
        share = next_gpu_share(share, rules, GpuReading(None, watts))
    late = looks[100:]
    assert max(late) <= limit + RECOVERY_STEP * full_watts
    assert min(late) >= min(full_watts, 0.85 * limit)


USED, UNUSED = (GpuReading(50, 100.0, percent) for percent in (35.0, 4.0))


@pytest.mark.parametrize(
    ("rules", "gpu", "action", "rule", "share"),
    [
        (Rules(), USED, TrainingAction.THROTTLE, "gpu_share", 0.25),
        (Rules(), UNUSED, TrainingAction.RUN, "", 1.0),
        (Rules(gpu_share=0), USED, TrainingAction.PAUSE, "gpu_share", 0.0),
        (Rules(gpu_share=0), UNUSED, TrainingAction.RUN, "", 1.0),
        (Rules(gpu_share=100), USED, TrainingAction.RUN, "", 1.0),
        (Rules(cpu_percent=10), USED, TrainingAction.THROTTLE, "cpu_percent", 0.1),
        (Rules(cpu_percent=50), USED, TrainingAction.THROTTLE, "gpu_share", 0.25),
        (Rules(), GpuReading(50, 100.0, Unknown("in a container")), TrainingAction.RUN, "", 1.0),
        (Rules(), Unknown("no driver"), TrainingAction.RUN, "", 1.0),
        (Rules(gpu_share=0), None, TrainingAction.RUN, "", 1.0),
    ],
)
def test_the_gpu_is_left_to_another_program(
    rules: Rules, gpu: GpuReading | Unknown | None, action: TrainingAction, rule: str, share: float
) -> None:
    decision = decide(rules, HostReadings(gpu=gpu), None, NOON)
    assert (decision.action, decision.rule, decision.share) == (action, rule, share)
    if rule == "gpu_share":
        assert "while another program uses the GPU" in decision.reason


def test_use_by_others_is_shown_in_words() -> None:
    shown = [readings(HostReadings(gpu=gpu))[0].value for gpu in (USED, UNUSED)]
    assert shown == ["50 °C, 100 W, other programs use 35 %", "50 °C, 100 W, other programs use 4 %"]
