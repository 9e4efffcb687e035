"""Replicas whose rounds come rarely later on: equal counts on all of them, whoever is slow, late or started again."""

from __future__ import annotations

from dataclasses import replace

from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.consensus.sync_strategies import steps_between_rounds
from neuroshard.network import InMemoryNetwork
from neuroshard.optim.outer import LineProgress
from tests.worlds.replicas import SEQUENCES_PER_STEP, A, B, C, SimulatedReplica, for_seconds, play

GROWING = OuterOptimization()


def of(name: object, network: InMemoryNetwork, seed: int, **changes: object) -> SimulatedReplica:
    return SimulatedReplica(name, network, seed, scheme=GROWING, **changes)  # type: ignore[arg-type]


def interval(one: SimulatedReplica, members: int = 2) -> int:
    return steps_between_rounds(GROWING, one.state.line, SEQUENCES_PER_STEP, members)


def test_rounds_come_after_two_steps_and_rarely_later() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = of(A, network, 1), of(B, network, 2)
        await for_seconds(20, a, b)
        early = a.state.outer_step
        assert early >= 5
        await for_seconds(380, a, b)
        assert a.state.line == b.state.line
        assert len(a.state.line.durations) == 6
        assert interval(a) == interval(b) == 25
        before = a.state.outer_step
        await for_seconds(100, a, b)
        assert 2 <= a.state.outer_step - before <= 4

    play(scenario)


def test_a_member_eight_times_faster_moves_the_line_no_faster_than_the_slow_half() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b, c = of(A, network, 1), of(B, network, 2), of(C, network, 3, step_seconds=0.125)
        await for_seconds(60, a, b, c)
        assert a.state.line == b.state.line == c.state.line
        assert 0 < a.state.line.sequences // SEQUENCES_PER_STEP <= min(a.steps, b.steps)

    play(scenario)


def test_a_late_member_and_one_that_starts_again_count_like_the_others() -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        a, b = of(A, network, 1), of(B, network, 2)
        await for_seconds(60, a, b)
        c = of(C, network, 3)
        c.follow(a)
        await for_seconds(60, a, b, c)
        assert a.state.line == b.state.line == c.state.line
        assert interval(c, 3) == interval(a, 3)
        state, book, steps = b.state, b.book, b.steps
        network.kill(B)
        again = of(B, network, 2, state=state, book=book, steps=steps)
        assert again.state.line == state.line
        await for_seconds(60, a, again, c)
        assert a.state.line == again.state.line == c.state.line
        assert a.state.line.sequences > state.line.sequences

    play(scenario)


def test_one_member_alone_has_the_longest_interval_at_any_progress() -> None:
    for sequences in (0, 10**6):
        line = LineProgress(sequences, ((100, 0),) * 6)
        assert steps_between_rounds(GROWING, line, SEQUENCES_PER_STEP, 1) == 100
        fixed = replace(GROWING, interval="fixed")
        assert steps_between_rounds(fixed, line, SEQUENCES_PER_STEP, 64) == 100
