"""How a network over libp2p ends when it ends badly."""

from __future__ import annotations

from neuroshard.errors import NeuroShardError


class NetworkFailedError(NeuroShardError):
    """A background task of the network failed; the cause says how."""
