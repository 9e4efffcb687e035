"""The membership gate of one node: it decides per peer which requests are answered, relayed, and which gossip passes.

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
        self.peer_check: PeerCheck | None = None  # None: every peer is served

    def close(self, check: PeerCheck) -> None:
        """Serve only the peers that `check` accepts, apart from requests that any node may make."""
        self.peer_check = check

    def refusal(self, peer: NodeId) -> str:
        """The reason why a peer is not served; "" if it is."""
        return "" if self.peer_check is None else self.peer_check(peer)

    def knows(self, peer: NodeId) -> bool:
        """Whether a peer is a member of a closed run. An open gate knows nobody: names are free there."""
        return self.peer_check is not None and not self.peer_check(peer)
