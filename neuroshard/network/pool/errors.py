"""Why a connection of the pool ends. These errors stay inside the pool; they end one connection, never the node."""

from __future__ import annotations

from neuroshard.network.scores import ScoreReason


class ConnectionLostError(Exception):
    """The connection broke or was closed; what it carried goes over another one."""


class MisconductError(ConnectionLostError):
    """The peer did what no honest peer does, or was too slow: it is reported for this reason and cut off."""

    def __init__(self, reason: ScoreReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class GreetingError(ConnectionLostError):
    """The other side did not prove who it is, or turned this node away."""
