from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.pipeline.replica_routing import FIRST_GUESS_SECONDS, LEAST_SECONDS, SMOOTHING, BalancedRouting, Turn
from neuroshard.types import NodeId

ME = NodeId("driver")
A, B, C, D = (NodeId(name) for name in "abcd")


def routing_to(*peers: NodeId) -> BalancedRouting:
    routing = BalancedRouting(ME, 0)
    routing.update(peers)
    return routing


def picked(routing: BalancedRouting) -> Turn:
    turn = routing.pick()
    assert turn is not None
    return turn


def work_one_by_one(routing: BalancedRouting, count: int, seconds: dict[NodeId, float]) -> Counter[NodeId]:
    done: Counter[NodeId] = Counter()
    for _ in range(count):
        turn = picked(routing)
        routing.finished(turn, seconds[turn.peer])
        done[turn.peer] += 1
    return done


@dataclass
class Stage:
    """Replicas that work on one microbatch at a time, and a driver with so many under way."""

    seconds: dict[NodeId, float]
    in_flight: int
    done: Counter[NodeId] = field(default_factory=Counter[NodeId])

    def seconds_for(self, microbatches: int) -> float:
        routing = routing_to(*self.seconds)
        free_at = dict.fromkeys(self.seconds, 0.0)
        under_way: list[tuple[float, int, float, Turn]] = []
        now, begun = 0.0, 0
        while begun < microbatches or under_way:
            while begun < microbatches and len(under_way) < self.in_flight:
                turn = picked(routing)
                free_at[turn.peer] = max(now, free_at[turn.peer]) + self.seconds[turn.peer]
                heappush(under_way, (free_at[turn.peer], begun, now, turn))
                begun += 1
            now, _, began_at, turn = heappop(under_way)
            routing.finished(turn, now - began_at)
            self.done[turn.peer] += 1
        return now


@pytest.mark.parametrize("in_flight", [1, 4, 8, 16])
def test_a_replica_that_is_twice_as_fast_gets_twice_as_many(in_flight: int) -> None:
    stage = Stage({A: 1.0, B: 0.5}, in_flight)
    stage.seconds_for(1000)
    assert stage.done[B] == pytest.approx(2 * stage.done[A], rel=0.1)


@pytest.mark.parametrize("slowness", [2.0, 5.0, 20.0])
def test_a_slow_replica_costs_at_most_its_own_slowness(slowness: float) -> None:
    replicas = {A: 1.0, B: 1.0, C: 1.0}
    without = Stage(dict(replicas), 8).seconds_for(3000)
    with_it = Stage({**replicas, D: slowness}, 8).seconds_for(3000)
    best = 3000 / (3 + 1 / slowness)
    # at the start, when nothing was measured, and for the last microbatch everybody waits for it
    assert with_it <= without + 3 * slowness
    assert with_it <= 1.1 * best


def test_everybody_is_tried_first_and_what_was_guessed_is_put_right() -> None:
    routing = routing_to(A, B, C)
    first = [picked(routing) for _ in range(3)]
    assert {turn.peer for turn in first} == {A, B, C}
    for turn in first:
        routing.finished(turn, {A: 0.1, B: 0.2, C: 0.4}[turn.peer])
    assert routing.runtimes == pytest.approx({A: 0.1, B: 0.2, C: 0.4})
    assert picked(routing).peer == A


def test_drivers_begin_with_different_replicas() -> None:
    firsts = Counter(str(_first_of(NodeId(f"driver {n}"))) for n in range(300))
    assert set(firsts) == {"a", "b", "c"}
    assert all(70 <= count <= 130 for count in firsts.values())


def _first_of(driver: NodeId) -> NodeId:
    routing = BalancedRouting(driver, 0)
    routing.update([A, B, C])
    return picked(routing).peer


def test_a_newcomer_enters_at_the_end_and_then_gets_its_share() -> None:
    routing = routing_to(A, B)
    work_one_by_one(routing, 101, {A: 1.0, B: 1.0})
    last = max(routing.runtimes.values())
    routing.update([A, B, C])
    assert routing.runtimes[C] == last
    assert routing.expected_seconds(C) == 1.0  # as long as the others take
    later = work_one_by_one(routing, 300, {A: 1.0, B: 1.0, C: 1.0})
    assert max(later.values()) - min(later.values()) <= 2


def test_a_replica_that_was_gone_for_a_while_need_not_catch_up() -> None:
    routing = routing_to(A, B)
    work_one_by_one(routing, 50, {A: 1.0, B: 1.0})
    routing.update([A])
    work_one_by_one(routing, 100, {A: 1.0})
    routing.update([A, B])
    assert routing.runtimes[B] == routing.runtimes[A]
    later = work_one_by_one(routing, 40, {A: 1.0, B: 1.0})
    assert later[B] == pytest.approx(20, abs=2)


def test_a_newcomer_does_not_wait_for_what_those_who_left_had_done() -> None:
    routing = routing_to(A, B)
    work_one_by_one(routing, 20, {A: 1.0, B: 1000.0})
    routing.update([A, C])
    assert routing.runtimes[C] == routing.runtimes[A] < 1000


def test_without_replicas_nobody_is_picked() -> None:
    routing = routing_to(A)
    picked(routing)
    routing.update([])
    assert routing.pick() is None


def test_a_turn_without_an_end_stays_counted_as_its_replicas_usual_time() -> None:
    routing = routing_to(A)
    work_one_by_one(routing, 3, {A: 2.0})
    turn = picked(routing)
    routing.dropped(turn)
    routing.finished(turn, 50.0)
    assert routing.runtimes == {A: 8.0}


def test_a_turn_counts_once_and_only_while_its_replica_is_there() -> None:
    routing = routing_to(A, B)
    turn = picked(routing)
    routing.finished(turn, 0.5)
    runtimes = dict(routing.runtimes)
    routing.finished(turn, 50.0)
    assert routing.runtimes == runtimes
    late = picked(routing)
    routing.update([A, B][late.peer == A :][:1])
    routing.update([A, B])
    runtimes = dict(routing.runtimes)
    routing.finished(late, 50.0)
    assert routing.runtimes == runtimes


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    routing = routing_to(A)
    with pytest.raises(ValueError, match="at least 0"):
        routing.finished(picked(routing), seconds)


def test_a_replica_that_takes_no_time_does_not_get_everything() -> None:
    done = work_one_by_one(routing_to(A, B), 400, {A: 0.0, B: LEAST_SECONDS})
    assert done[B] >= 190


def test_the_heap_stays_small() -> None:
    routing = routing_to(A, B, C)
    work_one_by_one(routing, 5000, {A: 1.0, B: 0.1, C: 3.0})
    for _ in range(500):
        routing.finished(picked(routing), 1.0)
    assert len(routing._heap) < 200


class Model:
    """The same rules with a plain table."""

    def __init__(self) -> None:
        self.peers: dict[NodeId, tuple[float, float | None]] = {}  # runtime, average
        self.open: dict[int, tuple[NodeId, float]] = {}
        self.turns = 0

    def update(self, present: set[NodeId]) -> None:
        self.peers = {peer: entry for peer, entry in self.peers.items() if peer in present}
        self.open = {number: entry for number, entry in self.open.items() if entry[0] in present}
        last = max((runtime for runtime, _ in self.peers.values()), default=0.0)
        for peer in present - set(self.peers):
            self.peers[peer] = last, None

    def candidates(self) -> set[NodeId]:
        return {peer for peer, entry in self.peers.items() if entry[0] == min(r for r, _ in self.peers.values())}

    def pick(self, peer: NodeId) -> None:
        self.turns += 1
        runtime, average = self.peers[peer]
        known = [mean for _, mean in self.peers.values() if mean is not None]
        guess = sum(known) / len(known) if known else FIRST_GUESS_SECONDS
        added = guess if average is None else average
        self.open[self.turns] = peer, added
        self.peers[peer] = runtime + added, average

    def finish(self, number: int, seconds: float) -> None:
        if number not in self.open:
            return
        peer, added = self.open.pop(number)
        runtime, average = self.peers[peer]
        seconds = max(seconds, LEAST_SECONDS)
        average = seconds if average is None else average + SMOOTHING * (seconds - average)
        self.peers[peer] = runtime + (average - added), average


peers = st.sets(st.sampled_from([A, B, C, D]))
actions = st.one_of(
    st.tuples(st.just("pick")),
    st.tuples(st.just("finish"), st.integers(0, 50), st.sampled_from([0.0, 0.25, 1.0, 3.0])),
    st.tuples(st.just("drop"), st.integers(0, 50)),
    st.tuples(st.just("update"), peers),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(actions, max_size=60))
def test_routing_does_what_a_plain_table_does(steps: list[tuple]) -> None:
    routing, model, turns = BalancedRouting(ME, 1), Model(), list[Turn]()
    routing.update({A, B, C})
    model.update({A, B, C})
    for name, *arguments in steps:
        match name:
            case "pick":
                expected = model.candidates()
                turn = routing.pick()
                assert (turn is None) == (not expected)
                if turn is not None:
                    assert turn.peer in expected
                    model.pick(turn.peer)
                    turns.append(turn)
            case "finish" if turns:
                turn = turns[arguments[0] % len(turns)]
                routing.finished(turn, arguments[1])
                model.finish(turn.number, arguments[1])
            case "drop" if turns:
                turn = turns[arguments[0] % len(turns)]
                routing.dropped(turn)
                model.open.pop(turn.number, None)
            case "update":
                routing.update(arguments[0])
                model.update(arguments[0])
            case _:
                pass
        assert routing.runtimes == {peer: runtime for peer, (runtime, _) in model.peers.items()}
