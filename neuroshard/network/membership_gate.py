"""The membership gate of one node: it decides per peer which requests are answered, relayed, and which gossip passes.

Without a closed run every peer is served. In a run of friends the run's members close the gate to all others. In an
organised run some of the others are readers: they may make requests of the few kinds that read, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from neuroshard.types import NodeId

PeerCheck: TypeAlias = Callable[[NodeId], str]
"""The reason why a peer is not served; "" if it is. Called for every request, so it must be cheap."""
ReaderCheck: TypeAlias = Callable[[NodeId], bool]
"""Whether a peer that is not served may read."""


class MembershipGate:
    """Open at first. Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.peer_check: PeerCheck | None = None  # None: every peer is served
        self._is_reader: ReaderCheck | None = None
        self._read_kinds: frozenset[str] = frozenset()

    def close(self, check: PeerCheck, is_reader: ReaderCheck | None = None) -> None:
        """Serve only the peers that `check` accepts, apart from requests that any node may make.

        Peers that only `is_reader` accepts are served with requests of the kinds of `let_read`.
        """
        self.peer_check, self._is_reader = check, is_reader

    def let_read(self, *kinds: str) -> None:
        """Answer requests of these kinds from readers, too."""
        self._read_kinds |= frozenset(kinds)

    def may_read(self, peer: NodeId, kind: str) -> bool:
        """Whether a peer that the gate refuses may make a request of a kind as a reader."""
        return kind in self._read_kinds and self._is_reader is not None and self._is_reader(peer)

    def refusal(self, peer: NodeId) -> str:
        """The reason why a peer is not served; "" if it is."""
        return "" if self.peer_check is None else self.peer_check(peer)

    def knows(self, peer: NodeId) -> bool:
        """Whether a peer is a member of a closed run. An open gate knows nobody: names are free there."""
        return self.peer_check is not None and not self.peer_check(peer)
