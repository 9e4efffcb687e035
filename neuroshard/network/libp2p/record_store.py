"""The records a node keeps for the directory: small, signed, young, one for each node and namespace, all bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from neuroshard.network.records import RECORD_SECONDS, checked_record
from neuroshard.network.scores import ScoreReason
from neuroshard.types import NodeId

MAX_NAMESPACE_CHARACTERS = 256
MAX_RECORDS_OF_NAMESPACE = 1024
MAX_RECORDS_OF_NODE = 64  # namespaces in which one node is kept
MAX_RECORDS = 8192
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


def reason_of(error: DataError) -> ScoreReason:
    """What a record that cannot be accepted says about whoever gave it."""
    return REASON_OF.get(type(error), ScoreReason.BAD_RECORD)


@dataclass(frozen=True)
class Record:
    """A record that was checked."""

    node_id: NodeId
    issued_at: float  # seconds since 1970
    data: bytes = field(repr=False)

    @classmethod
    def checked(cls, data: bytes, now: float, owner: NodeId | None = None) -> Record:
        """Verify signature, delegation and age, and that `owner` made it when one is given. Raises DataError."""
        claim = checked_record(owner, data, now)
        return cls(claim.node_id, claim.issued_at, data)

    def is_expired(self, now: float) -> bool:
        """Whether it is too old."""
        return self.issued_at < now - RECORD_SECONDS


class RecordStore:
    """All that this node keeps. Only checked records come in."""

    def __init__(self) -> None:
        self._records: dict[str, dict[NodeId, Record]] = {}
        self._of_node: Counter[NodeId] = Counter()
        self._total = 0

    def __len__(self) -> int:
        return self._total

    def put(self, namespace: str, record: Record) -> bool:
        """Keep a record unless a newer one of its node is there; False when there is no room for it."""
        records = self._records.get(namespace, {})
        known = records.get(record.node_id)
        if known is not None:
            if known.issued_at <= record.issued_at:
                records[record.node_id] = record
            return True
        if self._total >= MAX_RECORDS or self._of_node[record.node_id] >= MAX_RECORDS_OF_NODE:
            return False
        if len(records) >= MAX_RECORDS_OF_NAMESPACE:
            self._drop(namespace, min(records.values(), key=lambda kept: kept.issued_at))
        self._records.setdefault(namespace, {})[record.node_id] = record
        self._of_node[record.node_id] += 1
        self._total += 1
        return True

    def get(self, namespace: str, now: float, random: Random) -> list[Record]:
        """The records of a namespace that are young enough, in random order."""
        records = [record for record in self._records.get(namespace, {}).values() if not record.is_expired(now)]
        random.shuffle(records)
        return records

    def expire(self, now: float) -> None:
        """Drop what is too old."""
        for namespace, records in tuple(self._records.items()):
            for record in tuple(records.values()):
                if record.is_expired(now):
                    self._drop(namespace, record)

    def _drop(self, namespace: str, record: Record) -> None:
        del self._records[namespace][record.node_id]
        if not self._records[namespace]:
            del self._records[namespace]
        self._of_node[record.node_id] -= 1
        if not self._of_node[record.node_id]:
            del self._of_node[record.node_id]
        self._total -= 1
