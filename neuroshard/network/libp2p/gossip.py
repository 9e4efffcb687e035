"""Gossip over libp2p streams: the router decides, this file sends, receives and runs the heartbeat."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio
import trio
from anyio.abc import TaskGroup
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError

from neuroshard.network.libp2p.connections import Connections
from neuroshard.network.libp2p.gossip_messages import (
    Item,
    ItemKind,
    ItemReader,
    MalformedGossipError,
    TopicId,
    packed,
    topic_id,
    unpacked,
)
from neuroshard.network.libp2p.gossip_router import HEARTBEAT_SECONDS, GossipRouter, Sends
from neuroshard.network.libp2p.host import stream_of
from neuroshard.network.libp2p.negotiation import NegotiationError, confirm, proposal
from neuroshard.network.membership_gate import MembershipGate
from neuroshard.network.reputation import ScoreReason
from neuroshard.network.transport import MAX_GOSSIP_BYTES, GossipCheck, MessageTooLargeError, TransportClosedError
from neuroshard.types import NodeId
from neuroshard.waiting import Signal

GOSSIP_PROTOCOL = "/neuroshard/gossip/1"
QUEUE_LENGTH = 512  # unread messages per topic
MAX_WAITING_BYTES = 1024 * 1024  # for one peer; further items are dropped
STALE_SECONDS = 30.0  # a message that waited longer, as on a stalled connection, is dropped: newer ones follow it
WRITE_BYTES = 64 * 1024
RETRY_SECONDS = 1.0  # doubles up to
LONGEST_RETRY_SECONDS = 60.0
FLUSH_SECONDS = 1.0
_PASSING = frozenset({ItemKind.MESSAGE, ItemKind.HAVE, ItemKind.WANT})


class GossipSubscription:
    """One node's subscription to a topic, with a bounded queue."""

    def __init__(self, check: GossipCheck, forget: Callable[[], None]) -> None:
        self.check = check
        self._forget = forget
        self._queue: deque[bytes] = deque()
        self._arrival = Signal()
        self._is_closed = False
        self._dropped = 0

    @property
    def dropped(self) -> int:
        return self._dropped

    async def receive(self) -> bytes:
        """Return the next message. Yields only when it has to wait; otherwise a burst would overflow the queue."""
        while not self._queue:
            if self._is_closed:
                raise TransportClosedError("This subscription is closed.")
            await self._arrival.wait()
        return self._queue.popleft()

    def close(self) -> None:
        """Close the subscription. Queued messages can still be received."""
        if not self._is_closed:
            self._is_closed = True
            self._forget()
            self._arrival.notify()

    def deliver(self, data: bytes) -> None:
        """Queue a message, or drop it if the queue is full."""
        if len(self._queue) >= QUEUE_LENGTH:
            self._dropped += 1
            return
        self._queue.append(data)
        self._arrival.notify()


class _Outbox:
    """Queued items for one peer."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self._items: deque[tuple[float, Item]] = deque()  # items with the time at which each was queued
        self._bytes = 0
        self._added = Signal()
        self._is_writing = False

    @property
    def is_empty(self) -> bool:
        """Whether the connection has accepted all items."""
        return not self._items and not self._is_writing

    def add(self, item: Item, now: float) -> None:
        """Queue an item, or drop it if the peer accepts them too slowly."""
        if self._bytes + item.byte_count > MAX_WAITING_BYTES:
            self._drop_stale(now)
        if self._bytes + item.byte_count > MAX_WAITING_BYTES:
            return
        self._items.append((now, item))
        self._bytes += item.byte_count
        self._added.notify()

    def clear(self) -> None:
        """Drop all items, because the stream starts again."""
        self._items.clear()
        self._bytes = 0
        self._is_writing = False

    async def next(self) -> bytes:
        """Wait for items to write together. The call also reports that the items of the call before are written."""
        self._is_writing = False
        self._drop_stale(trio.current_time())
        await self._added.until(lambda: bool(self._items))
        portion = [self._taken()]
        size = len(portion[0])
        while self._items and size + self._items[0][1].byte_count <= WRITE_BYTES:
            portion.append(self._taken())
            size += len(portion[-1])
        self._is_writing = True
        return b"".join(portion)

    def _taken(self) -> bytes:
        _, item = self._items.popleft()
        self._bytes -= item.byte_count
        return item.encode()

    def _drop_stale(self, now: float) -> None:
        """Drop old messages and ids. Items about topics and links stay valid."""
        lasting: list[tuple[float, Item]] = []
        while self._items and now - self._items[0][0] > STALE_SECONDS:
            since, item = self._items.popleft()
            if item.kind in _PASSING:
                self._bytes -= item.byte_count
            else:
                lasting.append((since, item))
        self._items.extendleft(reversed(lasting))


class Libp2pGossip:
    """One node's gossip. A node does not receive its own messages."""

    def __init__(
        self,
        connections: Connections,
        report: Callable[[NodeId, ScoreReason], None],
        tasks: TaskGroup,
        router: GossipRouter,
        gate: MembershipGate,
    ) -> None:
        self._gate = gate
        self._connections = connections
        self._report = report
        self._tasks = tasks
        self._router = router
        self._outboxes: dict[NodeId, _Outbox] = {}
        self._subscriptions: dict[TopicId, GossipSubscription] = {}
        self._is_closed = False

    @property
    def router(self) -> GossipRouter:
        """The router, for counters and tests."""
        return self._router

    async def publish(self, topic: str, data: bytes) -> None:
        self._check_open()
        if len(data) > MAX_GOSSIP_BYTES:
            raise MessageTooLargeError(f"Gossip of {len(data)} bytes is above the limit of {MAX_GOSSIP_BYTES}.")
        await anyio.lowlevel.checkpoint()
        self._send(self._router.publish(topic_id(topic), packed(data), trio.current_time()))

    def subscribe(self, topic: str, check: GossipCheck) -> GossipSubscription:
        """Listen to a topic. Raises ValueError for a second subscription of one topic."""
        self._check_open()
        name = topic_id(topic)
        if name in self._subscriptions:
            raise ValueError(f"this node is already subscribed to {topic!r}")

        def forget() -> None:
            self._subscriptions.pop(name, None)
            self._send(self._router.unsubscribe(name))

        subscription = self._subscriptions[name] = GossipSubscription(check, forget)
        self._send(self._router.subscribe(name, trio.current_time()))
        return subscription

    async def run(self) -> None:
        """Run the heartbeat until cancelled."""
        while True:
            await trio.sleep(HEARTBEAT_SECONDS)
            self._send(self._router.heartbeat(trio.current_time()))

    async def flush(self) -> None:
        """Wait briefly until the connections have accepted published items, so that a goodbye is sent before the node
        ends.
        """
        with anyio.move_on_after(FLUSH_SECONDS):
            while not all(outbox.is_empty for outbox in self._outboxes.values()):
                await anyio.sleep(FLUSH_SECONDS / 100)

    def close(self) -> None:
        """Close all subscriptions. Pending `receive` calls raise TransportClosedError."""
        self._is_closed = True
        for subscription in tuple(self._subscriptions.values()):
            subscription.close()

    def meet(self, peer: NodeId) -> None:
        """Handle the start of the first connection with a peer."""
        if peer not in self._outboxes:
            outbox = self._outboxes[peer] = _Outbox()
            self._tasks.start_soon(self._talk, peer, outbox)

    def part(self, peer: NodeId) -> None:
        """Handle the end of the last connection with a peer."""
        outbox = self._outboxes.pop(peer, None)
        if outbox is not None:
            outbox.scope.cancel()
        self._router.leave(peer)

    async def handle_stream(self, net_stream: INetStream) -> None:
        """Read a peer's items until its stream ends."""
        peer = NodeId(str(net_stream.muxed_conn.peer_id))
        stream, reader = stream_of(net_stream), ItemReader()
        try:
            while True:
                for item in reader.feed(await stream.read(WRITE_BYTES)):
                    self._hear(peer, item)
        except MalformedGossipError:
            self._report(peer, ScoreReason.MALFORMED_FRAME)
        finally:
            stream.abandon()
            if self._connections.of(peer) is None:  # its last items may arrive after `part`
                self._router.leave(peer)

    def _hear(self, peer: NodeId, item: Item) -> None:
        if item.kind in _PASSING and self._gate.refusal(peer):
            return  # topics and links are heard before the peer is let in, because the peer says them only once
        received = self._router.handle(peer, item, trio.current_time(), self._check)
        self._send(received.sends)
        if received.is_flood:
            self._report(peer, ScoreReason.FLOOD)
        if received.is_refused:
            self._report(peer, ScoreReason.REFUSED_GOSSIP)
        subscription = self._subscriptions.get(item.topic)
        if received.delivered is not None and subscription is not None:
            subscription.deliver(unpacked(received.delivered))

    def _check(self, topic: TopicId, peer: NodeId, payload: bytes) -> bool:
        subscription = self._subscriptions.get(topic)
        try:
            return subscription is not None and subscription.check(peer, unpacked(payload))
        except MalformedGossipError:
            return False

    def _send(self, sends: Sends) -> None:
        now = trio.current_time()
        for peer, item in sends:
            outbox = self._outboxes.get(peer)
            if outbox is not None and not (item.kind in _PASSING and self._gate.refusal(peer)):
                outbox.add(item, now)

    async def _talk(self, peer: NodeId, outbox: _Outbox) -> None:
        """Keep a stream to the peer while it is connected and supports the protocol."""
        pause = RETRY_SECONDS
        with outbox.scope:
            while True:
                began = trio.current_time()
                try:
                    await self._talk_once(peer, outbox)
                except NegotiationError:
                    return  # the peer does not support gossip
                except BaseLibp2pError:
                    pause = RETRY_SECONDS if trio.current_time() - began > LONGEST_RETRY_SECONDS else pause
                await trio.sleep(pause)
                pause = min(2 * pause, LONGEST_RETRY_SECONDS)

    async def _talk_once(self, peer: NodeId, outbox: _Outbox) -> None:
        muxer = self._connections.of(peer)
        if muxer is None:
            return
        stream = await muxer.open_stream()
        try:
            outbox.clear()
            self._send(self._router.join(peer))
            await stream.write(proposal(GOSSIP_PROTOCOL))
            await confirm(stream, GOSSIP_PROTOCOL)
            while True:
                await stream.write(await outbox.next())
        finally:
            stream.abandon()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportClosedError("This node's gossip is closed.")
