"""Kademlia's arithmetic (Maymounkov and Mazieres 2002): who is close to a key, and whom to ask next. No sockets."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256

from neuroshard.types import NodeId

BUCKET_SIZE = 16  # peers that share a length of common prefix with this node
REPLICAS = 8  # nodes that keep a record
PARALLEL = 4  # questions under way in one lookup
KEY_BITS = 256


def key_of(name: str) -> int:
    """Place of a node or namespace in the space of keys."""
    return int.from_bytes(sha256(name.encode()).digest())


def closest(peers: Iterable[NodeId], key: int, count: int) -> list[NodeId]:
    """The peers nearest to a key by XOR of their places, nearest first."""
    return sorted(peers, key=lambda peer: key_of(peer) ^ key)[:count]


class RoutingTable:
    """Peers by the length of the prefix they share with this node: many near ones, few far ones."""

    def __init__(self, local_id: NodeId) -> None:
        self._local_id = local_id
        self._local_key = key_of(local_id)
        self._buckets: dict[int, list[NodeId]] = {}  # the peer heard of last at the end

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self._buckets.values())

    def heard_from(self, peer: NodeId) -> None:
        """A peer showed itself alive. A full bucket keeps those it has: the old ones stay longest."""
        if peer == self._local_id:
            return
        bucket = self._buckets.setdefault(self._index(peer), [])
        if peer in bucket:
            bucket.remove(peer)
        elif len(bucket) >= BUCKET_SIZE:
            return
        bucket.append(peer)

    def failed(self, peer: NodeId) -> None:
        """A peer did not answer."""
        index = self._index(peer)
        bucket = self._buckets.get(index, [])
        if peer in bucket:
            bucket.remove(peer)
            if not bucket:
                del self._buckets[index]

    def closest(self, key: int, count: int = BUCKET_SIZE) -> list[NodeId]:
        """The known peers nearest to a key, nearest first."""
        return closest((peer for bucket in self._buckets.values() for peer in bucket), key, count)

    def _index(self, peer: NodeId) -> int:
        return KEY_BITS - (key_of(peer) ^ self._local_key).bit_length()


class Lookup:
    """One search for the nodes nearest to a key: what was asked, who answered, whom to ask next."""

    def __init__(self, key: int, start: Iterable[NodeId], local_id: NodeId) -> None:
        self._key = key
        self._local_id = local_id
        self._known: set[NodeId] = set(start) - {local_id}
        self._asked: set[NodeId] = set()
        self._answered: set[NodeId] = set()
        self._failed: set[NodeId] = set()

    def next(self) -> NodeId | None:
        """Whom to ask now: one of the nearest that nobody asked; None while there is none."""
        if len(self._asked - self._answered - self._failed) >= PARALLEL:
            return None
        for peer in closest(self._known - self._failed, self._key, REPLICAS):
            if peer not in self._asked:
                self._asked.add(peer)
                return peer
        return None

    def answered(self, peer: NodeId, nearer: Iterable[NodeId]) -> None:
        """A peer told whom it knows near the key."""
        self._answered.add(peer)
        self._known |= set(list(nearer)[:BUCKET_SIZE]) - {self._local_id}

    def failed(self, peer: NodeId) -> None:
        """A peer did not answer."""
        self._failed.add(peer)

    @property
    def is_done(self) -> bool:
        """Whether the nearest have all answered, or nobody is left to ask."""
        nearest = closest(self._known - self._failed, self._key, REPLICAS)
        return all(peer in self._answered for peer in nearest)

    def nearest(self) -> list[NodeId]:
        """Those nearest to the key that answered, nearest first."""
        return closest(self._answered, self._key, REPLICAS)
