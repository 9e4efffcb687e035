"""The limit on joins from one network, so that one line cannot fill the queue with free names. Pure."""

from __future__ import annotations

from collections import deque

from neuroshard.network.crowds import network_of
from neuroshard.runs.organiser_client import is_this_computer

MOST_JOINS = 10  # per network in JOIN_SECONDS
JOIN_SECONDS = 60.0
MOST_NETWORKS = 8192


class JoinRate:
    """Counts the joins of each network in the last minute."""

    def __init__(self) -> None:
        self._joins: dict[str, deque[float]] = {}

    def wait(self, host: str, now: float) -> float:
        """Count a join; return the seconds to wait if there were too many, otherwise 0. This computer has no limit."""
        if is_this_computer(host):
            return 0.0
        network = network_of(host)
        joins = self._joins.pop(network, deque[float]())
        while joins and joins[0] <= now - JOIN_SECONDS:
            joins.popleft()
        if len(self._joins) >= MOST_NETWORKS:
            del self._joins[next(iter(self._joins))]  # the network that was silent for longest
        self._joins[network] = joins
        if len(joins) >= MOST_JOINS:
            return joins[0] + JOIN_SECONDS - now
        joins.append(now)
        return 0.0
