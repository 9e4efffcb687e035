"""What went to and came from one peer over the pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PeerTraffic:
    """Bytes since this node knows the peer, framing included, TLS and TCP not; connections that are open now."""

    bytes_sent: int = 0
    bytes_received: int = 0
    connections: int = 0
    rtt_seconds: float | None = None  # None where the system does not tell
