"""Why a connection of the pool ends, and why a request does.

What is no PeerUnreachableError stays inside the pool; it ends one connection, never the node.
"""

from __future__ import annotations

from neuroshard.network.scores import ScoreReason
from neuroshard.network.transport import PeerUnreachableError


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


class GreetingError(ConnectionLostError):
    """The other side did not prove who it is, or turned this node away."""
