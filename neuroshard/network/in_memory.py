"""A network inside one process, for a single node and for tests: transport, directory and simulated faults.

The directory is one shared table that shows a node only the records of its own side of a partition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Self

import anyio
from msgspec import Raw

from neuroshard.errors import DataError, UsageError
from neuroshard.identity import read_claim
from neuroshard.messages import Frame, FrameLimits, WireError, as_received
from neuroshard.network.in_memory_gossip import GossipCounters, GossipHub, InMemoryGossip
from neuroshard.network.in_memory_links import PERFECT_LINK, Link, Links
from neuroshard.network.membership_gate import MembershipGate
from neuroshard.network.reputation import Reputation
from neuroshard.network.serving import RequestServer, accepted, refusal
from neuroshard.network.transport import (
    MAX_RECORD_BYTES,
    RECORD_SECONDS,
    Admission,
    Connection,
    DirectoryRecord,
    MessageTooLargeError,
    Network,
    PeerUnreachableError,
    RequestHandler,
    RequestRefusedError,
    RequestTimeoutError,
    TransportClosedError,
    checked_record,
)
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId

MAX_RECORDS = 4096  # per namespace


@dataclass(frozen=True)
class _StoredEntry:
    stored_by: NodeId
    issued_at: float
    expires_at: float
    data: bytes = field(repr=False)


class RecordTable:
    """The records of all nodes.

    A node can only store its own record, and an older record never replaces a newer one.
    """

    def __init__(
        self,
        links: Links,
        random: Random,
        now: Callable[[], float],
        max_records: int = MAX_RECORDS,
        *,
        form: type[DirectoryRecord] = DirectoryRecord,
    ) -> None:
        self._links = links
        self._random = random
        self._now = now
        self._max_records = max_records
        self._form = form
        self._records: dict[str, dict[NodeId, _StoredEntry]] = {}
        self._refused = 0

    @property
    def refused(self) -> int:
        return self._refused

    def store(self, namespace: str, owner: NodeId, data: bytes, stored_by: NodeId) -> bool:
        """Keep a record under (namespace, owner). Returns False and counts it when the record is refused."""
        try:
            claim = checked_record(owner, data, self._now(), self._form)
        except DataError:
            self._refused += 1
            return False
        records = self._records.setdefault(namespace, {})
        known = records.get(owner)
        if known is not None and known.issued_at > claim.issued_at:
            return False
        if known is None and len(records) >= self._max_records:
            del records[min(records, key=lambda node: records[node].issued_at)]
        expires_at = min(claim.issued_at + RECORD_SECONDS, read_claim(data, Raw).delegation.grant.expires_at)
        records[owner] = _StoredEntry(stored_by, claim.issued_at, expires_at, data)
        return True

    def find(self, namespace: str, limit: int, asked_by: NodeId) -> tuple[bytes, ...]:
        """Up to `limit` records that are still valid, chosen at random from those visible to `asked_by`."""
        now = self._now()
        kept = {node: record for node, record in self._records.get(namespace, {}).items() if now < record.expires_at}
        if namespace in self._records:
            self._records[namespace] = kept
        seen = [r.data for r in kept.values() if not self._links.are_separated(r.stored_by, asked_by)]
        return tuple(self._random.sample(seen, min(limit, len(seen))))


class InMemoryDirectory:
    """One node's view of the record table."""

    def __init__(self, table: RecordTable, local_id: NodeId, is_closed: Callable[[], bool]) -> None:
        self._table = table
        self._local_id = local_id
        self._is_closed = is_closed

    async def announce(self, namespace: str, record: bytes) -> None:
        """Store this node's record; drop one of another node. Raises MessageTooLargeError, TransportClosedError."""
        await anyio.lowlevel.checkpoint()
        self._check_open()
        if len(record) > MAX_RECORD_BYTES:
            raise MessageTooLargeError(f"A record of {len(record)} bytes is above the limit of {MAX_RECORD_BYTES}.")
        self._table.store(namespace, self._local_id, record, self._local_id)

    async def find(self, namespace: str, limit: int = 64) -> tuple[bytes, ...]:
        await anyio.lowlevel.checkpoint()
        self._check_open()
        return self._table.find(namespace, limit, self._local_id)

    def _check_open(self) -> None:
        if self._is_closed():
            raise TransportClosedError("This node's directory is closed.")


class InMemoryNetwork:
    """Connects nodes of one event loop. `random` decides which messages are lost and which neighbours get gossip.

    `default_link` applies to pairs without a link of their own. `now` returns seconds since the epoch, for the age
    of records.
    """

    def __init__(
        self,
        random: Random | None = None,
        *,
        default_link: Link = PERFECT_LINK,
        now: Callable[[], float] = time.time,
        gossip_queue_length: int = 1024,
        record_form: type[DirectoryRecord] = DirectoryRecord,
    ) -> None:
        self._gossip_queue_length = gossip_queue_length
        chance = random or Random(0)  # noqa: S311 - message loss, not secrets
        self.links = Links(chance, default_link)
        self.records = RecordTable(self.links, chance, now, form=record_form)
        self._hub = GossipHub(self.links, chance)
        self._nodes: dict[NodeId, InMemoryNode] = {}
        self._asleep: dict[NodeId, anyio.Event] = {}  # the event is set when the node wakes or dies

    def join(self, node_id: NodeId) -> InMemoryTransport:
        """Create a transport for this node; `network_of` returns the rest.

        Raises ValueError if the node has already joined.
        """
        if node_id in self._nodes:
            raise ValueError(f"{node_id} has already joined")
        gate = MembershipGate()
        transport = InMemoryTransport(self, node_id, gate)
        reputation = Reputation(anyio.current_time)
        gossip = self._hub.join(node_id, reputation, self._gossip_queue_length, gate)
        directory = InMemoryDirectory(self.records, node_id, lambda: transport.is_closed)
        self._nodes[node_id] = InMemoryNode(transport, gossip, directory, reputation, gate)
        return transport

    def network_of(self, node_id: NodeId) -> Network:
        """The network of a node that has joined. Raises PeerUnreachableError if there is no such node."""
        node = self.node(node_id)
        return Network(node.transport, node.gossip, node.directory, node.reputation, node.gate)

    def traffic_of(self, node_id: NodeId) -> GossipCounters:
        """Gossip counters of a node. Raises PeerUnreachableError if there is no such node."""
        return self.node(node_id).gossip.traffic

    def __enter__(self) -> Self:
        """Close the network and all its transports at the end of a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every node."""
        for node_id in tuple(self._nodes):
            self.kill(node_id)

    def set_link(self, sender: NodeId, receiver: NodeId, link: Link) -> None:
        """Set delay, loss and bandwidth of one direction between two nodes."""
        self.links.set_link(sender, receiver, link)

    def set_uplink(self, sender: NodeId, bytes_per_second: float) -> None:
        """Give a node one line for the tensors of its requests and answers to all peers. Gossip does not use it."""
        self.links.set_uplink(sender, bytes_per_second)

    def partition(self, *sides: Iterable[NodeId]) -> None:
        """Drop every message between the sides.

        Nodes of no side still reach all others; without sides, the network heals.
        """
        self.links.partition(*sides)
        self._hub.rewire()

    def suspend(self, node_id: NodeId) -> None:
        """Put a node to sleep: requests and answers to and from it arrive after `wake`. Gossip is not delayed."""
        self._asleep.setdefault(node_id, anyio.Event())

    def wake(self, node_id: NodeId) -> None:
        """Deliver the messages that were delayed while the node slept."""
        waking = self._asleep.pop(node_id, None)
        if waking is not None:
            waking.set()

    def kill(self, node_id: NodeId) -> None:
        """End a node without a goodbye: its transport and gossip close. It can join again, and its records stay."""
        self.wake(node_id)
        node = self._nodes.pop(node_id, None)
        if node is not None:
            self._hub.leave(node_id)
            node.transport.end()

    async def travel(self, sender: NodeId, receiver: NodeId, frame: Frame) -> None:
        """Wait until a message has arrived."""
        size = sum(part.spec.byte_count for part in frame.tensors)
        await anyio.sleep(self.links.seconds_to_arrival(sender, receiver, size, anyio.current_time()))
        while (waking := self._asleep.get(sender) or self._asleep.get(receiver)) is not None:
            await waking.wait()

    def nodes(self) -> tuple[NodeId, ...]:
        """All nodes that have joined and not left."""
        return tuple(self._nodes)

    def node(self, node_id: NodeId) -> InMemoryNode:
        """A node that has joined. Raises PeerUnreachableError if there is no such node."""
        node = self._nodes.get(node_id)
        if node is None:
            raise PeerUnreachableError(f"Peer {node_id} cannot be reached.")
        return node


class InMemoryTransport:
    """One node's end of an InMemoryNetwork. Every node is connected with every other one."""

    def __init__(self, network: InMemoryNetwork, local_id: NodeId, gate: MembershipGate) -> None:
        self._network = network
        self._local_id = local_id
        self._is_closed = False
        self._server = RequestServer(gate)

    @property
    def local_id(self) -> NodeId:
        return self._local_id

    @property
    def is_closed(self) -> bool:
        """Whether this node has left the network."""
        return self._is_closed

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """Ask a peer and wait. A lost message becomes an answer that never comes, so the request times out."""
        if self._is_closed:
            raise TransportClosedError("This node's transport is closed.")
        with anyio.move_on_after(timeout_seconds):
            await self._network.travel(self._local_id, peer, frame)
            receiver = self._network.node(peer).transport
            if self._network.links.is_lost(self._local_id, peer):
                await anyio.sleep_forever()
            answer = await receiver.answer(self._local_id, frame)
            await self._network.travel(peer, self._local_id, answer)
            if self._network.links.is_lost(peer, self._local_id):
                await anyio.sleep_forever()
            return as_received(accepted(peer, answer), reply or FrameLimits())
        raise RequestTimeoutError(f"Peer {peer} did not answer within {timeout_seconds:g} s.")

    def serve(
        self,
        kind: str,
        handler: RequestHandler,
        limits: FrameLimits | None = None,
        *,
        max_concurrent: int = 16,
        admit: Admission | None = None,
        for_anyone: bool = False,
    ) -> None:
        limits = limits or FrameLimits()
        self._server.serve(kind, handler, limits, max_concurrent, admit=admit, for_anyone=for_anyone)

    async def connect(self, address: str, *, is_given: bool = False) -> NodeId:
        """Connect to an address of the form /memory/p2p/<node id>."""
        prefix, _, node_id = address.rpartition("/p2p/")
        if prefix != "/memory":
            raise UsageError(f"{address!r} is not an address of an in-memory network.", "Use /memory/p2p/<node id>.")
        await anyio.lowlevel.checkpoint()
        return self._network.node(NodeId(node_id)).transport.local_id

    def addresses(self) -> tuple[str, ...]:
        return (f"/memory/p2p/{self._local_id}",)

    def peers(self) -> frozenset[NodeId]:
        return frozenset(self._network.nodes()) - {self._local_id}

    def connections(self) -> tuple[Connection, ...]:
        return tuple(
            Connection(node_id, f"/memory/p2p/{node_id}", ConnectionKind.IN_MEMORY, is_outbound=True, since=0.0)
            for node_id in self._network.nodes()
            if node_id != self._local_id
        )

    async def close(self) -> None:
        """Close the transport. The node leaves the network."""
        if not self._is_closed:
            self._network.kill(self._local_id)
        await anyio.lowlevel.checkpoint()

    async def answer(self, sender: NodeId, request: Frame) -> Frame:
        """This node's answer to a request."""
        try:
            if sender != self._local_id:
                self._server.check(sender, request.kind, sum(part.spec.byte_count for part in request.tensors))
            request = as_received(request, self._server.limits_of(request.kind))
        except (RequestRefusedError, WireError) as error:
            return refusal(str(error))
        return await self._server.answer(sender, request)

    def end(self) -> None:
        """Reject further requests of this node and of its peers."""
        self._is_closed = True


@dataclass(frozen=True)
class InMemoryNode:
    """All parts of a node of an InMemoryNetwork."""

    transport: InMemoryTransport
    gossip: InMemoryGossip
    directory: InMemoryDirectory
    reputation: Reputation
    gate: MembershipGate
