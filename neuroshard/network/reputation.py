"""The one place where peers' scores change: every part that talks to peers reports to it and asks it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from neuroshard.network.scores import RULES, PeerScores, ScoreReason
from neuroshard.types import NodeId


class Reputation:
    """This node's opinion of its peers. Belongs to one event loop; `now` is any clock that only goes forward."""

    def __init__(self, now: Callable[[], float] = time.monotonic, scores: PeerScores | None = None) -> None:
        self._now = now
        self._scores = scores or PeerScores()
        self._counts: Counter[ScoreReason] = Counter()

    def report(self, peer: NodeId, reason: ScoreReason) -> None:
        """Count one event of a peer."""
        self._counts[reason] += 1
        self._scores = self._scores.report(peer, reason, self._now())

    def score(self, peer: NodeId) -> float:
        """0 is neutral; below it the peer misbehaved."""
        return self._scores.score(peer, self._now())

    def is_banned(self, peer: NodeId) -> bool:
        """Whether nothing of this peer is accepted now."""
        # asked for every message: most peers have no entry, and then the time does not matter
        return peer in self._scores.entries and self._scores.is_banned(peer, self._now())

    def banned_peers(self) -> tuple[NodeId, ...]:
        """All peers banned now."""
        return self._scores.banned(self._now())

    @property
    def scores(self) -> PeerScores:
        """All scores as a value."""
        return self._scores

    def refused(self) -> tuple[tuple[str, int], ...]:
        """Every reason that cost a peer something, and how often it was reported, for the status."""
        bad = ((reason, count) for reason, count in self._counts.items() if RULES[reason].weight < 0)
        return tuple(sorted((reason.value, count) for reason, count in bad))
