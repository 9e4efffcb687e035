"""Where this node's peers can be dialled, as far as anybody told: a bounded book."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from neuroshard.errors import UsageError
from neuroshard.network.libp2p.addresses import PeerAddress, parse_address
from neuroshard.types import NodeId

MAX_PEERS = 4096
MAX_ADDRESSES = 8  # of one peer


class Contacts:
    """Addresses by peer; those told last come first, and the peer asked for longest ago is forgotten first."""

    def __init__(self, local_id: NodeId, max_peers: int = MAX_PEERS) -> None:
        self._local_id = local_id
        self._max_peers = max_peers
        self._addresses: OrderedDict[NodeId, tuple[PeerAddress, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._addresses)

    def learn(self, address: PeerAddress) -> None:
        """Remember one way to a peer."""
        peer = address.peer
        if peer == self._local_id:
            return
        others = tuple(known for known in self._addresses.get(peer, ()) if known.text != address.text)
        self._addresses[peer] = (address, *others)[:MAX_ADDRESSES]
        self._addresses.move_to_end(peer)
        while len(self._addresses) > self._max_peers:
            self._addresses.popitem(last=False)

    def learn_texts(self, peer: NodeId, texts: Iterable[str]) -> None:
        """Remember what a stranger says about a peer; what is no address of that peer is left out."""
        for text in tuple(texts)[:MAX_ADDRESSES]:
            try:
                address = parse_address(text)
            except UsageError:
                continue
            if address.peer == peer:
                self.learn(address)

    def of(self, peer: NodeId) -> tuple[PeerAddress, ...]:
        """Known ways to a peer, direct ones first."""
        known = self._addresses.get(peer, ())
        if known:
            self._addresses.move_to_end(peer)
        return tuple(sorted(known, key=lambda address: address.is_relayed))
