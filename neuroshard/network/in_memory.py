"""A network inside one process, for a node alone and for tests: bounded queues, and every trouble on demand."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from random import Random
from typing import Self

import anyio

from neuroshard.errors import UsageError
from neuroshard.network.inboxes import Inboxes
from neuroshard.network.serving import RequestServer, accepted, refusal
from neuroshard.network.transport import (
    Connection,
    Message,
    MessageTooLargeError,
    PeerUnreachableError,
    RequestHandler,
    RequestRefusedError,
    RequestTimeoutError,
    TransportClosedError,
)
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId
from neuroshard.wire import Frame, FrameLimits, WireError, check_limits


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

    def nodes(self) -> tuple[NodeId, ...]:
        """All nodes that are there now."""
        return tuple(self._transports)

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
    """One node's end of an InMemoryNetwork; see Transport. Everybody is connected with everybody."""

    def __init__(self, network: InMemoryNetwork, local_id: NodeId) -> None:
        self._network = network
        self._local_id = local_id
        self._inboxes = Inboxes(local_id, network.queue_length)
        self._server = RequestServer()

    @property
    def local_id(self) -> NodeId:
        """This node."""
        return self._local_id

    async def send(self, peer: NodeId, kind: str, payload: bytes) -> None:
        """See Transport; returns when the message lies in the peer's queue or is lost."""
        self._check_open()
        if len(payload) > self._network.max_payload_bytes:
            raise MessageTooLargeError(f"A message of {len(payload)} bytes is above the limit.")
        await anyio.sleep(self._network.link(self._local_id, peer).delay_seconds)
        receiver = self._reachable(peer)
        if not self._network.is_lost(self._local_id, peer):
            await receiver.deliver(Message(self._local_id, kind, payload))

    async def receive(self, kind: str) -> Message:
        """See Transport."""
        return await self._inboxes.receive(kind)

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """See Transport; a lost message is an answer that never comes."""
        self._check_open()
        with anyio.move_on_after(timeout_seconds):
            await anyio.sleep(self._network.link(self._local_id, peer).delay_seconds)
            receiver = self._reachable(peer)
            if self._network.is_lost(self._local_id, peer):
                await anyio.sleep_forever()
            answer = await receiver.answer(self._local_id, frame)
            await anyio.sleep(self._network.link(peer, self._local_id).delay_seconds)
            if self._network.is_lost(peer, self._local_id):
                await anyio.sleep_forever()
            check_limits(answer, reply or FrameLimits())
            return accepted(peer, answer)
        raise RequestTimeoutError(f"Peer {peer} did not answer within {timeout_seconds:g} s.")

    def serve(
        self, kind: str, handler: RequestHandler, limits: FrameLimits | None = None, *, max_concurrent: int = 16
    ) -> None:
        """See Transport."""
        self._server.serve(kind, handler, limits or FrameLimits(), max_concurrent)

    async def connect(self, address: str) -> NodeId:
        """See Transport; addresses read /memory/p2p/<node id>."""
        prefix, _, node_id = address.rpartition("/p2p/")
        if prefix != "/memory":
            raise UsageError(f"{address!r} is no address of an in-memory network.", "It reads /memory/p2p/<node id>.")
        await anyio.lowlevel.checkpoint()
        return self._reachable(NodeId(node_id)).local_id

    def addresses(self) -> tuple[str, ...]:
        """See Transport."""
        return (f"/memory/p2p/{self._local_id}",)

    def connections(self) -> tuple[Connection, ...]:
        """See Transport."""
        others = (node_id for node_id in self._network.nodes() if node_id != self._local_id)
        return tuple(
            Connection(node_id, f"/memory/p2p/{node_id}", ConnectionKind.IN_MEMORY, is_outbound=True, since=0.0)
            for node_id in others
        )

    async def close(self) -> None:
        """See Transport; the node leaves the network."""
        if not self._inboxes.is_closed:
            self._network.kill(self._local_id)
        await anyio.lowlevel.checkpoint()

    async def deliver(self, message: Message) -> None:
        """Put a message into this node's queue, waiting while it is full. Raises PeerUnreachableError when it ends."""
        await self._inboxes.deliver(message)

    async def answer(self, sender: NodeId, request: Frame) -> Frame:
        """This node's answer to a request."""
        try:
            check_limits(request, self._server.limits_of(request.kind))
        except (RequestRefusedError, WireError) as error:
            return refusal(str(error))
        return await self._server.answer(sender, request)

    def end(self) -> None:
        """Close all queues."""
        self._inboxes.close()

    def _check_open(self) -> None:
        if self._inboxes.is_closed:
            raise TransportClosedError("This node's transport is closed.")

    def _reachable(self, peer: NodeId) -> InMemoryTransport:
        receiver = self._network.transport_of(peer)
        if receiver is None:
            raise PeerUnreachableError(f"Peer {peer} cannot be reached.")
        return receiver
