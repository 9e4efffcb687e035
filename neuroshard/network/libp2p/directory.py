"""The directory of a node: Kademlia over ordinary requests, with signed records.

libp2p's own Kademlia always uses the public network's protocol id, and maps one key to one value: it cannot list
nodes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

import anyio
from anyio.abc import TaskGroup
from msgspec import Meta, Struct

from neuroshard.errors import DataError, NeuroShardError
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network.crowds import network_of
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
    record_score_reason,
)
from neuroshard.network.reputation import ScoreReason
from neuroshard.network.transport import (
    MAX_RECORD_BYTES,
    DirectoryRecord,
    MessageTooLargeError,
    PeerUnreachableError,
    RequestRefusedError,
    Transport,
    TransportClosedError,
)
from neuroshard.types import MAX_ADDRESS_CHARACTERS, MAX_NODE_ID_CHARACTERS, NodeId
from neuroshard.waiting import Signal

FIND_KIND = "directory/find"
STORE_KIND = "directory/store"
ANSWER_SECONDS = 5.0  # per peer
REFRESH_SECONDS = 600.0
FIRST_LOOKS = (0.0, 5.0, 30.0)  # seconds between the first connection and looks for more nodes
SEARCH_SECONDS = 30.0  # for one search: what is known by then counts
MAX_ANSWER_BYTES = 60 * 1024  # of nodes and records in one answer; the header of a frame has 64 KiB
MAX_NODES_BYTES = 24 * 1024  # of them of nodes
SHARE_OF_KEEPER = 4  # each keeper is asked for one in 4 of the wanted records: half of them overlap
FIELD_BYTES = 8  # around a text or a record, at most
_LOG = logging.getLogger(__name__)

_Namespace = Annotated[str, Meta(min_length=1, max_length=MAX_NAMESPACE_CHARACTERS)]
_Record = Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]
_Addresses = Annotated[
    tuple[Annotated[str, Meta(max_length=MAX_ADDRESS_CHARACTERS)], ...], Meta(max_length=MAX_ADDRESSES)
]


class FindRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for the nodes nearest to a key, and for records of a namespace."""

    key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    requester_addresses: _Addresses = ()
    namespace: _Namespace | None = None  # None: no records
    most: Annotated[int, Meta(ge=0, le=MAX_RECORDS_OF_NAMESPACE)] = MAX_RECORDS_OF_NAMESPACE  # records


class FoundNode(Struct, frozen=True, forbid_unknown_fields=True):
    """A node and the addresses at which it was reached."""

    node_id: Annotated[str, Meta(max_length=MAX_NODE_ID_CHARACTERS)]
    addresses: _Addresses


class FindAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """The nodes and the records that a node knows."""

    nodes: Annotated[tuple[FoundNode, ...], Meta(max_length=BUCKET_SIZE)] = ()
    records: Annotated[tuple[_Record, ...], Meta(max_length=MAX_RECORDS_OF_NAMESPACE)] = ()


class StoreRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Asks a node to keep the sender's record."""

    namespace: _Namespace
    record: _Record


class Stored(Struct, frozen=True, forbid_unknown_fields=True):
    """The record is kept."""


FIND_ANSWER = FrameLimits(message=FindAnswer)
STORE_ANSWER = FrameLimits(message=Stored)


@dataclass(frozen=True)
class _Wanted:
    """The records that a search looks for."""

    namespace: str
    of_each: int  # at most, from each node asked
    found: dict[bytes, StoredRecord]


class KademliaDirectory:
    """The directory of one node. Records are checked when they are stored, and again when they are found."""

    def __init__(
        self,
        transport: Transport,
        contacts: PeerAddressBook,
        *,
        now: Callable[[], float],
        random: Random,
        report: Callable[[NodeId, ScoreReason], None],
        host_of: Callable[[NodeId], str | None],
        form: type[DirectoryRecord] = DirectoryRecord,
        store: RecordStore | None = None,
    ) -> None:
        """`host_of`: the IP address at which a peer is connected, None through a relay."""
        self._transport = transport
        self._contacts = contacts
        self._now = now
        self._random = random
        self._report = report
        self._host_of = host_of
        self._form = form
        self._table = RoutingTable(transport.local_id)
        self._store = store or RecordStore()
        self._first_peer = anyio.Event()
        self._is_closed = False
        self.refused: Counter[ScoreReason] = Counter()  # records, by what was wrong with them
        for kind, answer, message in (
            (FIND_KIND, self._answer_find, FindRequest),
            (STORE_KIND, self._answer_store, StoreRequest),
        ):
            transport.serve(kind, answer, FrameLimits(message=message), max_concurrent=32, for_anyone=True)

    async def announce(self, namespace: str, record: bytes) -> None:
        """Store this node's record here and at other nodes. Raises PeerUnreachableError if no other node keeps it.

        Raises DataError for a record that other nodes would refuse, ValueError for an invalid namespace.
        """
        self._check_open()
        _check_namespace(namespace)
        if len(record) > MAX_RECORD_BYTES:
            raise MessageTooLargeError(f"A record of {len(record)} bytes is above the limit of {MAX_RECORD_BYTES}.")
        self._store.put(namespace, StoredRecord.checked(record, self._now(), self._transport.local_id, self._form))
        keepers = await self._search(key_of(namespace))
        stored = await self._stored_at(keepers, Frame(STORE_KIND, StoreRequest(namespace, record)))
        self._check_open()
        if not stored:
            raise PeerUnreachableError("No other node keeps this node's record now.")

    async def find(self, namespace: str, limit: int = 64) -> tuple[bytes, ...]:
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
        """Look for nodes near this one at intervals, and drop expired records, until cancelled."""
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
        """Add a peer whose connection began."""
        self._table.heard_from(peer)
        self._first_peer.set()

    def close(self) -> None:
        """Reject further calls."""
        self._is_closed = True

    # Requests to other nodes

    async def _look_around(self, key: int) -> None:
        if len(self._table):
            await self._search(key)

    async def _search(self, key: int, wanted: _Wanted | None = None) -> list[NodeId]:
        """The nodes nearest to the key that answer; records they give are checked and added to those that are found."""
        question = FindRequest(key.to_bytes(32), self._own_addresses())
        if wanted is not None:
            question = FindRequest(question.key, question.requester_addresses, wanted.namespace, wanted.of_each)
        lookup = Lookup(key, self._table.closest(key), self._transport.local_id)
        changed = Signal()

        async def ask(peer: NodeId) -> None:
            received = await self._request(peer, Frame(FIND_KIND, question), FIND_ANSWER)
            if received is None:
                lookup.failed(peer)
            else:
                answer = received.read(FindAnswer)
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

    async def _request(self, peer: NodeId, frame: Frame, reply: FrameLimits) -> Frame | None:
        try:
            answer = await self._transport.request(peer, frame, reply=reply, timeout_seconds=ANSWER_SECONDS)
        except NeuroShardError as error:
            _LOG.debug("%s did not answer a directory request: %s", peer, error)
            self._table.failed(peer)
            return None
        self._table.heard_from(peer)
        return answer

    async def _stored_at(self, keepers: Sequence[NodeId], frame: Frame) -> int:
        stored: list[NodeId] = []

        async def store(peer: NodeId) -> None:
            if await self._request(peer, frame, STORE_ANSWER) is not None:
                stored.append(peer)

        async with anyio.create_task_group() as tasks:
            for peer in keepers[:REPLICAS]:
                tasks.start_soon(store, peer)
        return len(stored)

    def _learned(self, teller: NodeId, answer: FindAnswer) -> list[NodeId]:
        """The nodes in an answer whose addresses may be used."""
        learned: list[NodeId] = []
        teller_host = self._host_of(teller)
        for found in answer.nodes:
            node = NodeId(found.node_id)
            self._contacts.hear_texts(node, found.addresses, teller_host)
            if self._contacts.of(node):
                learned.append(node)
        return learned

    def _take_records(self, peer: NodeId, answer: FindAnswer, found: dict[bytes, StoredRecord]) -> None:
        """Add the records in an answer that hold; several keepers give the same ones, which are checked once."""
        for data in answer.records:
            if data not in found:
                record = self._checked(peer, data, None)
                if record is not None:
                    found[data] = record

    def _checked(self, sender: NodeId, data: bytes, owner: NodeId | None) -> StoredRecord | None:
        """A valid record, or None. An invalid one is counted, and the peer that sent it loses reputation."""
        try:
            record = StoredRecord.checked(data, self._now(), owner, self._form)
        except DataError as error:
            reason = record_score_reason(error)
            self.refused[reason] += 1
            self._report(sender, reason)
            return None
        # its author wrote it, wherever the sender is: only a record from the author itself says where it comes from
        host = self._host_of(sender) if sender == record.node_id else None
        self._contacts.learn_texts(record.node_id, record.addresses, record.issued_at, host=host)
        return record

    # Requests of other nodes

    async def _answer_find(self, peer: NodeId, request: Frame) -> Frame:
        question = request.read(FindRequest)
        self._hear_requester(peer, question.requester_addresses)
        await anyio.lowlevel.checkpoint()
        near = [node for node in self._table.closest(int.from_bytes(question.key)) if node != peer]
        nodes, byte_count = self._places_of(near)
        records: tuple[bytes, ...] = ()
        if question.namespace is not None:
            records = self._portion(question.namespace, question.most, MAX_ANSWER_BYTES - byte_count)
        return Frame(FIND_KIND, FindAnswer(nodes, records))

    async def _answer_store(self, peer: NodeId, request: Frame) -> Frame:
        given = request.read(StoreRequest)
        self._hear_requester(peer, ())
        await anyio.lowlevel.checkpoint()
        record = self._checked(peer, given.record, peer)
        if record is None:
            raise RequestRefusedError("The record was refused.")
        origin = network_of(self._host_of(peer) or "relayed", 32)  # all nodes behind relays are one
        if not self._store.put(given.namespace, record, origin):
            raise RequestRefusedError("This node is in as many namespaces as are kept.")
        return Frame(STORE_KIND, Stored())

    def _places_of(self, nodes: Sequence[NodeId]) -> tuple[tuple[FoundNode, ...], int]:
        """Addresses of the first nodes that fit, and the bytes that they take."""
        places: list[FoundNode] = []
        used = 0
        for node in nodes:
            texts = tuple(address.text for address in self._contacts.vouched(node)[:MAX_ADDRESSES])
            byte_count = sum(len(text) + FIELD_BYTES for text in (node, *texts))
            if texts and used + byte_count <= MAX_NODES_BYTES:
                places.append(FoundNode(node, texts))
                used += byte_count
        return tuple(places), used

    def _portion(self, namespace: str, most: int, room: int) -> tuple[bytes, ...]:
        """As many records as are wanted and there is room for, other ones every time."""
        chosen: list[bytes] = []
        for record in self._store.get(namespace, self._now(), self._random)[:most]:
            byte_count = len(record.data) + FIELD_BYTES
            if byte_count > room:
                break
            room -= byte_count
            chosen.append(record.data)
        return tuple(chosen)

    def _hear_requester(self, peer: NodeId, addresses: Sequence[str]) -> None:
        self._contacts.learn_texts(peer, addresses, self._now(), host=self._host_of(peer))
        self._table.heard_from(peer)

    def _own_addresses(self) -> tuple[str, ...]:
        return tuple(self._transport.addresses()[:MAX_ADDRESSES])

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportClosedError("This node's directory is closed.")


def _start_asking(lookup: Lookup, tasks: TaskGroup, ask: Callable[[NodeId], Coroutine[Any, Any, None]]) -> None:
    while (peer := lookup.next()) is not None:
        tasks.start_soon(ask, peer)


def _check_namespace(namespace: str) -> None:
    if not 1 <= len(namespace) <= MAX_NAMESPACE_CHARACTERS:
        raise ValueError(f"a namespace has 1 to {MAX_NAMESPACE_CHARACTERS} characters, got {namespace[:40]!r}")
