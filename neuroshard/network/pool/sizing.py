"""How many connections to keep to a peer: a pure law over what was seen of them.

Under random loss a single connection collapses, because it takes every loss for a full line; several together do not.
Where the line is full indeed, more connections gain nothing and are unfair to others. So: when loss shows although no
queue builds up, more connections are tried; they stay if they carry clearly more, else they go, and the next trial is
later. Where the system tells neither loss nor queues, a trial takes their place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from neuroshard.network.pool.options import MOST_CONNECTIONS

GAIN = 1.3  # what a trial must gain
STEP = 4
HEAVY_LOSS = 3e-3  # here nothing but all connections will do
LOSS = 5e-5  # a full line shows less than this in the long run
LEAST_REPEATED = 2
FULL_QUEUE = 0.25  # round trips this much longer than the shortest one: the line is full, and loss is no surprise
MEASURE_SECONDS = 1.0
BLIND_MEASURE_SECONDS = 3.0  # before a trial, where nothing tells of loss
EVIDENCE_SECONDS = 30.0  # busy; then it is gathered anew, because lines change
FIRST_CALM_SECONDS = 30.0  # busy with a full line or without loss: perhaps fewer connections do as well
LONGEST_CALM_SECONDS = 900.0
FIRST_HOLD_SECONDS = 5.0
LONGEST_HOLD_SECONDS = 900.0
LONGEST_OPENING_SECONDS = 5.0
IDLE_SECONDS = 10.0
BYTES_FOR_A_CONNECTION = 256 * 1024  # less is not worth another one


@dataclass(frozen=True)
class Observation:
    """What was seen since the last look, and what is now."""

    now: float
    open_connections: int
    busy_seconds: float  # with data on its way
    bytes_arrived: float
    rtt_seconds: float | None = None
    segments: int | None = None  # None where the system does not tell
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
    last: Observation | None = None
    recent_seconds: float = 0.0  # at most MEASURE_SECONDS
    recent_bytes: float = 0.0
    rate: float = 0.0  # bytes a second while there were any on their way, in the last MEASURE_SECONDS
    tells_loss: bool = True
    queueing: float = 0.0  # lately
    trial: tuple[int, float] | None = None  # the number before, and bytes a second with it
    hold_until: float = 0.0  # before the next trial
    hold_seconds: float = FIRST_HOLD_SECONDS
    calm_seconds: float = FIRST_CALM_SECONDS  # before fewer are tried


def next_size(size: PoolSize, seen: Observation, most: int = MOST_CONNECTIONS) -> PoolSize:
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


def _opening(size: PoolSize, seen: Observation) -> PoolSize:
    """Wait until the connections are open and have found their speed."""
    is_opening = seen.open_connections < size.connections and seen.now - size.changed_at < LONGEST_OPENING_SECONDS
    if is_opening or not seen.open_connections:
        return size
    settled_at = seen.now + max(0.3, 6 * (seen.rtt_seconds or 0.1))
    if seen.open_connections >= size.connections:
        return replace(size, settled_at=settled_at)
    # the peer does not allow as many
    return replace(_withdrawn(size, seen.open_connections, seen.now), settled_at=settled_at)


def _with_evidence(size: PoolSize, seen: Observation) -> PoolSize:
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
    """The trial gained nothing: back, and the next one later; soon where the line was full, which tells little."""
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
