"""Kademlia without I/O (Maymounkov and Mazieres 2002): routing table, lookup and record store.

The store keeps small, signed, recent records, one for each node and namespace, within a byte limit. A new record
always finds space: when the store is full, the origin (an IP address, or a /64 of IPv6) whose records take the most
bytes loses its oldest record.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random
from types import MappingProxyType

from neuroshard.errors import DataError
from neuroshard.identity import (
    ClaimExpiredError,
    ClaimTooLargeError,
    DelegationExpiredError,
    ForeignClaimError,
    MalformedClaimError,
    SignatureError,
)
from neuroshard.network.reputation import ScoreReason
from neuroshard.network.transport import RECORD_SECONDS, DirectoryRecord, checked_record
from neuroshard.types import NodeId

BUCKET_SIZE = 16  # peers per length of the prefix shared with this node
REPLICAS = 8  # nodes that keep a record
PARALLEL = 4  # concurrent requests in one lookup
KEY_BITS = 256


def key_of(name: str) -> int:
    """The position of a node or namespace in the key space."""
    return int.from_bytes(sha256(name.encode()).digest())


def closest(peers: Iterable[NodeId], key: int, count: int) -> list[NodeId]:
    """The peers nearest to a key by XOR distance, nearest first."""
    return sorted(peers, key=lambda peer: key_of(peer) ^ key)[:count]


class RoutingTable:
    """Peers by the length of the prefix they share with this node: many near ones, few far ones."""

    def __init__(self, local_id: NodeId) -> None:
        self._local_id = local_id
        self._local_key = key_of(local_id)
        self._buckets: dict[int, list[NodeId]] = {}  # the most recently seen peer is last

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self._buckets.values())

    def heard_from(self, peer: NodeId) -> None:
        """Note that a peer is alive. A full bucket keeps its entries: old peers tend to stay."""
        if peer == self._local_id:
            return
        bucket = self._buckets.setdefault(self._index(peer), [])
        if peer in bucket:
            bucket.remove(peer)
        elif len(bucket) >= BUCKET_SIZE:
            return
        bucket.append(peer)

    def failed(self, peer: NodeId) -> None:
        """Note that a peer did not answer."""
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
    """One search for the nodes nearest to a key: the peers asked, those that answered, and the next to ask."""

    def __init__(self, key: int, start: Iterable[NodeId], local_id: NodeId) -> None:
        self._key = key
        self._local_id = local_id
        self._known: set[NodeId] = set(start) - {local_id}
        self._asked: set[NodeId] = set()
        self._answered: set[NodeId] = set()
        self._failed: set[NodeId] = set()

    def next(self) -> NodeId | None:
        """The next peer to ask: one of the nearest not asked yet; None while there is none."""
        if len(self._asked - self._answered - self._failed) >= PARALLEL:
            return None
        for peer in closest(self._known - self._failed, self._key, REPLICAS):
            if peer not in self._asked:
                self._asked.add(peer)
                return peer
        return None

    def answered(self, peer: NodeId, nearer: Iterable[NodeId]) -> None:
        """Add a peer's answer: the nodes that it knows near the key."""
        self._answered.add(peer)
        self._known |= set(list(nearer)[:BUCKET_SIZE]) - {self._local_id}

    def failed(self, peer: NodeId) -> None:
        """Note that a peer did not answer."""
        self._failed.add(peer)

    @property
    def is_done(self) -> bool:
        """Whether the nearest peers have all answered, or none is left to ask."""
        nearest = closest(self._known - self._failed, self._key, REPLICAS)
        return all(peer in self._answered for peer in nearest)

    def nearest(self) -> list[NodeId]:
        """The nearest peers that answered, nearest first."""
        return closest(self._answered, self._key, REPLICAS)


MAX_NAMESPACE_CHARACTERS = 256
MAX_RECORDS_OF_NAMESPACE = 1024
MAX_RECORDS_OF_NODE = 64  # namespaces per node
MAX_BYTES = 64 * 1024 * 1024
ENTRY_BYTES = 1024  # overhead per record, an upper estimate
REASON_OF: Mapping[type[DataError], ScoreReason] = MappingProxyType(
    {
        ClaimTooLargeError: ScoreReason.OVERSIZED,
        MalformedClaimError: ScoreReason.MALFORMED_CLAIM,
        ForeignClaimError: ScoreReason.BAD_RECORD,
        SignatureError: ScoreReason.BAD_SIGNATURE,
        ClaimExpiredError: ScoreReason.EXPIRED_CLAIM,
        DelegationExpiredError: ScoreReason.EXPIRED_CLAIM,
    }
)


def record_score_reason(error: DataError) -> ScoreReason:
    """The reputation reason for a peer that sent an unacceptable record."""
    return REASON_OF.get(type(error), ScoreReason.BAD_RECORD)


@dataclass(frozen=True)
class StoredRecord:
    """A record that was checked."""

    node_id: NodeId
    issued_at: float  # seconds since the epoch
    data: bytes = field(repr=False)
    addresses: tuple[str, ...] = ()  # addresses that the node claims

    @classmethod
    def checked(
        cls, data: bytes, now: float, owner: NodeId | None = None, form: type[DirectoryRecord] = DirectoryRecord
    ) -> StoredRecord:
        """Check a record with `checked_record`: valid, by `owner` (if given), with content of type `form`.

        Raises DataError.
        """
        claim = checked_record(owner, data, now, form)
        return cls(claim.node_id, claim.issued_at, data, claim.payload.addresses)

    @property
    def byte_count(self) -> int:
        """Its size in memory."""
        return ENTRY_BYTES + len(self.data) + sum(map(len, self.addresses))

    def is_expired(self, now: float) -> bool:
        return self.issued_at < now - RECORD_SECONDS


class RecordStore:
    """All records that this node keeps, within a byte limit. Only checked records are accepted."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes: Counter[str] = Counter()  # by origin
        self._records: dict[str, dict[NodeId, StoredRecord]] = {}
        self._origins: dict[tuple[str, NodeId], str] = {}
        self._of_origin: dict[str, OrderedDict[tuple[str, NodeId], None]] = {}  # in order of arrival
        self._of_node: Counter[NodeId] = Counter()

    def __len__(self) -> int:
        return len(self._origins)

    def put(self, namespace: str, record: StoredRecord, origin: str = "") -> bool:
        """Keep a record unless a newer one of its node is stored. Returns False for a node in too many namespaces."""
        known = self._records.get(namespace, {}).get(record.node_id)
        if known is not None:
            if known.issued_at <= record.issued_at:
                self._drop(namespace, known.node_id)
                self._keep(namespace, record, origin)
            return True
        if self._of_node[record.node_id] >= MAX_RECORDS_OF_NODE:
            return False
        records = self._records.get(namespace, {})
        if len(records) >= MAX_RECORDS_OF_NAMESPACE:
            self._drop(namespace, self._needless_in(namespace, records))
        self._keep(namespace, record, origin)
        return True

    def get(self, namespace: str, now: float, random: Random) -> list[StoredRecord]:
        """The records of a namespace that have not expired, in random order."""
        records = [record for record in self._records.get(namespace, {}).values() if not record.is_expired(now)]
        random.shuffle(records)
        return records

    def expire(self, now: float) -> None:
        """Drop expired records."""
        for namespace, node_id in tuple(self._origins):
            if self._records[namespace][node_id].is_expired(now):
                self._drop(namespace, node_id)

    def _needless_in(self, namespace: str, records: Mapping[NodeId, StoredRecord]) -> NodeId:
        """The oldest record of the origin with the most records in this namespace."""
        origins = {node_id: self._origins[namespace, node_id] for node_id in records}
        ((greediest, _),) = Counter(origins.values()).most_common(1)
        return min((node for node in records if origins[node] == greediest), key=lambda node: records[node].issued_at)

    def _keep(self, namespace: str, record: StoredRecord, origin: str) -> None:
        while self._origins and self._bytes.total() + record.byte_count > self._max_bytes:
            ((greediest, _),) = self._bytes.most_common(1)
            self._drop(*next(iter(self._of_origin[greediest])))
        self._bytes[origin] += record.byte_count
        place = namespace, record.node_id
        self._records.setdefault(namespace, {})[record.node_id] = record
        self._origins[place] = origin
        self._of_origin.setdefault(origin, OrderedDict())[place] = None
        self._of_node[record.node_id] += 1

    def _drop(self, namespace: str, node_id: NodeId) -> None:
        dropped = self._records[namespace].pop(node_id)
        if not self._records[namespace]:
            del self._records[namespace]
        origin = self._origins.pop((namespace, node_id))
        del self._of_origin[origin][namespace, node_id]
        self._bytes[origin] -= dropped.byte_count
        if not self._of_origin[origin]:
            del self._of_origin[origin], self._bytes[origin]
        self._of_node[node_id] -= 1
        if not self._of_node[node_id]:
            del self._of_node[node_id]
