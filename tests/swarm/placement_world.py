"""A swarm that places itself: every node decides for itself, on news that reaches it late."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

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
