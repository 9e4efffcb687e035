"""The limit on joins from one network, so that one line cannot fill the queue with free names. Pure."""

from __future__ import annotations

from collections import deque

from neuroshard.network.crowds import WIDE_SHARE, network_of, wide_network_of
from neuroshard.types import is_loopback

MOST_JOINS = 10  # of a /24 or /64 in JOIN_SECONDS; a /16 or /48 has WIDE_SHARE times as many
JOIN_SECONDS = 60.0
MOST_NETWORKS = 8192  # of each size


class JoinRate:
    """Counts the joins of each network, and of the wide network around it, in the last minute."""

    def __init__(self) -> None:
        self._narrow: dict[str, deque[float]] = {}
        self._wide: dict[str, deque[float]] = {}

    def wait(self, host: str, now: float, *, is_forwarded: bool = False) -> float:
        """Count a join; return the seconds to wait if there were too many, otherwise 0. Monotonic `now`.

        Programs on this computer have no limit. A request that a proxy forwarded is not from this computer.
        """
        if is_loopback(host) and not is_forwarded:
            return 0.0
        joins = _recent(self._narrow, network_of(host), now), _recent(self._wide, wide_network_of(host), now)
        waits = [
            each[0] + JOIN_SECONDS - now
            for each, most in zip(joins, (MOST_JOINS, WIDE_SHARE * MOST_JOINS), strict=True)
            if len(each) >= most
        ]
        if waits:
            return max(waits)
        for each in joins:
            each.append(now)
        return 0.0


def _recent(networks: dict[str, deque[float]], network: str, now: float) -> deque[float]:
    joins = networks.pop(network, deque[float]())
    while joins and joins[0] <= now - JOIN_SECONDS:
        joins.popleft()
    if len(networks) >= MOST_NETWORKS:
        del networks[next(iter(networks))]  # the network that was silent for longest
    networks[network] = joins
    return joins
