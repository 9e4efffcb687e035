"""The membership gate of one node: it decides per peer which requests are answered and which gossip passes.

Without a closed run every peer is served. In a run of friends the run's members close the gate to all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from neuroshard.types import NodeId

PeerCheck: TypeAlias = Callable[[NodeId], str]
"""The reason why a peer is not served; "" if it is. Called for every request, so it must be cheap."""


class MembershipGate:
    """Open at first. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._check: PeerCheck | None = None

    def close(self, check: PeerCheck) -> None:
        """Serve only the peers that `check` accepts, apart from requests that any node may make."""
        self._check = check

    def refusal(self, peer: NodeId) -> str:
        """The reason why a peer is not served; "" if it is."""
        return "" if self._check is None else self._check(peer)
