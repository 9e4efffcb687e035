"""When a checkpoint is due, and what a kill could lose: pure decisions, the clock is an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

SECONDS_A_DAY = 86_400.0


@dataclass(frozen=True)
class CheckpointPolicy:
    """What the owner of the computer allows."""

    every_steps: int = 10
    min_seconds: float = 30.0
    bytes_per_day: float = 200e9

    def interval_seconds(self, generation_bytes: int) -> float:
        """Least time between two writes: the minimum, or more when the day's budget asks for it."""
        return max(self.min_seconds, self.budget_seconds(generation_bytes))

    def budget_seconds(self, generation_bytes: int) -> float:
        """Time between two writes that spreads the day's budget evenly."""
        return generation_bytes / self.bytes_per_day * SECONDS_A_DAY


@dataclass(frozen=True)
class CheckpointSchedule:
    """Decides from what was taken last. `taken` and `outer_step_done` return the next schedule."""

    policy: CheckpointPolicy
    generation_bytes: int
    last_step: int = 0  # of the state taken last, or the step training started from
    last_started: float | None = None  # monotonic seconds
    outer_step_waiting: bool = False  # an outer step was done that no checkpoint holds yet

    def is_due(self, step: int, now: float, *, write_in_flight: bool) -> bool:
        """Whether to take the state after `step`: every 10 steps or after an outer step, when time and budget allow."""
        if write_in_flight or step <= self.last_step:
            return False
        if not self.outer_step_waiting and step - self.last_step < self.policy.every_steps:
            return False
        return self.last_started is None or now - self.last_started >= self.interval_seconds

    def may_write(self, step: int, now: float, *, write_in_flight: bool) -> bool:
        """Whether the state after `step` may be taken because somebody needs it: sooner, but within the budget."""
        if write_in_flight or step <= self.last_step:
            return False
        return self.seconds_to_write(now) == 0.0

    def seconds_to_write(self, now: float) -> float:
        """Until the write budget allows another state."""
        if self.last_started is None:
            return 0.0
        return max(0.0, self.last_started + self.policy.budget_seconds(self.generation_bytes) - now)

    @property
    def interval_seconds(self) -> float:
        """Least time between two writes of this size."""
        return self.policy.interval_seconds(self.generation_bytes)

    def taken(self, step: int, now: float) -> CheckpointSchedule:
        """After a state was handed to the writer (also when the write then fails: the next try waits its turn)."""
        return replace(self, last_step=step, last_started=now, outer_step_waiting=False)

    def written(self, now: float) -> CheckpointSchedule:
        """After as many bytes as a state has were written to something else."""
        return replace(self, last_started=now)

    def outer_step_done(self) -> CheckpointSchedule:
        """After an outer step: the next allowed moment is due, wherever in the ten steps it falls."""
        return replace(self, outer_step_waiting=True)


@dataclass(frozen=True)
class Exposure:
    """What a kill at this moment could lose at most."""

    steps: int
    seconds: float
    sentence: str


def exposure(
    schedule: CheckpointSchedule,
    *,
    step: int,
    saved_step: int | None,
    seconds_since_saved: float | None,
    step_seconds: float,
    write_seconds: float,
) -> Exposure:
    """The interval plus ten steps plus one write, or the present distance to the saved state when that is more.

    `saved_step` is the step of the newest complete generation, `seconds_since_saved` the age of that state;
    None when nothing was saved yet.
    """
    if saved_step is None or seconds_since_saved is None:
        return Exposure(step, 0.0, "everything since the start: no checkpoint yet")
    every, interval = schedule.policy.every_steps, schedule.interval_seconds
    waiting = max(interval, write_seconds)
    bound = waiting + every * step_seconds + write_seconds
    behind = step - saved_step
    if seconds_since_saved > bound and behind > every:
        told = f"{behind} steps, {seconds_since_saved:.0f} s: no checkpoint since step {saved_step}"
        return Exposure(behind, seconds_since_saved, told)
    steps = every + (math.ceil((waiting + write_seconds) / step_seconds) if step_seconds > 0 else 0)
    told = (
        f"at most {bound:.0f} s of work, about {steps} steps: "
        f"{interval:.0f} s between checkpoints, {every} steps, {write_seconds:.1f} s for a write"
    )
    return Exposure(max(steps, behind), bound, told)
