"""The directory of an in-memory network: one shared table that shows a node what its side of a partition stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import anyio

from neuroshard.errors import DataError
from neuroshard.identity import SignedClaim
from neuroshard.network.in_memory_links import Links
from neuroshard.network.records import MAX_RECORD_BYTES, RECORD_SECONDS, RecordCheck, any_record, checked_record
from neuroshard.network.transport import MessageTooLargeError, TransportClosedError
from neuroshard.types import NodeId

MAX_RECORDS = 4096  # of one namespace


@dataclass(frozen=True)
class _Record:
    stored_by: NodeId
    issued_at: float
    expires_at: float
    data: bytes = field(repr=False)


class RecordTable:
    """The records of all nodes. A record under another's name never gets in, an older one replaces no newer one."""

    def __init__(
        self,
        links: Links,
        random: Random,
        now: Callable[[], float],
        max_records: int = MAX_RECORDS,
        *,
        accepts: RecordCheck = any_record,
    ) -> None:
        self._links = links
        self._random = random
        self._now = now
        self._max_records = max_records
        self._accepts = accepts
        self._records: dict[str, dict[NodeId, _Record]] = {}
        self._refused = 0

    @property
    def refused(self) -> int:
        """Records that were dropped because they are false, stale or oversized."""
        return self._refused

    def store(self, namespace: str, owner: NodeId, data: bytes, stored_by: NodeId) -> bool:
        """Keep a record under (namespace, owner); False when it is refused, which is counted."""
        try:
            claim = checked_record(owner, data, self._now(), self._accepts)
        except DataError:
            self._refused += 1
            return False
        records = self._records.setdefault(namespace, {})
        known = records.get(owner)
        if known is not None and known.issued_at > claim.issued_at:
            return False
        if known is None and len(records) >= self._max_records:
            del records[min(records, key=lambda node: records[node].issued_at)]
        expires_at = min(claim.issued_at + RECORD_SECONDS, SignedClaim.decode(data).delegation.expires_at)
        records[owner] = _Record(stored_by, claim.issued_at, expires_at, data)
        return True

    def find(self, namespace: str, limit: int, asked_by: NodeId) -> tuple[bytes, ...]:
        """At most `limit` records that are still valid, a random choice of those that `asked_by` can see."""
        now = self._now()
        kept = {node: record for node, record in self._records.get(namespace, {}).items() if now < record.expires_at}
        if namespace in self._records:
            self._records[namespace] = kept
        seen = [r.data for r in kept.values() if not self._links.are_separated(r.stored_by, asked_by)]
        return tuple(self._random.sample(seen, min(limit, len(seen))))


class InMemoryDirectory:
    """One node's view of the table; see Directory."""

    def __init__(self, table: RecordTable, local_id: NodeId, is_closed: Callable[[], bool]) -> None:
        self._table = table
        self._local_id = local_id
        self._is_closed = is_closed

    async def announce(self, namespace: str, record: bytes) -> None:
        """See Directory. Raises MessageTooLargeError, TransportClosedError; a record that is not its own is dropped."""
        await anyio.lowlevel.checkpoint()
        self._check_open()
        if len(record) > MAX_RECORD_BYTES:
            raise MessageTooLargeError(f"A record of {len(record)} bytes is above the limit of {MAX_RECORD_BYTES}.")
        self._table.store(namespace, self._local_id, record, self._local_id)

    async def find(self, namespace: str, limit: int = 64) -> tuple[bytes, ...]:
        """See Directory."""
        await anyio.lowlevel.checkpoint()
        self._check_open()
        return self._table.find(namespace, limit, self._local_id)

    def _check_open(self) -> None:
        if self._is_closed():
            raise TransportClosedError("This node's directory is closed.")
