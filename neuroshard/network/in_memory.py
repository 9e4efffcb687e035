"""A network inside one process, for a node alone and for tests: bounded queues, and every trouble on demand."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from random import Random
from typing import Self, TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from neuroshard.network.transport import (
    Message,
    MessageTooLargeError,
    PeerUnreachableError,
    TransportClosedError,
)
from neuroshard.types import NodeId

MAX_KINDS = 64  # inboxes of one node
MAX_KIND_CHARACTERS = 64

_Queue: TypeAlias = tuple[MemoryObjectSendStream[Message], MemoryObjectReceiveStream[Message]]


@dataclass(frozen=True)
class Link:
    """How messages fare from one node to another."""

    delay_seconds: float = 0.0
    loss: float = 0.0  # share of messages that vanish

    def __post_init__(self) -> None:
        if not (0 <= self.delay_seconds < math.inf and 0 <= self.loss <= 1):
            raise ValueError(f"a link needs a finite delay and a loss in [0, 1], got {self}")


class InMemoryNetwork:
    """Joins transports of one event loop. `random` decides which messages are lost."""

    def __init__(
        self, random: Random | None = None, queue_length: int = 64, max_payload_bytes: int = 256 * 1024 * 1024
    ) -> None:
        self._random = random or Random(0)  # noqa: S311 - losses, not secrets
        self.queue_length = queue_length
        self.max_payload_bytes = max_payload_bytes
        self._transports: dict[NodeId, InMemoryTransport] = {}
        self._links: dict[tuple[NodeId, NodeId], Link] = {}
        self._sides: tuple[frozenset[NodeId], ...] = ()

    def join(self, node_id: NodeId) -> InMemoryTransport:
        """A transport for this node. Raises ValueError while the node already has one."""
        if node_id in self._transports:
            raise ValueError(f"{node_id} has already joined")
        transport = InMemoryTransport(self, node_id)
        self._transports[node_id] = transport
        return transport

    def __enter__(self) -> Self:
        """For `with`: the network and all its transports are closed at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every node."""
        for node_id in tuple(self._transports):
            self.kill(node_id)

    def set_link(self, sender: NodeId, receiver: NodeId, link: Link) -> None:
        """Change one direction between two nodes."""
        self._links[sender, receiver] = link

    def partition(self, *sides: Iterable[NodeId]) -> None:
        """Swallow every message between the sides; nodes of no side still reach everybody. Without sides: heal."""
        self._sides = tuple(frozenset(side) for side in sides)

    def kill(self, node_id: NodeId) -> None:
        """End a node without a word: its transport closes and it can join again."""
        transport = self._transports.pop(node_id, None)
        if transport is not None:
            transport.end()

    def transport_of(self, node_id: NodeId) -> InMemoryTransport | None:
        """The transport of a node, or None when there is no such node (any more)."""
        return self._transports.get(node_id)

    def link(self, sender: NodeId, receiver: NodeId) -> Link:
        """How messages fare between two nodes."""
        return self._links.get((sender, receiver), Link())

    def is_lost(self, sender: NodeId, receiver: NodeId) -> bool:
        """Whether the next message vanishes; draws from `random` on a lossy link."""
        if _separated(self._sides, sender, receiver):
            return True
        loss = self.link(sender, receiver).loss
        return loss > 0 and self._random.random() < loss


def _separated(sides: Collection[frozenset[NodeId]], sender: NodeId, receiver: NodeId) -> bool:
    return any(sender in side and receiver not in side and receiver in other for side in sides for other in sides)


class InMemoryTransport:
    """One node's end of an InMemoryNetwork; see Transport."""

    def __init__(self, network: InMemoryNetwork, local_id: NodeId) -> None:
        self._network = network
        self._local_id = local_id
        self._queues: dict[str, _Queue] = {}
        self._ended = False

    @property
    def local_id(self) -> NodeId:
        """This node."""
        return self._local_id

    async def send(self, peer: NodeId, kind: str, payload: bytes) -> None:
        """See Transport; returns when the message lies in the peer's queue or is lost."""
        if self._ended:
            raise TransportClosedError("This node's transport is closed.")
        if len(payload) > self._network.max_payload_bytes:
            raise MessageTooLargeError(f"A message of {len(payload)} bytes is above the limit.")
        await anyio.sleep(self._network.link(self._local_id, peer).delay_seconds)
        receiver = self._network.transport_of(peer)
        if receiver is None:
            raise PeerUnreachableError(f"Peer {peer} cannot be reached.")
        if not self._network.is_lost(self._local_id, peer):
            await receiver.deliver(Message(self._local_id, kind, payload))

    async def receive(self, kind: str) -> Message:
        """See Transport."""
        try:
            return await self._queue(kind)[1].receive()
        except (anyio.ClosedResourceError, anyio.EndOfStream):
            raise TransportClosedError("This node's transport is closed.") from None

    async def close(self) -> None:
        """See Transport; the node leaves the network."""
        if not self._ended:
            self._network.kill(self._local_id)
        await anyio.lowlevel.checkpoint()

    async def deliver(self, message: Message) -> None:
        """Put a message into this node's queue, waiting while it is full. Raises PeerUnreachableError when it ends."""
        # strangers may open some queues, since messages may come before their reader; but not any number of them
        if message.kind not in self._queues and (
            len(self._queues) >= MAX_KINDS or len(message.kind) > MAX_KIND_CHARACTERS
        ):
            raise PeerUnreachableError(f"Peer {self._local_id} does not know messages of kind {message.kind[:64]!r}.")
        try:
            await self._queue(message.kind)[0].send(message)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, TransportClosedError):
            raise PeerUnreachableError(f"Peer {self._local_id} went away.") from None

    def end(self) -> None:
        """Close all queues."""
        self._ended = True
        for sender, receiver in self._queues.values():
            sender.close()
            receiver.close()

    def _queue(self, kind: str) -> _Queue:
        if self._ended:
            raise TransportClosedError("This node's transport is closed.")
        if kind not in self._queues:
            self._queues[kind] = anyio.create_memory_object_stream[Message](self._network.queue_length)
        return self._queues[kind]
