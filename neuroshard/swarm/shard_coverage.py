"""How many shards of the data somebody has trained on: it follows from everybody's assignment and count."""

from __future__ import annotations

from collections.abc import Iterable

from neuroshard.data.assignment import Assignment, held_out_count
from neuroshard.swarm.global_view import GlobalView
from neuroshard.types import NodeId, RunId

MAX_KNOWN_RANKS = 32_768


def covered_places(stretches: Iterable[tuple[int, int]], length: int) -> int:
    """Size of the union of stretches (first place, how many places) on a ring of `length` places."""
    pieces: list[tuple[int, int]] = []
    for first, count in stretches:
        stop = first + min(count, length)
        pieces.append((first, min(stop, length)))
        pieces.append((0, stop - length))
    covered = reached = 0
    for start, stop in sorted(pieces):
        covered += max(0, stop - max(start, reached))
        reached = max(reached, stop)
    return covered


class ShardCoverage:
    """Counts covered shards of one run; remembers where each node began, which costs some hashing to find out."""

    def __init__(self, run_id: RunId, total_shards: int) -> None:
        self._run_id = run_id
        self._total_shards = total_shards
        self._ranks: dict[NodeId, int] = {}

    def covered(self, view: GlobalView) -> int:
        """Distinct shards that nodes, also those that left, have trained on, by their own word."""
        counts = {node: best.shards for node, best in view.departed.items()}
        counts |= {node: member.best.shards for node, member in view.members.items()}
        length = self._total_shards - held_out_count(self._total_shards)
        return covered_places(((self._rank(node), count) for node, count in counts.items() if count), length)

    def _rank(self, node_id: NodeId) -> int:
        if node_id not in self._ranks:
            if len(self._ranks) >= MAX_KNOWN_RANKS:
                self._ranks.clear()
            self._ranks[node_id] = Assignment(self._run_id, node_id, self._total_shards).first_rank
        return self._ranks[node_id]
