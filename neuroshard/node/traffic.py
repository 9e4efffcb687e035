"""Bytes to and from peers since the start and a second, from the counters of connections that come and go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from neuroshard.network import Connection
from neuroshard.types import NodeId

WINDOW_SECONDS = 10.0  # over which the rates are means


@dataclass(frozen=True)
class Traffic:
    """Totals in bytes, rates in bytes a second."""

    sent: int = 0
    received: int = 0
    sent_a_second: float = 0.0
    received_a_second: float = 0.0


class TrafficMeter:
    """Adds up what connections count, also of those that have ended."""

    def __init__(self) -> None:
        self._open: dict[tuple[NodeId, float], tuple[int, int]] = {}
        self._ended = (0, 0)
        self._points: deque[tuple[float, int, int]] = deque()  # time, sent, received

    def look(self, connections: Iterable[Connection], now: float) -> Traffic:
        """The traffic up to now; call it about once a second."""
        present = {(c.peer, c.since): (c.bytes_sent, c.bytes_received) for c in connections}
        for key, (sent, received) in self._open.items():
            if key not in present:
                self._ended = self._ended[0] + sent, self._ended[1] + received
        self._open = present
        sent = self._ended[0] + sum(counts[0] for counts in present.values())
        received = self._ended[1] + sum(counts[1] for counts in present.values())
        self._points.append((now, sent, received))
        while self._points[0][0] < now - WINDOW_SECONDS:
            self._points.popleft()
        first = self._points[0]
        seconds = max(now - first[0], 1e-9)
        if len(self._points) == 1:
            return Traffic(sent, received)
        return Traffic(sent, received, (sent - first[1]) / seconds, (received - first[2]) / seconds)
