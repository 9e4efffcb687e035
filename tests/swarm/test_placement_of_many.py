from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_world import TIMES, World

QUIET_SECONDS = 600
EVENTS = ("join", "join", "leave", "wait", "lose a stage")


def happen(world: World, event: str, capacities: int, most: int) -> None:
    match event:
        case "join":
            if len(world.nodes) < most:
                world.join(world.random.randint(1, capacities))
        case "leave":
            if world.nodes:
                world.leave_at_random()
        case "lose a stage":
            stage = world.random.randrange(world.stage_count)
            for node_id in [n for n, node in world.nodes.items() if stage in node.holder.stages]:
                world.leave(node_id)
        case _:
            world.tick()


def fill_up(world: World, capacities: int) -> None:
    while len(world.nodes) < world.stage_count:
        world.join(world.random.randint(1, capacities))


def check(world: World) -> None:
    """After the last event nothing is empty, and it took few moves to come there, which then end."""
    moves = world.rest(QUIET_SECONDS)
    assert world.truth.missing == ()
    assert moves <= 2 * len(world.nodes)
    for _ in range(30):
        world.tick()
    assert len(world.moves) == len([when for when, _ in world.moves if when <= world.now - 30])


@settings(max_examples=50, deadline=None)
@given(
    events=st.lists(st.sampled_from(EVENTS), min_size=20, max_size=60),
    stage_count=st.integers(1, 7),
    seed=st.integers(0, 10**6),
)
def test_no_stage_is_empty_after_joins_and_leaves_in_any_order(events: list[str], stage_count: int, seed: int) -> None:
    world = World(stage_count, Random(seed))
    for event in events:
        happen(world, event, 1, 25)
    fill_up(world, 1)
    check(world)


@settings(max_examples=50, deadline=None)
@given(
    events=st.lists(st.sampled_from(EVENTS), min_size=20, max_size=60),
    stage_count=st.integers(2, 9),
    seed=st.integers(0, 10**6),
)
def test_nodes_that_hold_several_stages_arrange_themselves(events: list[str], stage_count: int, seed: int) -> None:
    world = World(stage_count, Random(seed))
    for event in events:
        happen(world, event, 4, 15)
    fill_up(world, 4)
    check(world)


@settings(max_examples=50, deadline=None)
@given(
    events=st.lists(st.sampled_from(EVENTS), min_size=20, max_size=60),
    wallets=st.integers(3, 9),
    seed=st.integers(0, 10**6),
)
def test_nodes_of_one_wallet_end_on_different_stages(events: list[str], wallets: int, seed: int) -> None:
    world = World(4, Random(seed), wallets)
    for event in events:
        happen(world, event, 1, 20)
    fill_up(world, 1)
    check(world)
    nodes = Counter(node.holder.wallet_id for node in world.nodes.values())
    assert {wallet for wallet, _ in world.crowded_wallets()} <= {w for w, n in nodes.items() if n > 4}


def test_two_hundred_nodes_place_themselves_and_stay() -> None:
    world = World(6, Random(1), look_chance=0.2)
    for _ in range(200):
        world.join()  # which knows little of those that came just before
        if world.random.random() < 0.05:
            world.tick()
    for _ in range(100):
        world.leave_at_random()
    happen(world, "lose a stage", 1, 200)
    nodes = len(world.nodes)
    assert world.truth.empty != ()
    assert world.rest(QUIET_SECONDS) <= nodes // 2
    assert world.truth.missing == ()
    assert max(world.truth.replicas) <= 2 * min(world.truth.replicas)


@pytest.mark.parametrize("seed", range(5))
def test_the_next_one_goes_when_the_first_one_cannot(seed: int) -> None:
    world = World(2, Random(seed))
    nodes = [world.join(is_stubborn=True) for _ in range(4)]
    helpful = [world.join() for _ in range(2)]
    world.rest(100)
    for node_id in [n for n in nodes if world.nodes[n].holder.stages.start == 1]:
        world.leave(node_id)
    for node_id in [n for n in helpful if world.nodes[n].holder.stages.start == 1]:
        world.leave(node_id)
        world.join()
    lost_at = world.now
    while world.truth.empty:
        world.tick()
        assert world.now < lost_at + 10 * TIMES.turn_seconds
    assert Counter(world.truth.replicas)[0] == 0
