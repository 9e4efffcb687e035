""""""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuroshard.membership.stage_coverage import StageCoverage, StageHolder
from neuroshard.placement.relocation import Move, PendingRelocation, RelocationTiming, planned_moves, should_move
from neuroshard.placement.stage_choice import choose_stages, equal_windows
from neuroshard.types import NodeId, RunId, WalletId

RUN = RunId("ab" * 32)
LATEST_NEWS_SECONDS = 3
READY_AFTER_SECONDS = 4  # a newcomer or a node that moved has fetched its weights
TIMES = RelocationTiming(settle_seconds=4.0, calm_seconds=10.0, turn_seconds=8.0)


@dataclass
class Inhabitant:
    """A node, what it knows, and how far in the news it is."""

    holder: StageHolder
    ready_at: float
    known: dict[NodeId, StageHolder] = field(default_factory=dict[NodeId, StageHolder])
    heard: int = 0
    unrest: PendingRelocation = field(default_factory=PendingRelocation)
    is_stubborn: bool = False  # never moves, although others think it would

    def coverage(self, stage_count: int) -> StageCoverage:
        return StageCoverage.of(RUN, stage_count, (*self.known.values(), self.holder))


class World:
    """The truth, and the news about it in the order in which they happened."""

    def __init__(self, stage_count: int, random: Random, wallets: int = 1000, look_chance: float = 0.5) -> None:
        self.stage_count = stage_count
        self.random = random
        self.wallets = wallets
        self.look_chance = look_chance  # in a second
        self.now = 0.0
        self.nodes: dict[NodeId, Inhabitant] = {}
        self.news: list[tuple[float, NodeId, StageHolder | None]] = []
        self.moves: list[tuple[float, Move]] = []
        self._born = 0

    @property
    def truth(self) -> StageCoverage:
        return StageCoverage.of(RUN, self.stage_count, [node.holder for node in self.nodes.values()])

    def join(self, capacity: int = 1, *, is_stubborn: bool = False) -> NodeId:
        """A newcomer, which may know nothing of what happened in the last seconds."""
        node_id = NodeId(f"node {self._born}")
        wallet_id = WalletId(f"wallet {self._born % self.wallets}")
        self._born += 1
        windows = equal_windows(self.stage_count, capacity)
        place = choose_stages(node_id, wallet_id, windows, StageCoverage.of(RUN, self.stage_count, []))
        assert place is not None
        node = Inhabitant(StageHolder(node_id, wallet_id, place, is_ready=False), self.now + READY_AFTER_SECONDS)
        node.is_stubborn = is_stubborn
        self._hear(node_id, node)
        place = choose_stages(node_id, wallet_id, windows, node.coverage(self.stage_count))
        assert place is not None
        self.nodes[node_id] = node
        self._place(node, replace(node.holder, stages=place))
        return node_id

    def leave(self, node_id: NodeId) -> None:
        del self.nodes[node_id]
        self.news.append((self.now, node_id, None))

    def leave_at_random(self) -> None:
        self.leave(self.random.choice(list(self.nodes)))

    def tick(self) -> None:
        """One second, in which everybody hears some news and some look."""
        self.now += 1
        for node_id in self.random.sample(list(self.nodes), len(self.nodes)):
            node = self.nodes[node_id]
            if not node.holder.is_ready and self.now >= node.ready_at:
                self._place(node, replace(node.holder, is_ready=True))
            self._hear(node_id, node)
            if self.random.random() >= self.look_chance:
                continue
            node.unrest = node.unrest.seen(node.coverage(self.stage_count), self.now)
            move = should_move(node_id, node.unrest, self.now, TIMES)
            if move is not None and not node.is_stubborn:
                self.moves.append((self.now, move))
                node.ready_at = self.now + READY_AFTER_SECONDS
                self._place(node, replace(node.holder, stages=move.stages, is_ready=False))

    def rest(self, most_seconds: int) -> int:
        """Let time pass until nobody has a reason to move; how many moves that took. Fails when it never ends."""
        before = len(self.moves)
        for _ in range(most_seconds):
            self.tick()
            is_known = all(node.heard == len(self.news) for node in self.nodes.values())
            is_ready = all(node.holder.is_ready for node in self.nodes.values())
            if is_known and is_ready and not planned_moves(self.truth):
                return len(self.moves) - before
        raise AssertionError(f"still moving after {most_seconds} s: {self.truth.replicas}, {self.moves[-5:]}")

    def crowded_wallets(self) -> dict[tuple[WalletId, int], int]:
        """Stages that several nodes of one wallet hold."""
        counts = Counter((node.holder.wallet_id, s) for node in self.nodes.values() for s in node.holder.stages)
        return {key: count for key, count in counts.items() if count > 1}

    def _place(self, node: Inhabitant, holder: StageHolder) -> None:
        node.holder = holder
        self.news.append((self.now, holder.node_id, holder))

    def _hear(self, node_id: NodeId, node: Inhabitant) -> None:
        """A random part of the news that it has not heard, but all that are old."""
        most = node.heard + self.random.randint(0, 1 + (len(self.news) - node.heard))
        while node.heard < len(self.news):
            happened_at, about, holder = self.news[node.heard]
            if node.heard >= most and happened_at > self.now - LATEST_NEWS_SECONDS:
                return
            node.heard += 1
            if about == node_id:
                continue
            if holder is None:
                node.known.pop(about, None)
            else:
                node.known[about] = holder


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
