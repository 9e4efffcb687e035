"""What happens to the nodes of a run in every round, as one seed decides: the same for the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS

SLEEP_SECONDS = (5.0, 60.0)  # from less than a view of a round takes to several of them
WRONG_CLOCKS = 0.1  # of the rounds: somebody comes whose clock is wrong


@dataclass(frozen=True)
class Coming:
    """Somebody starts."""

    returns: bool  # one that has died, with what lay on its disk
    clock_ahead: float  # seconds, of the true time


@dataclass(frozen=True)
class Sleep:
    """Somebody stops for a while, and goes on as if nothing had been."""

    after: float  # seconds from the round's begin
    seconds: float


@dataclass(frozen=True)
class RoundPlan:
    """What happens while one outer step is made."""

    deaths: tuple[float, ...]  # seconds from its begin
    comings: tuple[Coming, ...]
    sleeps: tuple[Sleep, ...]
    slow: int  # which of those who are there has a slow line from now on


def churn_plan(seed: int, rounds: int, members: int, share: float, seconds: float) -> tuple[RoundPlan, ...]:
    """Deaths of that share of the members in every round of so many seconds, on average, and as many who come."""
    random = Random(f"churn {seed}")
    return tuple(_round(random, int(share * members + random.random()), members, seconds) for _ in range(rounds))


def right_clock(random: Random) -> float:
    """Seconds ahead of the true time, by which no two clocks are farther apart than a node puts up with."""
    return random.uniform(-0.5, 0.5) * MAX_CLOCK_SKEW_SECONDS


def wrong_clock(random: Random) -> float:
    """Seconds ahead by which a clock is too far from all that are right."""
    return random.choice((-1, 1)) * random.uniform(2.0, 3.0) * MAX_CLOCK_SKEW_SECONDS


def _round(random: Random, count: int, members: int, seconds: float) -> RoundPlan:
    comings = [Coming(random.random() < 0.5, right_clock(random)) for _ in range(count)]
    if comings and random.random() < WRONG_CLOCKS:
        comings[0] = Coming(comings[0].returns, wrong_clock(random))
    sleeps = [Sleep(random.uniform(0, seconds), random.uniform(*SLEEP_SECONDS))] if random.random() < 0.5 else []
    return RoundPlan(
        tuple(sorted(random.uniform(0, seconds) for _ in range(count))),
        tuple(comings),
        tuple(sleeps),
        random.randrange(members),
    )
