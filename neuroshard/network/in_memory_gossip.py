"""Gossip inside one process: messages flood a random mesh, and counters record the messages of each node.

Each listener has about six neighbours in the mesh.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

import anyio

from neuroshard.network.in_memory_links import Links
from neuroshard.network.membership_gate import MembershipGate
from neuroshard.network.reputation import Reputation, ScoreReason
from neuroshard.network.transport import MAX_GOSSIP_BYTES, GossipCheck, MessageTooLargeError, TransportClosedError
from neuroshard.types import NodeId
from neuroshard.waiting import Signal

DEGREE = 6  # neighbours per node on average
NEW_NEIGHBOURS = DEGREE // 2  # of a newcomer; later newcomers choose it as often
LEAST_DEGREE = 4  # a node with fewer looks for new ones when a neighbour leaves
MOST_DEGREE = 12

Separated = Callable[[NodeId, NodeId], bool]


class Mesh:
    """The listeners of one topic and their neighbours. Connections go both ways."""

    def __init__(self, random: Random, are_separated: Separated) -> None:
        self._random = random
        self._are_separated = are_separated
        self._neighbours: dict[NodeId, list[NodeId]] = {}
        self._members: list[NodeId] = []

    def neighbours(self, node_id: NodeId) -> list[NodeId]:
        """The nodes that get gossip from this one: its neighbours, or a few random listeners if it does not listen
        itself.
        """
        if node_id in self._neighbours:
            return self._neighbours[node_id]
        others = self._random.sample(self._members, min(DEGREE, len(self._members)))
        return [other for other in others if not self._are_separated(node_id, other)]

    def add(self, node_id: NodeId) -> None:
        """Add a listener and connect it with a few random others."""
        self._neighbours[node_id] = []
        self._connect(node_id, NEW_NEIGHBOURS)
        self._members.append(node_id)

    def remove(self, node_id: NodeId) -> None:
        """Remove a listener. Neighbours with too few connections look for new ones."""
        left = self._neighbours.pop(node_id, [])
        if node_id in self._members:
            self._members.remove(node_id)
        for other in left:
            self._neighbours[other].remove(node_id)
        for other in left:
            if len(self._neighbours[other]) < LEAST_DEGREE:
                self._connect(other, DEGREE)

    def rewire(self) -> None:
        """Draw all connections again, after a partition started or ended."""
        members = self._random.sample(self._members, len(self._members))
        self._neighbours, self._members = {}, []
        for node_id in members:
            self.add(node_id)

    def _connect(self, node_id: NodeId, degree: int) -> None:
        """Add random connections until a node has `degree` of them or no candidate is left."""
        mine = self._neighbours[node_id]
        for other in self._candidates():
            if len(mine) >= degree:
                return
            theirs = self._neighbours[other]
            if other == node_id or other in mine or len(theirs) >= MOST_DEGREE:
                continue
            if not self._are_separated(node_id, other):
                mine.append(other)
                theirs.append(node_id)

    def _candidates(self) -> Iterator[NodeId]:
        """Members in random order. The first draws nearly always suffice; after them every member is tried once."""
        if self._members:
            yield from self._random.choices(self._members, k=4 * DEGREE)
            yield from self._random.sample(self._members, len(self._members))


SEEN_MESSAGES = 1024  # at least; at most twice this number is remembered
ID_BYTES = 16


@dataclass(frozen=True)
class GossipCounters:
    """Number and bytes of the gossip messages of one node. A size covers topic, id and data of every copy."""

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    duplicates: int = 0  # among the received ones
    refused: int = 0  # among the received ones: the listener's check failed, or the sender is banned


@dataclass(frozen=True)
class _Message:
    topic: str
    message_id: bytes
    size: int  # bytes on a connection
    data: bytes = field(repr=False)


class SeenMessages:
    """Ids of the newest messages, in two generations of at most SEEN_MESSAGES."""

    def __init__(self) -> None:
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def __contains__(self, message_id: bytes) -> bool:
        return message_id in self._young or message_id in self._old

    def add(self, message_id: bytes) -> None:
        """Remember an id and forget the oldest ones."""
        if len(self._young) >= SEEN_MESSAGES:
            self._old, self._young = self._young, set()
        self._young.add(message_id)


class InMemorySubscription:
    """One node's subscription to a topic, with a bounded queue."""

    def __init__(self, owner: InMemoryGossip, topic: str, check: GossipCheck, queue_length: int) -> None:
        self._owner = owner
        self._topic = topic
        self.check = check
        self._queue: deque[bytes] = deque()
        self._queue_length = queue_length
        self._arrival = Signal()
        self._is_closed = False
        self._dropped = 0

    @property
    def dropped(self) -> int:
        return self._dropped

    async def receive(self) -> bytes:
        """Return the next message. Yields to other tasks only when it has to wait."""
        while not self._queue:
            if self._is_closed:
                raise TransportClosedError("This subscription is closed.")
            await self._arrival.wait()
        return self._queue.popleft()

    def close(self) -> None:
        """Close the subscription. Queued messages can still be received."""
        if not self._is_closed:
            self._is_closed = True
            self._owner.forget(self._topic)
            self._arrival.notify()

    def deliver(self, data: bytes) -> None:
        """Queue a message, or drop it when the queue is full."""
        if len(self._queue) >= self._queue_length:
            self._dropped += 1
            return
        self._queue.append(data)
        self._arrival.notify()


class InMemoryGossip:
    """One node's gossip. A node does not receive its own messages."""

    def __init__(
        self, hub: GossipHub, local_id: NodeId, reputation: Reputation, queue_length: int, gate: MembershipGate
    ) -> None:
        self._hub = hub
        self.gate = gate
        self.local_id = local_id
        self._reputation = reputation
        self._queue_length = queue_length
        self._subscriptions: dict[str, InMemorySubscription] = {}
        self._seen = SeenMessages()
        self._is_closed = False
        self._sent = self._sent_bytes = 0
        self._received = self._received_bytes = self._duplicates = self._refused = 0

    async def publish(self, topic: str, data: bytes) -> None:
        """Publish, and return when the last copy has arrived. Cancelling the publisher stops the copies under way."""
        if self._is_closed:
            raise TransportClosedError("This node's gossip is closed.")
        if len(data) > MAX_GOSSIP_BYTES:
            raise MessageTooLargeError(f"Gossip of {len(data)} bytes is above the limit of {MAX_GOSSIP_BYTES}.")
        message_id = blake2b(data, digest_size=ID_BYTES, key=topic.encode()[:64]).digest()
        self._seen.add(message_id)
        size = len(topic.encode()) + ID_BYTES + len(data)
        await self._hub.flood(self, _Message(topic, message_id, size, bytes(data)))

    def subscribe(self, topic: str, check: GossipCheck) -> InMemorySubscription:
        """Listen to a topic. Raises ValueError for a second subscription of one topic."""
        if self._is_closed:
            raise TransportClosedError("This node's gossip is closed.")
        if topic in self._subscriptions:
            raise ValueError(f"{self.local_id} is already subscribed to {topic!r}")
        subscription = InMemorySubscription(self, topic, check, self._queue_length)
        self._subscriptions[topic] = subscription
        self._hub.mesh(topic).add(self.local_id)
        return subscription

    @property
    def traffic(self) -> GossipCounters:
        """Counters since the start."""
        return GossipCounters(
            self._sent, self._received, self._sent_bytes, self._received_bytes, self._duplicates, self._refused
        )

    def forget(self, topic: str) -> None:
        """Leave the mesh of a topic whose subscription was closed."""
        if self._subscriptions.pop(topic, None) is not None:
            self._hub.mesh(topic).remove(self.local_id)

    def end(self) -> None:
        """Close all subscriptions. Pending `receive` calls raise TransportClosedError."""
        self._is_closed = True
        for subscription in tuple(self._subscriptions.values()):
            subscription.close()

    def count_sent(self, size: int, copies: int) -> None:
        """Count copies of a message that leave this node."""
        self._sent += copies
        self._sent_bytes += size * copies

    def accept(self, sender: NodeId, message: _Message) -> bool:
        """Accept a copy that arrived. Returns True if it is new and should be forwarded."""
        subscription = self._subscriptions.get(message.topic)
        if subscription is None:
            return False
        self._received += 1
        self._received_bytes += message.size
        if message.message_id in self._seen:
            self._duplicates += 1
            return False
        if self._reputation.is_banned(sender) or self.gate.refusal(sender):
            self._refused += 1
            return False
        self._seen.add(message.message_id)
        if not subscription.check(sender, message.data):
            self._refused += 1
            self._reputation.report(sender, ScoreReason.REFUSED_GOSSIP)
            return False
        subscription.deliver(message.data)
        return True


_Copy = tuple[InMemoryGossip, InMemoryGossip]  # sender, receiver


class GossipHub:
    """All gossip of one network."""

    def __init__(self, links: Links, random: Random) -> None:
        self._links = links
        self._random = random
        self._nodes: dict[NodeId, InMemoryGossip] = {}
        self._meshes: dict[str, Mesh] = {}

    def join(self, node_id: NodeId, reputation: Reputation, queue_length: int, gate: MembershipGate) -> InMemoryGossip:
        """Create the gossip of one more node."""
        self._nodes[node_id] = InMemoryGossip(self, node_id, reputation, queue_length, gate)
        return self._nodes[node_id]

    def leave(self, node_id: NodeId) -> None:
        """End a node's gossip."""
        self._nodes.pop(node_id).end()

    def mesh(self, topic: str) -> Mesh:
        """The mesh of listeners of one topic."""
        if topic not in self._meshes:
            self._meshes[topic] = Mesh(self._random, self._links.are_separated)
        return self._meshes[topic]

    def rewire(self) -> None:
        """Draw the connections of all meshes again, after a partition started or ended."""
        for mesh in self._meshes.values():
            mesh.rewire()

    async def flood(self, origin: InMemoryGossip, message: _Message) -> None:
        """Carry a message from node to node until no copy is under way."""
        now = anyio.current_time()
        under_way: dict[float, list[_Copy]] = {}
        self._send(origin, None, message, now, under_way)
        await anyio.lowlevel.checkpoint()
        while under_way:
            due = min(under_way)
            if due > anyio.current_time():
                await anyio.sleep_until(due)
            is_simple = self._links.common_delay_seconds is not None
            for sender, receiver in under_way.pop(due):
                if not is_simple and self._links.is_lost(sender.local_id, receiver.local_id):
                    continue
                if receiver.accept(sender.local_id, message):
                    self._send(receiver, sender.local_id, message, due, under_way)

    def _send(
        self,
        sender: InMemoryGossip,
        received_from: NodeId | None,
        message: _Message,
        now: float,
        under_way: dict[float, list[_Copy]],
    ) -> None:
        """Send a copy to every neighbour except the one it came from."""
        neighbours = self.mesh(message.topic).neighbours(sender.local_id)
        others = [self._nodes[peer] for peer in neighbours if peer != received_from and not sender.gate.refusal(peer)]
        sender.count_sent(message.size, len(others))
        delay = self._links.common_delay_seconds
        if delay is not None:
            if others:
                under_way.setdefault(now + delay, []).extend([(sender, other) for other in others])
            return
        for other in others:
            arrival = now + self._links.link(sender.local_id, other.local_id).delay_seconds
            under_way.setdefault(arrival, []).append((sender, other))
