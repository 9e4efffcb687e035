"""Limits of the pool, and where a pool listens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Endpoint: TypeAlias = tuple[str, int]
"""IP address and TCP port."""

MOST_CONNECTIONS = 16  # to one peer


@dataclass(frozen=True)
class PoolOptions:
    """Times in seconds. Addresses are IP addresses; port 0 is any free one."""

    host: str = "0.0.0.0"  # noqa: S104 - a node listens for its peers; the owner may choose another address
    port: int = 0
    congestion_control: str | None = "bbr"  # asked of the system for each connection; ignored where it is unknown
    fixed_connections: int | None = None  # to each peer, instead of as many as the line needs
    max_connections_per_peer: int = MOST_CONNECTIONS
    max_connections_per_address: int = 64  # addresses of this computer are exempt
    max_connections: int = 512
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
        """How long so many bytes may take."""
        return self.grace_seconds + byte_count / self.min_bytes_per_second
