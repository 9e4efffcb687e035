"""The laws of a run's rounds by t, the certified inner steps per member: interval, momentum and learning rate."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neuroshard.optim.outer import (
    PLAIN_MEAN,
    CertifiedWork,
    LineProgress,
    Nesterov,
    candidates_at,
    duration_code,
    fresh_outer_state,
    interval_at,
    interval_of_many,
    momentum_at,
    nesterov_outer_step,
)
from neuroshard.state.outer_state import line_from_json, line_to_json, state_root

STEPS = st.integers(0, 100_000)


@pytest.mark.parametrize(
    ("start", "interval"), [(0, 2), (20, 5), (100, 10), (300, 25), (800, 50), (1_500, 100), (7_500, 500)]
)
def test_intervals_begin_where_the_table_says(start: int, interval: int) -> None:
    assert interval_at(start, 500) == interval
    if start:
        assert interval_at(start - 1, 500) < interval


def test_the_runs_longest_interval_bounds_the_law() -> None:
    assert interval_at(0, 1) == 1
    assert interval_at(10**9, 25) == 25
    assert {interval_at(steps, 100) for steps in range(1_500, 100_000, 500)} == {100}


@given(STEPS, STEPS, st.integers(1, 1_000))
def test_the_interval_never_falls_as_the_line_progresses(one: int, other: int, longest: int) -> None:
    shorter, longer = (interval_at(steps, longest) for steps in sorted((one, other)))
    assert 1 <= shorter <= longer <= longest


@given(STEPS, STEPS, st.floats(0, 0.99))
def test_momentum_rises_from_nothing_to_its_target(one: int, other: int, target: float) -> None:
    smaller, larger = (momentum_at(steps, target) for steps in sorted((one, other)))
    assert 0 <= smaller <= larger <= target


def test_momentum_begins_at_half_of_its_target() -> None:
    found = [momentum_at(steps, 0.75) for steps in (0, 299, 300, 350, 400, 5_000)]
    assert found == [0.0, 0.0, 0.375, 0.5625, 0.75, 0.75]
    assert momentum_at(10_000, 0.0) == 0.0


@pytest.mark.parametrize(("steps", "longest"), [(-1, 5), (0, 0)])
def test_impossible_intervals_are_refused(steps: int, longest: int) -> None:
    with pytest.raises(ValueError, match="needs steps >= 0"):
        interval_at(steps, longest)


@pytest.mark.parametrize(
    ("members", "interval"), [(1, 100), (2, 100), (4, 100), (5, 89), (16, 50), (64, 25), (10**6, 1)]
)
def test_more_than_four_members_meet_more_often(members: int, interval: int) -> None:
    assert interval_of_many(100, members) == interval


def test_an_interval_of_many_needs_a_step_and_a_member() -> None:
    for interval, members in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one"):
            interval_of_many(interval, members)


@pytest.mark.parametrize(("steps", "target"), [(-1, 0.5), (0, 1.0), (0, -0.1), (500, float("nan"))])
def test_impossible_momenta_are_refused(steps: int, target: float) -> None:
    with pytest.raises(ValueError, match="needs steps >= 0"):
        momentum_at(steps, target)


def replicas_of(anchor: Tensor, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [anchor + 0.1 * torch.randn(anchor.shape, generator=generator) for _ in range(4)]


def test_until_300_steps_the_anchor_is_the_plain_mean_of_the_replicas() -> None:
    state = fresh_outer_state(torch.zeros(50))
    for steps in range(0, 300, 50):
        mean = torch.stack(replicas_of(state.anchor, steps)).mean(dim=0)
        (step,) = candidates_at(steps, 0.7, 0.75, measured=True)
        state = nesterov_outer_step(state, state.anchor - mean, step.learning_rate, step.momentum)
        torch.testing.assert_close(state.anchor, mean, atol=1e-6, rtol=1e-6)


@given(st.integers(300, 10_000), st.sampled_from([0.5, 1.0]), st.floats(0.01, 0.99))
def test_the_candidates_are_the_plain_mean_and_two_momenta(steps: int, rate: float, momentum: float) -> None:
    full, half = (Nesterov(rate, share * momentum_at(steps, momentum)) for share in (1.0, 0.5))
    assert candidates_at(steps, rate, momentum, measured=True) == (PLAIN_MEAN, half, full)
    assert candidates_at(steps, rate, momentum, measured=False) == (full,)


def test_equal_candidates_count_once() -> None:
    assert candidates_at(500, 1.0, 0.0, measured=True) == (PLAIN_MEAN,)
    assert candidates_at(500, 0.7, 0.0, measured=True) == (PLAIN_MEAN, Nesterov(0.7, 0.0))


def test_a_choice_is_due_640_sequences_after_the_last_one_and_holds_until_the_next() -> None:
    line = LineProgress().after(CertifiedWork(639))
    assert not line.needs_choice
    line = line.after(CertifiedWork(1))
    assert line.needs_choice
    line = line.after(CertifiedWork(100, choice=2))
    assert (line.choice, line.chosen_at, line.needs_choice) == (2, 640, False)
    later = line.after(CertifiedWork(539))
    assert (later.choice, later.needs_choice) == (2, False)
    assert later.after(CertifiedWork(1)).needs_choice
    assert later.after(CertifiedWork(1, choice=0)).choice == 0


@given(st.integers(0, 2**20), st.floats(0.1, 0.95))
@settings(max_examples=20, deadline=None)
def test_a_run_by_the_laws_equals_torch_sgd_with_their_rates(seed: int, target: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    state = fresh_outer_state(torch.randn(40, generator=generator))
    weights = torch.nn.Parameter(state.anchor.clone())
    oracle = torch.optim.SGD([weights], lr=1.0)
    steps = 0
    while steps < 600:
        gradient = 0.1 * torch.randn(40, generator=generator)
        step = candidates_at(steps, 0.9, target, measured=False)[-1]
        lr, momentum = step.learning_rate, step.momentum
        if momentum > 0 and oracle.param_groups[0]["momentum"] == 0:  # SGD keeps no velocity without momentum; we do
            oracle.state[weights]["momentum_buffer"] = state.velocity.clone()
        oracle.param_groups[0].update(lr=lr, momentum=momentum, nesterov=momentum > 0)
        state = nesterov_outer_step(state, gradient, lr, momentum)
        weights.grad = gradient.clone()
        oracle.step()
        steps += interval_at(steps, 100)
    torch.testing.assert_close(state.anchor, weights.detach(), atol=1e-4, rtol=1e-4)


def test_only_the_work_of_a_round_moves_the_line() -> None:
    state = fresh_outer_state(torch.zeros(3))
    after = nesterov_outer_step(state, torch.ones(3), 1.0, 0.0)
    assert after.line == LineProgress()
    assert after.line.after(CertifiedWork(8)).after(CertifiedWork(4)) == LineProgress(12)


def line_of(exchange_seconds: float, sequence_seconds: float, rounds: int = 6) -> LineProgress:
    work = CertifiedWork(8, duration_code(exchange_seconds), duration_code(sequence_seconds))
    line = LineProgress()
    for _ in range(rounds):
        line = line.after(work)
    return line


def test_durations_are_powers_of_five_quarters_of_a_millisecond() -> None:
    assert [duration_code(seconds) for seconds in (0.0, 0.001, 0.00125, 1.0, 1e9)] == [0, 0, 1, 31, 100]
    assert all(duration_code(0.001 * 1.25**code) == code for code in range(101))


def test_a_fast_line_leaves_the_law_alone() -> None:
    assert line_of(exchange_seconds=0.02, sequence_seconds=0.1).least_interval(4, 0.1, 3_600) == 1


@pytest.mark.parametrize(("exchange", "expected"), [(40.0, 410), (400.0, 3_600), (3_600.0, 3_600)])
def test_an_exchange_takes_a_tenth_of_the_time_or_a_round_the_longest_time(exchange: float, expected: int) -> None:
    """A step of a second. A line that carries one round in an hour has one round in the longest time."""
    found = line_of(exchange, sequence_seconds=0.25).least_interval(4, 0.1, 3_600)
    assert found == pytest.approx(expected, rel=0.25)  # two powers of 1.25 were rounded
    assert found >= 1


def test_one_certificate_says_nothing_of_the_line_and_six_are_kept() -> None:
    assert line_of(100.0, 1.0, rounds=1).least_interval(4, 0.1, 3_600) == 0
    line = line_of(100.0, 1.0, rounds=2)
    assert line.least_interval(4, 0.1, 3_600) > 100
    assert line.after(CertifiedWork(8, None, 3)).durations == line.durations  # a certificate without both
    for _ in range(6):
        line = line.after(CertifiedWork(8, duration_code(0.01), duration_code(1.0)))
    assert len(line.durations) == 6
    assert line.least_interval(4, 0.1, 3_600) == 1


def test_two_slow_rounds_of_six_do_not_change_the_interval() -> None:
    line = line_of(0.01, 1.0, rounds=4)
    for _ in range(2):
        line = line.after(CertifiedWork(8, duration_code(1_000.0), duration_code(1.0)))
    assert line.least_interval(4, 0.1, 3_600) == 1


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100), st.integers(1, 64))
def test_a_slower_line_never_has_a_shorter_interval(one: int, other: int, sequence: int, sequences: int) -> None:
    faster, slower = (
        LineProgress(0, ((exchange, sequence),) * 2).least_interval(sequences, 0.1, 3_600)
        for exchange in sorted((one, other))
    )
    assert 1 <= faster <= slower


@pytest.mark.parametrize("line", [LineProgress(), LineProgress(10**9, ((0, 100), (31, 4)), 2, 640), line_of(3.0, 0.2)])
def test_a_checkpoint_keeps_the_lines_progress(line: LineProgress) -> None:
    stored = json.loads(json.dumps(line_to_json(line)))
    assert line_from_json({"sequences": 3, **stored}) == line


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        {"line_sequences": -1},
        {"line_sequences": "4", "line_durations": [[1], "x", [1, 101], 7]},
        {"line_choice": 3, "line_chosen_at": 1.5},
    ],
)
def test_a_damaged_record_is_no_progress(damaged: object) -> None:
    assert line_from_json(damaged) == LineProgress()


def test_the_root_covers_every_part_of_the_progress() -> None:
    state = fresh_outer_state(torch.zeros(3))
    chosen = [LineProgress(0, (), choice, at) for choice, at in ((1, 0), (0, 640), (1, 640), (2, 640))]
    lines = [LineProgress(), LineProgress(1), LineProgress(0, ((1, 2),)), LineProgress(0, ((2, 1),)), *chosen]
    assert len({state_root(replace(state, line=line)) for line in lines}) == len(lines)
