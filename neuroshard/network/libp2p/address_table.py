"""What is known of peers' addresses within so many bytes: who was told or asked of the longest time ago makes room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, KeysView
from typing import Generic, Protocol, TypeVar

from neuroshard.network.libp2p.addresses import PeerAddress
from neuroshard.types import NodeId

ENTRY_BYTES = 400  # of a peer besides its addresses, rather more than less
ADDRESS_BYTES = 400  # of an address besides its text and host


class Addressed(Protocol):
    """Something that holds addresses."""

    @property
    def addresses(self) -> Iterable[PeerAddress]:
        """All of them."""
        ...


V = TypeVar("V", bound=Addressed)


class AddressTable(Generic[V]):
    """Values by peer."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._values: OrderedDict[NodeId, V] = OrderedDict()

    def keys(self) -> KeysView[NodeId]:
        """The peers."""
        return self._values.keys()

    def get(self, peer: NodeId) -> V | None:
        """What is known of a peer."""
        return self._values.get(peer)

    def touch(self, peer: NodeId) -> None:
        """A peer was asked for."""
        if peer in self._values:
            self._values.move_to_end(peer)

    def put(self, peer: NodeId, value: V) -> None:
        """Keep a value instead of the one before; the last one always finds room."""
        self.drop(peer)
        self._values[peer] = value
        self._bytes += _memory_of(value)
        while self._bytes > self._max_bytes and len(self._values) > 1:
            self.drop(next(iter(self._values)))

    def drop(self, peer: NodeId) -> None:
        """Forget a peer, if it is known."""
        dropped = self._values.pop(peer, None)
        if dropped is not None:
            self._bytes -= _memory_of(dropped)


def _memory_of(value: Addressed) -> int:
    return ENTRY_BYTES + sum(ADDRESS_BYTES + len(one.text) + len(one.host) for one in value.addresses)
