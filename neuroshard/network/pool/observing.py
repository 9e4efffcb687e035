"""Looks at the connections to one peer and gives the law of sizes what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neuroshard.network.pool.connection import Connection
from neuroshard.network.pool.sizing import Observation
from neuroshard.network.pool.tcp import TcpInfo, tcp_info


@dataclass(frozen=True)
class _Look:
    at: float
    bytes_sent: int
    info: TcpInfo | None


class Observer:
    """Remembers the last look at each connection."""

    def __init__(self) -> None:
        self._last: dict[int, _Look] = {}
        self._looked_at: float | None = None
        self.rtt_seconds: float | None = None

    def look(self, connections: Sequence[Connection], now: float) -> Observation:
        """What happened since the last look."""
        looks = {c.number: _Look(now, c.bytes_sent, tcp_info(c.stream.socket)) for c in connections}
        pairs = [(self._last.get(number), look) for number, look in looks.items()]
        elapsed = now - self._looked_at if self._looked_at is not None else 0.0
        self._last, self._looked_at = looks, now
        told = [(last.info if last else None, look.info) for last, look in pairs if look.info is not None]
        if not told or len(told) < len(pairs):
            sent = sum(look.bytes_sent - (last.bytes_sent if last else 0) for last, look in pairs)
            return Observation(now, len(connections), elapsed, sent)
        none = TcpInfo(0, 0, 0, 0.0, 0.0, 0.0)
        return self._told_by_system(now, [(last or none, info) for last, info in told])

    def _told_by_system(self, now: float, changes: list[tuple[TcpInfo, TcpInfo]]) -> Observation:
        least = min(info.least_rtt_seconds for _, info in changes)
        busiest = max(changes, key=lambda pair: pair[1].bytes_acknowledged - pair[0].bytes_acknowledged)[1]
        self.rtt_seconds = busiest.rtt_seconds
        return Observation(
            now=now,
            open_connections=len(changes),
            busy_seconds=max(info.busy_seconds - last.busy_seconds for last, info in changes),
            bytes_arrived=sum(info.bytes_acknowledged - last.bytes_acknowledged for last, info in changes),
            rtt_seconds=busiest.rtt_seconds,
            segments=sum(info.segments_sent - last.segments_sent for last, info in changes),
            repeated=sum(info.segments_repeated - last.segments_repeated for last, info in changes),
            queueing=busiest.rtt_seconds / least - 1 if least > 0 else None,
        )
