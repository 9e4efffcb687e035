"""The directory of a node: Kademlia whose questions are ordinary requests, and whose answers are believed when signed.

libp2p's own always speaks the public network's protocol id, and lists nobody: it maps one key to one value.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import anyio
from anyio.abc import TaskGroup

from neuroshard.errors import DataError, NeuroShardError
from neuroshard.messages import Frame, WireValue
from neuroshard.network.libp2p.address_book import MAX_ADDRESSES, PeerAddressBook
from neuroshard.network.libp2p.kademlia import (
    BUCKET_SIZE,
    MAX_NAMESPACE_CHARACTERS,
    MAX_RECORDS_OF_NAMESPACE,
    REPLICAS,
    Lookup,
    RecordStore,
    RoutingTable,
    StoredRecord,
    key_of,
    origin_of,
    reason_of,
)
from neuroshard.network.reputation import ScoreReason
from neuroshard.network.transport import (
    MAX_RECORD_BYTES,
    MessageTooLargeError,
    PeerUnreachableError,
    RecordCheck,
    RequestRefusedError,
    Transport,
    TransportClosedError,
    any_record,
)
from neuroshard.signals import Signal
from neuroshard.types import NodeId

FIND_KIND = "directory/find"
STORE_KIND = "directory/store"
ANSWER_SECONDS = 5.0  # of one peer
REFRESH_SECONDS = 600.0
FIRST_LOOKS = (0.0, 5.0, 30.0)  # seconds between the first connection and looks for more nodes
SEARCH_SECONDS = 30.0  # for one search: what is known by then counts
MAX_ANSWER_BYTES = 60 * 1024  # of nodes and records in one answer; the header of a frame has 64 KiB
MAX_NODES_BYTES = 24 * 1024  # of them of nodes
SHARE_OF_KEEPER = 4  # of the records that are wanted, one keeper is asked for one in so many: half of them overlap
FIELD_BYTES = 8  # around a text or a record, at most
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Wanted:
    """Records that a search looks for."""

    namespace: str
    of_each: int  # that every node which is asked may give
    found: dict[bytes, StoredRecord]


class KademliaDirectory:
    """See Directory. Records are checked when they are stored, and again when they are found."""

    def __init__(
        self,
        transport: Transport,
        contacts: PeerAddressBook,
        *,
        now: Callable[[], float],
        random: Random,
        report: Callable[[NodeId, ScoreReason], None],
        host_of: Callable[[NodeId], str | None],
        accepts: RecordCheck = any_record,
        store: RecordStore | None = None,
    ) -> None:
        """`host_of`: the IP address at which a peer is connected, None through a relay."""
        self._transport = transport
        self._contacts = contacts
        self._now = now
        self._random = random
        self._report = report
        self._host_of = host_of
        self._accepts = accepts
        self._table = RoutingTable(transport.local_id)
        self._store = store or RecordStore()
        self._first_peer = anyio.Event()
        self._is_closed = False
        self.refused: Counter[ScoreReason] = Counter()  # records, by what was wrong with them
        transport.serve(FIND_KIND, self._answer_find, max_concurrent=32)
        transport.serve(STORE_KIND, self._answer_store, max_concurrent=32)

    async def announce(self, namespace: str, record: bytes) -> None:
        """See Directory. The record is kept here whatever happens; PeerUnreachableError when nobody else keeps it.

        Raises DataError for a record that others would refuse, ValueError for a namespace that is none.
        """
        self._check_open()
        _check_namespace(namespace)
        if len(record) > MAX_RECORD_BYTES:
            raise MessageTooLargeError(f"A record of {len(record)} bytes is above the limit of {MAX_RECORD_BYTES}.")
        self._store.put(namespace, StoredRecord.checked(record, self._now(), self._transport.local_id, self._accepts))
        keepers = await self._search(key_of(namespace))
        stored = await self._stored_at(keepers, Frame(STORE_KIND, {"namespace": namespace, "record": record}))
        self._check_open()
        if not stored:
            raise PeerUnreachableError("No other node keeps this node's record now.")

    async def find(self, namespace: str, limit: int = 64) -> tuple[bytes, ...]:
        """See Directory."""
        self._check_open()
        _check_namespace(namespace)
        kept = self._store.get(namespace, self._now(), self._random)
        wanted = _Wanted(namespace, -(-limit // SHARE_OF_KEEPER), {record.data: record for record in kept})
        await self._search(key_of(namespace), wanted)
        self._check_open()
        newest: dict[NodeId, StoredRecord] = {}
        for record in wanted.found.values():
            known = newest.get(record.node_id)
            if known is None or known.issued_at < record.issued_at:
                newest[record.node_id] = record
        chosen = self._random.sample(list(newest.values()), min(limit, len(newest)))
        return tuple(record.data for record in chosen)

    async def run(self) -> None:
        """Get to know nodes near this one, now and then, and forget old records, until cancelled."""
        await self._first_peer.wait()
        for seconds in FIRST_LOOKS:
            await anyio.sleep(seconds)
            await self._look_around(key_of(self._transport.local_id))
        while True:
            await anyio.sleep(REFRESH_SECONDS * self._random.uniform(0.8, 1.2))
            self._store.expire(self._now())
            await self._look_around(key_of(self._transport.local_id))
            await self._look_around(self._random.getrandbits(256))

    def meet(self, peer: NodeId) -> None:
        """A connection with a peer began."""
        self._table.heard_from(peer)
        self._first_peer.set()

    def close(self) -> None:
        """Refuse further calls."""
        self._is_closed = True

    # Asking

    async def _look_around(self, key: int) -> None:
        if len(self._table):
            await self._search(key)

    async def _search(self, key: int, wanted: _Wanted | None = None) -> list[NodeId]:
        """The nodes nearest to the key that answer; records they give are checked and added to those that are found."""
        question: dict[str, WireValue] = {"key": key.to_bytes(32), "from": self._own_addresses()}
        if wanted is not None:
            question |= {"namespace": wanted.namespace, "most": wanted.of_each}
        lookup = Lookup(key, self._table.closest(key), self._transport.local_id)
        changed = Signal()

        async def ask(peer: NodeId) -> None:
            answer = await self._request(peer, Frame(FIND_KIND, question))
            if answer is None:
                lookup.failed(peer)
            else:
                lookup.answered(peer, self._learned(peer, answer))
                if wanted is not None:
                    self._take_records(peer, answer, wanted.found)
            changed.notify()

        with anyio.move_on_after(SEARCH_SECONDS):
            async with anyio.create_task_group() as tasks:
                while not lookup.is_done:
                    _start_asking(lookup, tasks, ask)
                    await changed.wait()
                tasks.cancel_scope.cancel()
        return lookup.nearest()

    async def _request(self, peer: NodeId, frame: Frame) -> Frame | None:
        try:
            answer = await self._transport.request(peer, frame, timeout_seconds=ANSWER_SECONDS)
        except NeuroShardError as error:
            _LOG.debug("%s does not help with the directory: %s", peer, error)
            self._table.failed(peer)
            return None
        self._table.heard_from(peer)
        return answer

    async def _stored_at(self, keepers: Sequence[NodeId], frame: Frame) -> int:
        stored: list[NodeId] = []

        async def store(peer: NodeId) -> None:
            if await self._request(peer, frame) is not None:
                stored.append(peer)

        async with anyio.create_task_group() as tasks:
            for peer in keepers[:REPLICAS]:
                tasks.start_soon(store, peer)
        return len(stored)

    def _learned(self, teller: NodeId, answer: Frame) -> list[NodeId]:
        """The nodes in an answer, with their addresses; whatever is no such thing is left out."""
        learned: list[NodeId] = []
        teller_host = self._host_of(teller)
        for node, addresses in _named_addresses(answer.header.get("nodes")):
            self._contacts.hear_texts(node, addresses, teller_host)
            if self._contacts.of(node):
                learned.append(node)
        return learned

    def _take_records(self, peer: NodeId, answer: Frame, found: dict[bytes, StoredRecord]) -> None:
        """Add the records in an answer that hold; several keepers give the same ones, which are checked once."""
        told = answer.header.get("records")
        for data in told if isinstance(told, list | tuple) else ():
            if isinstance(data, bytes) and data not in found:
                record = self._checked(peer, data, None)
                if record is not None:
                    found[data] = record

    def _checked(self, giver: NodeId, data: bytes, owner: NodeId | None) -> StoredRecord | None:
        """A record that holds; one that does not is counted, and whoever gave it loses reputation."""
        try:
            record = StoredRecord.checked(data, self._now(), owner, self._accepts)
        except DataError as error:
            reason = reason_of(error)
            self.refused[reason] += 1
            self._report(giver, reason)
            return None
        self._contacts.learn_texts(record.node_id, record.addresses, record.issued_at)
        return record

    # Answering

    async def _answer_find(self, peer: NodeId, question: Frame) -> Frame:
        key, namespace = question.header.get("key"), question.header.get("namespace")
        most = question.header.get("most", MAX_RECORDS_OF_NAMESPACE)
        if not isinstance(key, bytes) or len(key) != 32 or not isinstance(namespace, str | None):
            raise RequestRefusedError("A question to the directory has a key of 32 bytes.")
        if not isinstance(most, int) or most < 0:
            raise RequestRefusedError("A question to the directory says how many records it wants, or does not.")
        self._hear_asker(peer, question)
        await anyio.lowlevel.checkpoint()
        near = [node for node in self._table.closest(int.from_bytes(key)) if node != peer]
        nodes, byte_count = self._places_of(near)
        answer: dict[str, WireValue] = {"nodes": nodes}
        if namespace is not None:
            answer["records"] = self._portion(namespace, most, MAX_ANSWER_BYTES - byte_count)
        return Frame(FIND_KIND, answer)

    async def _answer_store(self, peer: NodeId, request: Frame) -> Frame:
        namespace, data = request.header.get("namespace"), request.header.get("record")
        if not isinstance(namespace, str) or not isinstance(data, bytes):
            raise RequestRefusedError("A record needs a namespace.")
        if not _is_namespace(namespace):
            raise RequestRefusedError("That is no namespace.")
        self._hear_asker(peer, request)
        await anyio.lowlevel.checkpoint()
        record = self._checked(peer, data, peer)
        if record is None:
            raise RequestRefusedError("The record was refused.")
        if not self._store.put(namespace, record, origin_of(self._host_of(peer))):
            raise RequestRefusedError("This node is in as many namespaces as are kept.")
        return Frame(STORE_KIND)

    def _places_of(self, nodes: Sequence[NodeId]) -> tuple[list[WireValue], int]:
        """Where nodes can be reached, the first ones as far as there is room, and the bytes that takes."""
        places: list[WireValue] = []
        used = 0
        for node in nodes:
            texts = [address.text for address in self._contacts.vouched(node)[:MAX_ADDRESSES]]
            byte_count = sum(len(text) + FIELD_BYTES for text in (node, *texts))
            if texts and used + byte_count <= MAX_NODES_BYTES:
                places.append([node, texts])
                used += byte_count
        return places, used

    def _portion(self, namespace: str, most: int, room: int) -> list[bytes]:
        """As many records as are wanted and there is room for, other ones every time."""
        chosen: list[bytes] = []
        for record in self._store.get(namespace, self._now(), self._random)[:most]:
            byte_count = len(record.data) + FIELD_BYTES
            if byte_count > room:
                break
            room -= byte_count
            chosen.append(record.data)
        return chosen

    def _hear_asker(self, peer: NodeId, frame: Frame) -> None:
        addresses = frame.header.get("from")
        if isinstance(addresses, list | tuple):
            texts = [text for text in addresses if isinstance(text, str)]
            self._contacts.learn_texts(peer, texts, self._now(), host=self._host_of(peer))
        self._table.heard_from(peer)

    def _own_addresses(self) -> list[str]:
        return list(self._transport.addresses()[:MAX_ADDRESSES])

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportClosedError("This node's directory is closed.")


def _start_asking(lookup: Lookup, tasks: TaskGroup, ask: Callable[[NodeId], Coroutine[Any, Any, None]]) -> None:
    while (peer := lookup.next()) is not None:
        tasks.start_soon(ask, peer)


def _check_namespace(namespace: str) -> None:
    if not _is_namespace(namespace):
        raise ValueError(f"a namespace has 1 to {MAX_NAMESPACE_CHARACTERS} characters, got {namespace[:40]!r}")


def _is_namespace(text: str) -> bool:
    return 1 <= len(text) <= MAX_NAMESPACE_CHARACTERS


def _named_addresses(value: WireValue) -> list[tuple[NodeId, list[str]]]:
    """Entries of [node id, [address, ...]]; anything else is left out."""
    named: list[tuple[NodeId, list[str]]] = []
    for entry in value if isinstance(value, list | tuple) else ():
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            continue
        node, addresses = entry
        if isinstance(node, str) and isinstance(addresses, list | tuple) and len(named) < BUCKET_SIZE:
            named.append((NodeId(node), [text for text in addresses if isinstance(text, str)]))
    return named
