"""When a replica asks the others again: soon where a round may be due, rarely where none is near. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.consensus.matchmaking import RoundTimes, WorkToRound

TIMES = RoundTimes()


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (WorkToRound(0, 8, 0.0, usual_seconds=0.1), 0.8),  # just after a round: by the pace before it
        (WorkToRound(4, 8, 0.4), 0.4),
        (WorkToRound(8, 8, 0.8), 0.2),  # its share is done, the others are about to be ready
        (WorkToRound(16, 8, 12.0), 0.6),  # they are slower
        (WorkToRound(40, 8, 100.0), 1.0),
        (WorkToRound(0, 8, 0.0), 0.2),  # a new run: nobody knows how long a step takes
        (WorkToRound(0, 8, 3_600.0, usual_seconds=0.1), 10.0),  # paused
        (WorkToRound(40, 400, 10.0), 10.0),  # a long interval
        (WorkToRound(300, 400, 75.0), 1.0),
    ],
)
def test_the_next_query_comes_when_this_replica_should_be_ready(work: WorkToRound, seconds: float) -> None:
    assert TIMES.pause(work, 2) == pytest.approx(seconds)


@given(st.integers(0, 1_000), st.floats(0.5, 1_000), st.floats(0, 10_000), st.floats(0, 100), st.integers(1, 63))
def test_queries_never_come_faster_than_the_replicas_can_bear(
    done: int, share: float, elapsed: float, usual: float, replicas: int
) -> None:
    pause = TIMES.pause(WorkToRound(done, share, elapsed, usual), replicas)
    assert min(1.0, max(0.2, 0.02 * replicas)) <= pause <= TIMES.look_seconds
    if 2 * done >= share:
        assert pause <= TIMES.near_seconds
