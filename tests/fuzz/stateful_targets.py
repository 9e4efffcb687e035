"""Those who remember what strangers said before: the router of gossip, a connection's streams, and protocol talks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any, cast

import anyio
import trio
from libp2p.abc import ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset
from trio.testing import MockClock

from neuroshard.network.libp2p import streams as yamux
from neuroshard.network.libp2p.gossip_messages import (
    Item,
    ItemKind,
    ItemReader,
    MalformedGossipError,
    TopicId,
    id_items,
    message_id,
    topic_id,
)
from neuroshard.network.libp2p.gossip_router import MOST_DEGREE, GossipRouter, Sends
from neuroshard.network.libp2p.muxer import BoundedMuxer, MuxerOptions
from neuroshard.network.libp2p.negotiation import MAX_LINE_BYTES, NegotiationError, accept, confirm, proposal
from neuroshard.network.libp2p.peer_limits import ConnectionLimits, StreamAdmission
from neuroshard.network.libp2p.streams import YamuxStream
from neuroshard.types import NodeId
from tests.fuzz.message_targets import Reader, at_once
from tests.fuzz.target import Target

TOPICS = tuple(topic_id(f"reports/{number}") for number in range(3))
PEERS = tuple(NodeId(f"peer {number}") for number in range(9))
STREAMS_OF_PEER = 4
SUPPORTED = {"/one/1", "/two/1"}
_PEER = ID(b"peer")


def check_gossip_router(data: bytes) -> None:
    """Items of a stream are dealt out to peers in the order of the first bytes; the router keeps its own rules."""
    order, stream = data[:16] or b"\0", data[16:]
    try:
        items = ItemReader().feed(stream)
    except MalformedGossipError:
        return
    router = GossipRouter(Random(1))
    for topic in TOPICS[:2]:
        router.subscribe(topic, 0.0)
    for peer in PEERS:
        router.join(peer)
    delivered: set[tuple[TopicId, bytes]] = set()
    for number, item in enumerate(items):
        now, peer = number / 4, PEERS[order[number % len(order)] % len(PEERS)]
        result = router.handle(peer, item, now, lambda _topic, _peer, message: not message.startswith(b"bad"))
        if result.delivered is not None:
            assert (item.topic, result.delivered) not in delivered
            assert item.topic in TOPICS[:2]
            delivered.add((item.topic, result.delivered))
        check_sends(router, result.sends)
        if number % 4 == 3:
            check_sends(router, router.heartbeat(now))
    for peer in PEERS:
        router.leave(peer)
    assert not router.linked_peers()


def check_sends(router: GossipRouter, sends: Sends) -> None:
    """What goes out can be read by the other side, goes to peers that are there, and links stay few."""
    for peer, item in sends:
        assert peer in PEERS
        assert ItemReader().feed(item.encode()) == [item]
    for topic in TOPICS:
        assert len(router.links(topic)) <= MOST_DEGREE


def gossip_router_seeds() -> tuple[bytes, ...]:
    """Peers that listen, link, tell and ask."""
    first, second, foreign = TOPICS
    messages = [Item(ItemKind.MESSAGE, first, bytes([number]) * 30) for number in range(3)]
    ids = [message_id(message.topic, message.payload) for message in messages]
    listening = [Item(ItemKind.SUBSCRIBE, topic) for topic in TOPICS for _ in range(3)]
    grafts = [Item(ItemKind.GRAFT, topic) for topic in (first, first, second, foreign)]
    talks = (
        [*listening, *grafts, *messages, *messages],
        [*grafts, *id_items(ItemKind.HAVE, first, ids), *messages, *id_items(ItemKind.WANT, first, ids)],
        [Item(kind, first) for kind in ItemKind if kind is not ItemKind.MESSAGE],
        [Item(ItemKind.GRAFT, first)] * 12 + [Item(ItemKind.CHOKE, first), Item(ItemKind.PRUNE, first)],
    )
    return tuple(bytes(range(16)) + b"".join(item.encode() for item in talk) for talk in talks)


class ScriptedConnection:
    """A secured connection whose other side has said everything already."""

    is_initiator = False

    def __init__(self, data: bytes, portion: int) -> None:
        self._data = data
        self._portion = portion
        self.written = b""

    async def read(self, _: int | None = None) -> bytes:
        """The next portion."""
        for _ in range(3):  # so that those who wait for streams and bytes get their turn
            await trio.lowlevel.checkpoint()
        piece, self._data = self._data[: self._portion], self._data[self._portion :]
        if not piece:
            raise ConnectionClosedError("ended")
        return piece

    async def write(self, data: bytes) -> None:
        """Keep it."""
        await trio.lowlevel.checkpoint()
        self.written += data

    async def close(self) -> None:
        """Nothing to close."""
        await trio.lowlevel.checkpoint()

    def get_remote_address(self) -> None:
        """Unknown."""

    def get_connection_type(self) -> ConnectionType:
        """As any other."""
        return ConnectionType.DIRECT


def check_muxer(data: bytes) -> None:
    """The first byte sizes the portions. However the other side talks, the connection just ends, and nothing stays."""
    if data:
        trio.run(_connection, data[1:], 1 + 8 * data[0], clock=MockClock(autojump_threshold=0))


async def _connection(data: bytes, portion: int) -> None:
    conn = ScriptedConnection(data, portion)
    admission = StreamAdmission(ConnectionLimits(streams_of_peer=STREAMS_OF_PEER))
    muxer = BoundedMuxer(cast("ISecureConn", conn), _PEER, MuxerOptions(admission))
    accepted: list[YamuxStream] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_serve, muxer, admission, accepted)
        with trio.fail_after(1000):
            await muxer.start()
    assert admission.open_streams(_PEER) == 0
    assert not any(stream.unread for stream in accepted)
    rest = b"".join(written_frames(conn.written))
    assert rest == conn.written


async def _serve(muxer: BoundedMuxer, admission: StreamAdmission, accepted: list[YamuxStream]) -> None:
    async with anyio.create_task_group() as tasks:
        with suppress(MuxedConnUnavailable):
            while True:
                stream = cast("YamuxStream", await muxer.accept_stream())
                assert admission.open_streams(_PEER) <= STREAMS_OF_PEER
                accepted.append(stream)
                if stream.stream_id % 8 != 7:  # that one is never read
                    tasks.start_soon(_echo, stream)


async def _echo(stream: YamuxStream) -> None:
    with suppress(MuxedStreamEOF, MuxedStreamReset, MuxedStreamClosed, MuxedConnUnavailable):
        while True:
            data = await stream.read(100)
            assert 0 < len(data) <= 100
            if data[:1] == b"w":
                await stream.write(data[:50])
            if data[:1] == b"r":
                await stream.reset()
            if data[:1] == b"c":
                await stream.close()


def written_frames(data: bytes) -> Iterator[bytes]:
    """What a node wrote, read as the other side reads it and written again."""
    for event in yamux.FrameParser().feed(data):
        if isinstance(event, yamux.Payload):
            yield bytes(event.data)
        else:
            yield yamux.header_bytes(event.type, event.flags, event.stream_id, event.length)


def muxer_seeds() -> tuple[bytes, ...]:
    """Talks on several streams, good and bad."""
    header = yamux.header_bytes
    new = [header(yamux.WINDOW_UPDATE, yamux.SYN, number, 0) for number in range(1, 15, 2)]
    said = [header(yamux.DATA, 0, number, 6) + b"writes" for number in (1, 3, 7)]
    ended = [header(yamux.DATA, yamux.FIN, 1, 6) + b"closes", header(yamux.WINDOW_UPDATE, yamux.FIN, 3, 0)]
    reset = [header(yamux.WINDOW_UPDATE, yamux.RST, number, 0) for number in (5, 7)]
    short = header(yamux.DATA, yamux.SYN | yamux.FIN, 1, 5) + b"reset"
    talks = (
        [*new[:3], *said[:2], *ended, *reset],
        [*new, *said, *reset, *new],
        [short, header(yamux.PING, yamux.SYN, 0, 9), header(yamux.GO_AWAY, 0, 0, 0)],
        [new[0], header(yamux.DATA, 0, 1, yamux.INITIAL_WINDOW + 1)],
        [new[0], new[0]],
        [header(yamux.WINDOW_UPDATE, yamux.SYN, 2, 0)],
        [header(yamux.DATA, 0, 0, 0), new[3], header(yamux.WINDOW_UPDATE, 0, 7, 2**32 - 1), said[2]],
    )
    return tuple(bytes([5 * number]) + b"".join(talk) for number, talk in enumerate(talks))


class Talker(Reader):
    """A reader that takes what is written to it."""

    def __init__(self, data: bytes, portion: int) -> None:
        super().__init__(data, portion)
        self.written = b""

    @property
    def unread(self) -> int:
        """As a stream whose bytes come one after the other."""
        return len(self._data) % 3

    async def write(self, data: bytes) -> None:
        """Keep it."""
        self.written += data


def check_negotiation(data: bytes) -> None:
    """The first byte sizes the portions and chooses the side. Only what is supported is agreed on."""
    if not data:
        return
    talker = Talker(data[1:], 1 + data[0])
    stream = cast("YamuxStream", talker)
    try:
        if data[0] % 2:
            at_once(confirm(stream, "/one/1"))
            assert data[1:].startswith(proposal("/one/1"))
        else:
            agreed: Any = at_once(accept(stream, SUPPORTED))
            assert agreed in SUPPORTED
            assert talker.written.endswith(proposal(agreed)[-len(agreed) - 2 :])
    except (NegotiationError, MuxedStreamEOF):
        pass
    assert talker.largest <= MAX_LINE_BYTES
    assert len(talker.written) <= 100


def negotiation_seeds() -> tuple[bytes, ...]:
    """Proposals and answers to them."""
    other = proposal("/other/1")[20:]
    talks = (proposal("/one/1"), proposal("/other/1") + other * 9, proposal("/other/1") + b"\7/two/1\n", b"\0", b"\xff")
    return tuple(bytes([side]) + talk for side in (30, 31) for talk in talks)


TARGETS = (
    Target("gossip-router", check_gossip_router, gossip_router_seeds, short_inputs=500),
    Target("muxer", check_muxer, muxer_seeds, short_inputs=150),
    Target("negotiation", check_negotiation, negotiation_seeds),
)
