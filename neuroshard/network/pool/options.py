"""Options, errors and traffic counters of the pool."""

from __future__ import annotations

from dataclasses import dataclass

from neuroshard.network.reputation import ScoreReason
from neuroshard.network.transport import PeerUnreachableError

MOST_CONNECTIONS = 16  # to one peer


@dataclass(frozen=True)
class PoolOptions:
    """Times in seconds."""

    fixed_connections: int | None = None  # to each peer, instead of as many as the line needs
    max_connections_per_peer: int = MOST_CONNECTIONS
    max_connections: int = 512  # that peers opened; networks share them as `crowds.py` describes
    max_transfers_per_peer: int = 32  # requests that come in, are answered or wait for memory
    handshake_seconds: float = 10.0
    grace_seconds: float = 20.0  # what any packet may take, however small
    min_bytes_per_second: float = 8 * 1024  # what a peer must reach while it sends
    idle_seconds: float = 60.0
    answer_seconds: float = 120.0  # how long an answer is kept of which the peer takes nothing
    resume_seconds: float = 30.0  # how long half a transfer is kept for a peer that is gone

    def __post_init__(self) -> None:
        if not 1 <= self.max_connections_per_peer <= self.max_connections:
            raise ValueError("a pool needs 1 <= max_connections_per_peer <= max_connections")
        if self.fixed_connections is not None and not 1 <= self.fixed_connections <= self.max_connections_per_peer:
            raise ValueError("fixed_connections must be in [1, max_connections_per_peer]")

    def seconds_for(self, byte_count: int) -> float:
        """Longest time that `byte_count` bytes may take."""
        return self.grace_seconds + byte_count / self.min_bytes_per_second


class NotDeliveredError(PeerUnreachableError):
    """The peer cannot be reached and never got the whole request: it may be asked again, or in another way."""


class ConnectionLostError(Exception):
    """The connection broke or was closed; what it carried goes over another one."""


class DialRefusedError(ConnectionLostError):
    """The computer is there and answers at once that nobody listens at this port."""


class PeerFullError(ConnectionLostError):
    """The peer accepts no more connections now."""


class MisconductError(ConnectionLostError):
    """The peer did what no honest peer does, or was too slow: it is reported for this reason and cut off."""

    def __init__(self, reason: ScoreReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class PeerTraffic:
    """Bytes since this node knows the peer, framing included, TLS and TCP not; connections that are open now."""

    bytes_sent: int = 0
    bytes_received: int = 0
    connections: int = 0
    rtt_seconds: float | None = None  # None where the system does not report it
    bytes_arrived: int = 0  # acknowledged by the peer's system; otherwise those sent
    busy_seconds: float = 0.0  # with data on its way; 0 where the system does not report it
