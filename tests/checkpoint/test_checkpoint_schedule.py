"""When a checkpoint is due, what a kill could lose, and which generations make room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.state.checkpoint_saver import CheckpointPolicy, CheckpointSchedule, exposure
from neuroshard.state.disk_space import make_room, superfluous
from neuroshard.status.snapshot import CheckpointGeneration

SMALL = 10_000_000  # bytes; the budget of a day does not bind


def test_every_ten_steps_but_not_within_the_minimum_time() -> None:
    schedule = CheckpointSchedule(CheckpointPolicy(), SMALL)
    assert not schedule.is_due(9, 0.0, write_in_flight=False)
    assert schedule.is_due(10, 0.0, write_in_flight=False)
    assert not schedule.is_due(10, 0.0, write_in_flight=True)
    taken = schedule.taken(10, 100.0)
    assert not taken.is_due(20, 129.9, write_in_flight=False)
    assert taken.is_due(20, 130.0, write_in_flight=False)
    assert not taken.is_due(19, 500.0, write_in_flight=False)
    assert taken.is_due(23, 500.0, write_in_flight=False)


def test_an_outer_step_is_saved_as_soon_as_time_allows() -> None:
    schedule = CheckpointSchedule(CheckpointPolicy(), SMALL).taken(10, 100.0).outer_step_done()
    assert not schedule.is_due(11, 120.0, write_in_flight=False)
    assert schedule.is_due(12, 130.0, write_in_flight=False)
    assert not schedule.taken(12, 130.0).is_due(13, 500.0, write_in_flight=False)
    assert not schedule.is_due(10, 500.0, write_in_flight=False)


def test_the_daily_budget_lengthens_the_interval() -> None:
    policy = CheckpointPolicy()
    assert policy.interval_seconds(100_000_000) == pytest.approx(43.2)
    assert policy.interval_seconds(SMALL) == 30.0
    assert policy.interval_seconds(7_000_000_000) == pytest.approx(3024)


@given(
    size=st.integers(1, 10**10),
    step_seconds=st.floats(0.01, 20),
    write_seconds=st.floats(0, 200),
    days=st.just(0.25),
)
def test_the_budget_holds_and_no_kill_loses_more_than_was_said(
    size: int, step_seconds: float, write_seconds: float, days: float
) -> None:
    schedule = CheckpointSchedule(CheckpointPolicy(), size)
    now, step, written, saved, in_flight = 0.0, 0, 0, None, None
    for _ in range(400):
        now, step = now + step_seconds, step + 1
        if in_flight is not None and now >= in_flight[1] + write_seconds:
            saved, in_flight = in_flight, None
        if saved is not None:
            told = exposure(
                schedule,
                step=step,
                saved_step=saved[0],
                seconds_since_saved=now - saved[1],
                step_seconds=step_seconds,
                write_seconds=write_seconds,
            )
            assert step - saved[0] <= told.steps
            assert now - saved[1] <= told.seconds + step_seconds
        if schedule.is_due(step, now, write_in_flight=in_flight is not None):
            schedule, written, in_flight = schedule.taken(step, now), written + size, (step, now)
    assert written <= 200e9 * now / 86_400 + 2 * size


def test_exposure_tells_the_bound_the_beginning_and_trouble() -> None:
    schedule = CheckpointSchedule(CheckpointPolicy(), 1000)

    def told(step: int, saved: int | None, seconds: float | None) -> tuple[int, str]:
        result = exposure(
            schedule, step=step, saved_step=saved, seconds_since_saved=seconds, step_seconds=0.5, write_seconds=1.0
        )
        return result.steps, result.sentence

    assert told(5, None, None) == (5, "everything since the start: no checkpoint yet")
    steps, sentence = told(15, 10, 2.5)
    assert steps == 72
    assert sentence.startswith("at most 36 s of work, about 72 steps: 30 s between checkpoints, 10 steps, 1.0 s")
    assert told(500, 10, 245.0) == (490, "490 steps, 245 s: no checkpoint since step 10")


def generation(step: int, size: int = 10, outer: int = 0) -> CheckpointGeneration:
    return CheckpointGeneration(step, outer, float(step), None, size, f"step-{step}.json")


def test_room_is_made_from_the_oldest_and_only_when_it_suffices() -> None:
    held = [generation(30), generation(20), generation(10)]
    plenty = 10**12
    assert make_room(held, 10, own_limit_bytes=40, free_bytes=plenty, reserve_bytes=0).delete == ()
    assert make_room(held, 10, own_limit_bytes=35, free_bytes=plenty, reserve_bytes=0).delete == (held[2],)
    assert make_room(held, 10, own_limit_bytes=100, free_bytes=5, reserve_bytes=5).delete == (held[2],)
    refused = make_room(held, 10, own_limit_bytes=15, free_bytes=plenty, reserve_bytes=0)
    assert (refused.delete, refused.missing_bytes) == ((), 5)
    assert make_room(
        held, 10, elsewhere_bytes=30, own_limit_bytes=40, all_limit_bytes=60, free_bytes=plenty, reserve_bytes=0
    ).delete == (held[2],)
    refused = make_room(
        held, 10, elsewhere_bytes=50, own_limit_bytes=40, all_limit_bytes=60, free_bytes=plenty, reserve_bytes=0
    )
    assert (refused.delete, refused.missing_bytes) == ((), 10)
    assert make_room([], 10, own_limit_bytes=9, free_bytes=plenty, reserve_bytes=0).missing_bytes == 1


def test_superfluous_spares_the_last_outer_step() -> None:
    held = [generation(step) for step in (50, 40, 30, 20, 10)]
    assert superfluous(held, None) == (held[3], held[4])
    assert superfluous(held, held[4]) == (held[3],)


def test_checkpoints_for_others_stay_within_the_budget() -> None:
    policy = CheckpointPolicy(min_seconds=30.0, bytes_per_day=86_400.0)
    schedule = CheckpointSchedule(policy, generation_bytes=60)
    assert schedule.may_write(1, 5.0, write_in_flight=False)
    taken = schedule.taken(1, 5.0)
    assert not taken.may_write(2, 64.0, write_in_flight=False)
    assert taken.may_write(2, 65.0, write_in_flight=False)  # within the ten steps
    assert not taken.may_write(1, 65.0, write_in_flight=False)
    assert not taken.may_write(2, 65.0, write_in_flight=True)
    assert CheckpointSchedule(policy, 10).taken(1, 5.0).may_write(2, 15.0, write_in_flight=False)  # sooner than usual
