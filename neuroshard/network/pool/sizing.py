"""The number of connections to one peer: measurements of the line, and a pure rule that follows from them.

Under random loss a single connection collapses, because it takes every loss for a full line; several together do not.
On a line that really is full, more connections gain nothing and are unfair to other traffic. Therefore the rule tries
more connections when loss appears although no queue builds up. It keeps them if they carry clearly more; otherwise it
removes them and waits longer before the next trial. On systems that report neither loss nor queues, a trial replaces
these measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from neuroshard.network.pool.connection import PoolConnection
from neuroshard.network.pool.options import MOST_CONNECTIONS
from neuroshard.network.tcp_options import TcpInfo

GAIN = 1.3  # what a trial must gain
STEP = 4
HEAVY_LOSS = 3e-3  # here nothing but all connections will do
LOSS = 5e-5  # a full line shows less than this in the long run
LEAST_REPEATED = 2
FULL_QUEUE = 0.25  # round trips this much longer than the shortest one: the line is full, and loss is expected
MEASURE_SECONDS = 1.0
BLIND_MEASURE_SECONDS = 3.0  # before a trial, where the system does not report loss
EVIDENCE_SECONDS = 30.0  # busy; then it is collected again, because lines change
FIRST_CALM_SECONDS = 30.0  # busy with a full line or without loss: perhaps fewer connections do as well
LONGEST_CALM_SECONDS = 900.0
FIRST_HOLD_SECONDS = 5.0
LONGEST_HOLD_SECONDS = 900.0
LONGEST_OPENING_SECONDS = 5.0
IDLE_SECONDS = 10.0
BYTES_FOR_A_CONNECTION = 256 * 1024  # less is not worth another one


@dataclass(frozen=True)
class LineObservation:
    """Measurements since the last look, and the present state."""

    now: float
    open_connections: int
    busy_seconds: float  # with data on its way
    bytes_arrived: float
    rtt_seconds: float | None = None
    segments: int | None = None  # None where the system does not report it
    repeated: int = 0  # of these segments
    queueing: float | None = None  # round trip / shortest round trip - 1


@dataclass(frozen=True)
class PoolSize:
    """How many connections are right while there is much to send, and the evidence so far."""

    connections: int = 1
    changed_at: float = 0.0  # when the number was decided
    settled_at: float | None = None  # when all of them were open and had found their speed
    busy_seconds: float = 0.0  # since then
    seconds: float = 0.0  # of evidence, like all that follows
    segments: int = 0
    repeated: int = 0
    queueless_segments: int = 0  # of these, sent while no queue was there, neither before nor after
    queueless_repeated: int = 0
    last: LineObservation | None = None
    recent_seconds: float = 0.0  # at most MEASURE_SECONDS
    recent_bytes: float = 0.0
    rate: float = 0.0  # bytes per second while there were any on their way, in the last MEASURE_SECONDS
    tells_loss: bool = True
    queueing: float = 0.0  # lately
    trial: tuple[int, float] | None = None  # the number before, and bytes per second with it
    hold_until: float = 0.0  # before the next trial
    hold_seconds: float = FIRST_HOLD_SECONDS
    calm_seconds: float = FIRST_CALM_SECONDS  # before fewer are tried


def next_size(size: PoolSize, seen: LineObservation, most: int = MOST_CONNECTIONS) -> PoolSize:
    """The law: at most `most` connections, at least 1."""
    if size.settled_at is None:
        return _opening(size, seen)
    if seen.now < size.settled_at:
        return size
    size = _with_evidence(size, seen)
    if size.recent_seconds < MEASURE_SECONDS:
        return size
    rate = size.recent_bytes / size.recent_seconds
    return _decided(replace(size, rate=rate, recent_bytes=0.0, recent_seconds=0.0), seen.now, most)


def _decided(size: PoolSize, now: float, most: int) -> PoolSize:
    if size.trial is not None:
        if size.rate < GAIN * size.trial[1]:
            return _withdrawn(size, size.trial[0], now)
        calm_seconds = min(2 * size.calm_seconds, LONGEST_CALM_SECONDS)
        size = replace(size, trial=None, hold_seconds=FIRST_HOLD_SECONDS, calm_seconds=calm_seconds)
    if size.connections < most and now >= size.hold_until and _asks_for_more(size):
        is_heavy = size.tells_loss and size.queueless_repeated >= HEAVY_LOSS * size.queueless_segments
        more = most if is_heavy else min(most, STEP * size.connections)
        return replace(_changed(size, more, now), trial=(size.connections, size.rate))
    if size.seconds < EVIDENCE_SECONDS:
        return size
    if size.connections > 1 and size.busy_seconds >= size.calm_seconds and _may_do_with_fewer(size):
        return _changed(size, size.connections // STEP or 1, now)
    return replace(size, seconds=0.0, segments=0, repeated=0, queueless_segments=0, queueless_repeated=0)


def wanted_connections(size: PoolSize, idle_seconds: float, bytes_waiting: int, idle_limit: float) -> int:
    """How many connections to have now: none when idle for long, one when idle, and none that would have no work."""
    if idle_seconds >= idle_limit:
        return 0
    if idle_seconds >= IDLE_SECONDS:
        return 1
    return max(1, min(size.connections, bytes_waiting // BYTES_FOR_A_CONNECTION))


def _opening(size: PoolSize, seen: LineObservation) -> PoolSize:
    """Wait until the connections are open and have found their speed."""
    is_opening = seen.open_connections < size.connections and seen.now - size.changed_at < LONGEST_OPENING_SECONDS
    if is_opening or not seen.open_connections:
        return size
    settled_at = seen.now + max(0.3, 6 * (seen.rtt_seconds or 0.1))
    if seen.open_connections >= size.connections:
        return replace(size, settled_at=settled_at)
    # the peer does not allow as many
    return replace(_withdrawn(size, seen.open_connections, seen.now), settled_at=settled_at)


def _with_evidence(size: PoolSize, seen: LineObservation) -> PoolSize:
    last = size.last
    is_queueless = last is not None and max(last.queueing or 0.0, seen.queueing or 0.0) < FULL_QUEUE
    return replace(
        size,
        last=seen,
        busy_seconds=size.busy_seconds + seen.busy_seconds,
        recent_bytes=size.recent_bytes + seen.bytes_arrived,
        recent_seconds=size.recent_seconds + seen.busy_seconds,
        seconds=size.seconds + seen.busy_seconds,
        segments=size.segments + (seen.segments or 0),
        repeated=size.repeated + seen.repeated,
        queueless_segments=size.queueless_segments + (last.segments or 0 if last and is_queueless else 0),
        queueless_repeated=size.queueless_repeated + (last.repeated if last and is_queueless else 0),
        tells_loss=seen.segments is not None,
        queueing=(size.queueing + (seen.queueing or 0.0)) / 2 if size.seconds else seen.queueing or 0.0,
    )


def _asks_for_more(size: PoolSize) -> bool:
    if not size.tells_loss:
        return size.seconds >= BLIND_MEASURE_SECONDS
    least = max(LEAST_REPEATED, LOSS * size.queueless_segments)
    return size.queueless_repeated >= least and size.queueing < FULL_QUEUE


def _may_do_with_fewer(size: PoolSize) -> bool:
    return size.tells_loss and (size.queueing >= FULL_QUEUE or size.repeated < LOSS * size.segments)


def _withdrawn(size: PoolSize, connections: int, now: float) -> PoolSize:
    """End a trial that gained nothing. The next one comes later, or soon where the line was full and proved little."""
    is_full = size.queueing >= FULL_QUEUE
    longer = size.hold_seconds if is_full else min(2 * size.hold_seconds, LONGEST_HOLD_SECONDS)
    return replace(_changed(size, connections, now), hold_until=now + size.hold_seconds, hold_seconds=longer)


def _changed(size: PoolSize, connections: int, now: float) -> PoolSize:
    return PoolSize(
        connections,
        changed_at=now,
        tells_loss=size.tells_loss,
        hold_until=size.hold_until,
        hold_seconds=size.hold_seconds,
        calm_seconds=size.calm_seconds,
    )


@dataclass(frozen=True)
class _Look:
    at: float
    bytes_sent: int
    info: TcpInfo | None


class LineMonitor:
    """Remembers the last look at each connection."""

    def __init__(self) -> None:
        self._last: dict[int, _Look] = {}
        self._looked_at: float | None = None
        self.rtt_seconds: float | None = None

    def look(self, connections: Sequence[PoolConnection], now: float) -> LineObservation:
        """Measure what happened since the last look."""
        looks = {c.number: _Look(now, c.bytes_sent, c.stream.tcp_info()) for c in connections}
        pairs = [(self._last.get(number), look) for number, look in looks.items()]
        elapsed = now - self._looked_at if self._looked_at is not None else 0.0
        self._last, self._looked_at = looks, now
        measured = [(last.info if last else None, look.info) for last, look in pairs if look.info is not None]
        if not measured or len(measured) < len(pairs):
            sent = sum(look.bytes_sent - (last.bytes_sent if last else 0) for last, look in pairs)
            return LineObservation(now, len(connections), elapsed, sent)
        none = TcpInfo(0, 0, 0, 0.0, 0.0, 0.0)
        return self._from_system(now, [(last or none, info) for last, info in measured])

    def _from_system(self, now: float, changes: list[tuple[TcpInfo, TcpInfo]]) -> LineObservation:
        least = min(info.least_rtt_seconds for _, info in changes)
        busiest = max(changes, key=lambda pair: pair[1].bytes_acknowledged - pair[0].bytes_acknowledged)[1]
        self.rtt_seconds = busiest.rtt_seconds
        return LineObservation(
            now=now,
            open_connections=len(changes),
            busy_seconds=max(info.busy_seconds - last.busy_seconds for last, info in changes),
            bytes_arrived=sum(info.bytes_acknowledged - last.bytes_acknowledged for last, info in changes),
            rtt_seconds=busiest.rtt_seconds,
            segments=sum(info.segments_sent - last.segments_sent for last, info in changes),
            repeated=sum(info.segments_repeated - last.segments_repeated for last, info in changes),
            queueing=busiest.rtt_seconds / least - 1 if least > 0 else None,
        )
