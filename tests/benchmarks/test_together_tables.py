"""The tables of `together`: all arms are trained once with each seed, and a table judges them by its own goals."""

from __future__ import annotations

import pytest

from benchmarks.laboratory import parameter_count
from benchmarks.record import Row
from benchmarks.together import (
    ALONE,
    LARGER,
    LARGEST,
    LONG,
    MAIN,
    SIXTEEN,
    SYNCHRONOUS,
    TABLES,
    TOGETHER,
    Found,
    Learnt,
    jobs,
    report,
)
from neuroshard.config.run_parameters import OuterOptimization


def found(name: str, apart: float, bits: float) -> Found:
    """Replicas that end this share above the synchronous machine."""
    table = TABLES[name]
    losses = {ALONE: 2.0, TOGETHER: 1.6 * (1 + apart), SYNCHRONOUS: 1.6}
    return {
        (arm.name, seed, steps): Learnt(
            losses.get(arm.name, 1.9), losses.get(arm.name, 1.9), 0.0, bits, 105 if arm.outer else 0
        )
        for arm in table.arms
        for seed in table.seeds
        for steps in table.steps
    }


def judged(name: str, apart: float, bits: float = 0.1) -> dict[str, Row]:
    return {row.item: row for row in report(name, found(name, apart, bits)).rows}


@pytest.mark.parametrize("name", TABLES)
def test_every_arm_is_trained_once_with_each_seed(name: str) -> None:
    table, trainings = TABLES[name], jobs(name)
    trained = [(arm.name, one.seed, one.steps) for one in trainings for arm in one.arms]
    assert sorted(trained) == sorted(found(name, 0, 0))
    assert set(table.rates) == {arm.name for arm in table.arms}


@pytest.mark.parametrize("name", [SIXTEEN, LONG, LARGER, LARGEST])
def test_a_table_has_the_default_of_a_run_against_the_data_of_all(name: str) -> None:
    alone, together, synchronous = TABLES[name].arms
    assert together.outer == OuterOptimization()
    assert (alone.replicas, synchronous.replicas) == (1, 1)
    assert synchronous.data_of == together.replicas == (16 if name == SIXTEEN else 4)


@pytest.mark.parametrize(("name", "goal"), [(MAIN, 0.01), (SIXTEEN, 0.03), (LONG, 0.015), (LARGER, 0.015)])
def test_a_table_judges_by_its_own_goal(name: str, goal: float) -> None:
    (steps, *_), places = TABLES[name].steps, ("held out", "unseen text")
    items = [f"{steps:,} steps, {TOGETHER}, against {SYNCHRONOUS}, {place}" for place in places]
    assert all(judged(name, goal - 0.001)[item].met for item in items)
    assert not any(judged(name, goal + 0.001)[item].met for item in items)


def test_the_long_table_limits_the_bits() -> None:
    item = f"20,000 steps, {TOGETHER}: bits per parameter and step"
    assert judged(LONG, 0, 0.129)[item].met
    assert not judged(LONG, 0, 0.131)[item].met


def test_one_seed_has_no_interval() -> None:
    item = f"{TOGETHER}, against {SYNCHRONOUS}, held out"
    assert judged(LONG, 0.02)[f"20,000 steps, {item}"].figure == "+2.0%"
    assert judged(SIXTEEN, 0.02)[f"4,000 steps, {item}"].figure == "+2.0% ± 0.0%"


def test_larger_tables_have_the_parameters_that_they_are_named_after() -> None:
    assert parameter_count(TABLES[LARGER].shape) == pytest.approx(1.3e6, rel=0.02)
    assert parameter_count(TABLES[LARGEST].shape) == pytest.approx(5e6, rel=0.02)
