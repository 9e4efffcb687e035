"""The law that decides how many connections a peer gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from neuroshard.network.pool.options import MOST_CONNECTIONS
from neuroshard.network.pool.sizing import LineObservation, PoolSize, next_size, wanted_connections

TICK = 0.25


@dataclass
class Line:
    """A line that carries `rate(connections)` bytes a second, with this loss and this queue."""

    rate: Callable[[int], float]
    loss: float | None
    queueing: float = 0.05
    carried_over: float = 0.0  # of a lost segment

    def run(self, size: PoolSize, seconds: float, start: float = 0.0) -> list[PoolSize]:
        """The sizes over time, while there is always something to send."""
        sizes = [size]
        for tick in range(int(seconds / TICK)):
            bytes_arrived = self.rate(size.connections) * TICK
            segments = int(bytes_arrived / 1400)
            self.carried_over += segments * (self.loss or 0.0)
            repeated, self.carried_over = int(self.carried_over), self.carried_over % 1
            seen = LineObservation(
                now=start + tick * TICK,
                open_connections=size.connections,
                busy_seconds=TICK,
                bytes_arrived=bytes_arrived,
                rtt_seconds=0.05,
                segments=None if self.loss is None else segments,
                repeated=repeated,
                queueing=None if self.loss is None else self.queueing,
            )
            size = next_size(size, seen)
            sizes.append(size)
        return sizes


def collapsing(one: float) -> Callable[[int], float]:
    """Random loss: each connection carries little, the line 12 MB/s."""
    return lambda connections: min(12e6, one * connections)


def full(_: int) -> float:
    return 12e6


def test_heavy_random_loss_gets_all_connections_within_seconds() -> None:
    assert Line(collapsing(260e3), loss=0.01).run(PoolSize(), 6)[-1].connections == MOST_CONNECTIONS


def test_light_random_loss_gets_several() -> None:
    assert Line(collapsing(825e3), loss=0.001).run(PoolSize(), 12)[-1].connections >= 12


def test_a_clean_line_gets_one() -> None:
    assert {size.connections for size in Line(full, loss=0.0).run(PoolSize(), 120)} == {1}


def test_a_full_line_gets_one_although_its_queue_overflows() -> None:
    assert {size.connections for size in Line(full, loss=0.001, queueing=1.5).run(PoolSize(), 120)} == {1}


def test_connections_that_gain_nothing_go_again_and_trials_become_rare() -> None:
    sizes = [size.connections for size in Line(full, loss=0.01).run(PoolSize(), 3600)]
    trials = sum(after > before for before, after in pairwise(sizes))
    assert 3 <= trials <= 14
    assert sizes.count(1) > 0.97 * len(sizes)


def test_where_nothing_tells_of_loss_a_trial_decides() -> None:
    assert Line(collapsing(260e3), loss=None).run(PoolSize(), 30)[-1].connections == MOST_CONNECTIONS
    assert Line(full, loss=None).run(PoolSize(), 30)[-1].connections == 1


def test_a_line_that_recovers_gets_fewer() -> None:
    size = Line(collapsing(260e3), loss=0.01).run(PoolSize(), 10)[-1]
    assert Line(full, loss=0.0).run(size, 120, start=10)[-1].connections == 1


def test_a_line_that_turns_bad_gets_more() -> None:
    size = Line(full, loss=0.00001, queueing=1.5).run(PoolSize(), 100)[-1]
    assert Line(collapsing(260e3), loss=0.01).run(size, 20, start=100)[-1].connections == MOST_CONNECTIONS


def test_a_peer_that_allows_fewer_is_taken_at_its_word() -> None:
    size = PoolSize(connections=16, changed_at=0.0)
    for tick in range(40):
        size = next_size(size, LineObservation(tick * TICK, 4, TICK, 1e6 * TICK, 0.05, 100, 1, 0.0))
    assert size.connections <= 4


observations = st.builds(
    LineObservation,
    now=st.just(0.0),
    open_connections=st.integers(0, 40),
    busy_seconds=st.floats(0, 2),
    bytes_arrived=st.floats(0, 1e9),
    rtt_seconds=st.none() | st.floats(0, 5),
    segments=st.none() | st.integers(0, 10**6),
    repeated=st.integers(0, 10**6),
    queueing=st.none() | st.floats(0, 100),
)


@given(st.lists(st.tuples(observations, st.floats(0, 100)), max_size=60), st.integers(1, 16))
def test_the_size_stays_within_its_bounds_whatever_is_seen(
    steps: list[tuple[LineObservation, float]], most: int
) -> None:
    size, now = PoolSize(), 0.0
    for seen, seconds in steps:
        now += seconds
        size = next_size(size, LineObservation(**{**vars(seen), "now": now}), most)
        assert 1 <= size.connections <= most


@given(st.lists(st.tuples(observations, st.floats(0, 10)), max_size=60))
def test_nothing_grows_where_no_loss_shows(steps: list[tuple[LineObservation, float]]) -> None:
    size, now = PoolSize(), 0.0
    for seen, seconds in steps:
        now += seconds
        told = {**vars(seen), "now": now, "segments": seen.segments or 0, "repeated": 0}
        size = next_size(size, LineObservation(**told))
        assert size.connections == 1


@given(
    st.integers(1, 16),
    st.floats(0, 1e4),
    st.integers(0, 2**40),
)
def test_connections_go_when_they_are_idle(connections: int, idle_seconds: float, bytes_waiting: int) -> None:
    wanted = wanted_connections(PoolSize(connections), idle_seconds, bytes_waiting, idle_limit=60.0)
    if idle_seconds >= 60:
        assert wanted == 0
    elif idle_seconds >= 10:
        assert wanted == 1
    else:
        assert 1 <= wanted <= connections


def test_a_slow_start_of_the_first_connection_delays_nothing() -> None:
    size = next_size(PoolSize(), LineObservation(1000.0, 0, 0.0, 0.0))
    sizes = Line(collapsing(260e3), loss=0.01).run(size, 6, start=1000.25)
    assert sizes[-1].connections == MOST_CONNECTIONS


def test_a_full_line_that_got_too_many_gives_them_back() -> None:
    assert Line(full, loss=0.0005, queueing=1.0).run(PoolSize(16), 120)[-1].connections == 1


def test_a_lossy_line_that_all_connections_fill_keeps_them_nearly_always() -> None:
    line = Line(collapsing(825e3), loss=0.001)
    size, counts = PoolSize(), []
    for second in range(1800):
        line.queueing = 0.6 if line.rate(size.connections) >= 12e6 else 0.05
        size = line.run(size, 1, start=float(second))[-1]
        counts.append(size.connections)
    assert counts.count(MOST_CONNECTIONS) > 0.9 * len(counts)
