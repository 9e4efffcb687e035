"""The law of redialling, without sockets or a clock."""

from __future__ import annotations

import pytest

from neuroshard.network.pool.link import (
    FIRST_PAUSE_SECONDS,
    FULL_PAUSE_SECONDS,
    LONGEST_PAUSE_SECONDS,
    REFUSED_SECONDS,
    Redialling,
)
from neuroshard.network.pool.options import ConnectionLostError, DialRefusedError, PeerFullError

RESUME_SECONDS = 30.0
CLOSED = DialRefusedError("Connection refused")
SILENT = ConnectionLostError("no answer in time")


def lost_at(now: float, *, has_listened: bool = True) -> Redialling:
    redialling = Redialling(RESUME_SECONDS)
    if has_listened:
        redialling.reached()
    redialling.left(now)
    return redialling


def hope_ends_at(redialling: Redialling, now: float, error: ConnectionLostError) -> float:
    """Every attempt ends like this."""
    while redialling.is_hopeful(now):
        redialling.failed(error, now)
        if redialling.is_hopeful(now):
            now = redialling.dial_after
    return now


def test_a_peer_that_never_was_here_is_not_hoped_for() -> None:
    assert not Redialling(RESUME_SECONDS).is_hopeful(0.0)


def test_a_closed_port_ends_hope_soon_but_not_at_the_first_attempt() -> None:
    redialling = lost_at(100.0)
    redialling.failed(CLOSED, 100.1)
    assert redialling.is_hopeful(100.1)
    assert 101.1 <= hope_ends_at(redialling, redialling.dial_after, CLOSED) <= 100.1 + REFUSED_SECONDS + 0.3


def test_silence_is_hoped_through() -> None:
    assert hope_ends_at(lost_at(100.0), 100.0, SILENT) >= 100.0 + RESUME_SECONDS


def test_a_port_that_never_was_open_tells_nothing() -> None:
    """Such as that of a peer behind a router, which may call again itself."""
    assert hope_ends_at(lost_at(100.0, has_listened=False), 100.0, CLOSED) >= 100.0 + RESUME_SECONDS


@pytest.mark.parametrize("between", [SILENT, PeerFullError("full")])
def test_only_a_port_that_stays_closed_counts(between: ConnectionLostError) -> None:
    redialling = lost_at(100.0)
    redialling.failed(CLOSED, 100.1)
    redialling.failed(between, 100.9)
    redialling.failed(CLOSED, 101.2)
    assert redialling.is_hopeful(101.2)


def test_a_connection_in_between_begins_the_count_anew() -> None:
    redialling = lost_at(100.0)
    redialling.failed(CLOSED, 100.1)
    redialling.left(101.0)
    redialling.failed(CLOSED, 101.2)
    assert redialling.is_hopeful(101.2)


def test_pauses_grow_with_rounds_not_with_connections() -> None:
    redialling = Redialling(RESUME_SECONDS)
    pauses: list[float] = []
    for _ in range(8):
        now = redialling.dial_after
        for _ in range(16):
            redialling.failed(SILENT, now)
        pauses.append(redialling.dial_after - now)
    assert pauses[:3] == pytest.approx([FIRST_PAUSE_SECONDS * 2**n for n in (1, 2, 3)])
    assert max(pauses) == pytest.approx(LONGEST_PAUSE_SECONDS)
    redialling.reached()
    redialling.failed(SILENT, 1000.0)
    assert redialling.dial_after == pytest.approx(1000.0 + 2 * FIRST_PAUSE_SECONDS)


def test_a_full_peer_is_left_alone_for_a_while() -> None:
    redialling = lost_at(100.0)
    redialling.failed(PeerFullError("full"), 100.1)
    assert redialling.dial_after == 100.1 + FULL_PAUSE_SECONDS
