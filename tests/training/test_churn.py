"""Twenty rounds in which a third of the nodes die, each time at another moment, and others join, sleep and err."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import anyio
import pytest

from neuroshard.config.run_parameters import OuterOptimization
from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS
from neuroshard.network import InMemoryNetwork
from tests.worlds.churn import CLOCK_SECONDS, ROUND_SECONDS, ChurnMachine, Coming, RoundPlan, churn_plan
from tests.worlds.replicas import EVERYBODY, OUTER, play

ROUNDS, MEMBERS, SHARE = 20, 7, 0.3
CALM = RoundPlan((), (), (), 0)


@pytest.fixture
def schedule(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets a seed decide, too, which of the tasks that may run runs first, as pytest-trio does."""

    def by_seed(seed: int) -> None:
        monkeypatch.setattr("trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING", True)
        monkeypatch.setattr("trio._core._run._r", Random(f"schedule {seed}"))

    return by_seed


def test_a_plan_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    plans = [churn_plan(seed, ROUNDS, MEMBERS, SHARE, ROUND_SECONDS) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


def test_a_run_is_played_again_by_its_seed(schedule: Callable[[int], None]) -> None:
    played = list[list[str]]()
    for seed in (3, 3, 4):
        schedule(seed)
        played.append(played_events(seed, rounds=1))
    assert played[0] == played[1] != played[2]


def played_events(seed: int, rounds: int) -> list[str]:
    events = list[str]()

    async def scenario(network: InMemoryNetwork) -> None:
        machine = ChurnMachine(network, seed, MEMBERS)
        await machine.run(churn_plan(seed, rounds, MEMBERS, SHARE, ROUND_SECONDS))
        events.extend(machine.events)

    play(scenario)
    return events


# docs/ROUNDS.md tells what other seeds came to
@pytest.mark.parametrize(
    ("seed", "outer"), [(1, OUTER), pytest.param(2, replace(OUTER, strategy="sparta"), marks=pytest.mark.long)]
)
def test_under_churn_rounds_go_on_and_no_step_ends_in_two_ways(
    seed: int, outer: OuterOptimization, schedule: Callable[[int], None]
) -> None:
    async def scenario(network: InMemoryNetwork) -> None:
        machine = ChurnMachine(network, seed, MEMBERS, outer)
        await machine.run(churn_plan(seed, ROUNDS, MEMBERS, SHARE, ROUND_SECONDS))
        told = "\n".join((f"seed {seed}, given up: {dict(machine.given_up)}", *machine.events))
        split = {step: roots for step, roots in machine.roots.items() if len(roots) > 1}
        assert not split, told
        assert machine.newest().state.outer_step >= ROUNDS, told
        assert machine.completed_share >= 0.8, told
        assert machine.in_time_share >= 0.8, told
        assert len({one.replica_status().line for one in machine.live.values()}) == 1, told
        assert machine.deaths >= ROUNDS, told
        assert machine.sleeps >= ROUNDS // 4, told
        assert machine.wrong_clocks > 0, told

    schedule(seed)
    play(scenario)


def test_whose_clock_is_wrong_is_in_no_round_until_it_is_right() -> None:
    """The others go on without it, and it comes after them."""
    late = RoundPlan((), (Coming(returns=False, clock_ahead=2 * MAX_CLOCK_SKEW_SECONDS),), (), 0)

    async def scenario(network: InMemoryNetwork) -> None:
        machine = ChurnMachine(network, 1, MEMBERS)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(machine.run, (CALM, late, *[CALM] * 16))
            await anyio.sleep(CLOCK_SECONDS)
            comer = machine.live[EVERYBODY[MEMBERS]]
            assert comer.clock_ahead > 0
            assert comer.steps > 0
            assert comer.entered == []
            assert comer.state.outer_step == 1
            assert machine.newest().state.outer_step > 3
        assert comer.entered
        assert len({one.replica_status().line for one in machine.live.values()}) == 1

    play(scenario)
