"""Readers of packets: some stand alone (gossip, pool, yamux, routers, the local network), others have a memory.

The router of gossip, the streams of a connection and the negotiation of a protocol remember what strangers sent before.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_network
from random import Random
from struct import Struct
from typing import Any, cast

import anyio
import trio
from libp2p.abc import ISecureConn
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamClosed, MuxedStreamEOF, MuxedStreamReset
from trio.testing import MockClock

from neuroshard.config.multiaddr import checked_multiaddr
from neuroshard.identity import NodeKey
from neuroshard.network.libp2p import streams as yamux
from neuroshard.network.libp2p.addresses import parse_address
from neuroshard.network.libp2p.gossip_messages import (
    HEAD_BYTES,
    ID_BYTES,
    MAX_IDS,
    Item,
    ItemKind,
    ItemReader,
    MalformedGossipError,
    TopicId,
    id_items,
    message_id,
    packed,
    topic_id,
    unpacked,
)
from neuroshard.network.libp2p.gossip_router import MOST_DEGREE, GossipRouter, Sends
from neuroshard.network.libp2p.muxer import BoundedMuxer, MuxerOptions
from neuroshard.network.libp2p.negotiation import MAX_LINE_BYTES, NegotiationError, accept_protocol, confirm, proposal
from neuroshard.network.libp2p.peer_limits import ConnectionLimits, StreamAdmission
from neuroshard.network.libp2p.streams import YamuxStream
from neuroshard.network.mdns import MAX_ADDRESSES, announcement, question, read_packet
from neuroshard.network.nat.nat_pmp import (
    ExternalHost,
    MappedPort,
    NatPmpRefusal,
    mapping_question,
    read_external_host,
    read_mapping,
)
from neuroshard.network.nat.router import RouterRefusedError
from neuroshard.network.pool.options import MisconductError
from neuroshard.network.pool.transfers import (
    HEADER_BYTES,
    MAX_CHUNKS,
    PacketKind,
    encode_masks,
    is_newer,
    next_serial,
    packet,
    parse_header,
    parse_masks,
)
from neuroshard.network.transport import MAX_GOSSIP_BYTES
from neuroshard.types import NodeId
from tests.fuzz.message_targets import Reader, at_once
from tests.fuzz.target import Target

NODE = NodeKey.from_seed(bytes(range(32))).node_id
OTHER = NodeKey.from_seed(bytes(range(1, 33))).node_id
LAN = (ip_network("192.0.2.0/24"), ip_network("2001:db8::/64"))
INNER_PORT = 4001
_ANSWER = Struct("!BBHIHHI")
_TOPIC = topic_id("reports")


def check_gossip_items(data: bytes) -> None:
    """The first byte sizes the portions: items do not depend on them, and are what was written."""
    if not data:
        return
    whole = items_of(data[1:], len(data))
    assert items_of(data[1:], 1 + data[0]) == whole
    items, is_refused = whole
    assert is_refused or data[1:].startswith(b"".join(item.encode() for item in items))
    for item in items:
        assert item.byte_count <= HEAD_BYTES + 1 + MAX_GOSSIP_BYTES
        if item.kind in {ItemKind.HAVE, ItemKind.WANT}:
            assert len(item.ids()) <= MAX_IDS
            assert all(len(message) == ID_BYTES for message in item.ids())
            assert b"".join(item.ids()) == item.payload
            assert list(id_items(item.kind, item.topic, item.ids())) == ([item] if item.payload else [])
        elif item.kind is ItemKind.MESSAGE:
            check_gossip_message(item.payload)


def items_of(data: bytes, portion: int) -> tuple[list[Item], bool]:
    """The items of a stream up to the portion that is refused, and whether one is."""
    reader = ItemReader()
    items: list[Item] = []
    for start in range(0, len(data), portion):
        try:
            items += reader.feed(data[start : start + portion])
        except MalformedGossipError:
            return [], True
    return items, False


def check_gossip_message(payload: bytes) -> None:
    """A message that is inflated is short, and can be deflated again."""
    try:
        message = unpacked(payload)
    except MalformedGossipError:
        return
    if payload.startswith(b"\1"):
        assert len(message) <= MAX_GOSSIP_BYTES
        assert zlib.decompress(payload[1:], wbits=-zlib.MAX_WBITS) == message
    else:
        assert payload == b"\0" + message
    assert unpacked(packed(message)) == message


def gossip_item_seeds() -> tuple[bytes, ...]:
    """Every kind of item, and several at once."""
    topic = _TOPIC
    ids = [message_id(topic, bytes([number])) for number in range(5)]
    items = [
        *(Item(kind, topic) for kind in ItemKind),
        Item(ItemKind.MESSAGE, topic, packed(b"abc" * 100)),
        Item(ItemKind.MESSAGE, topic, packed(b"short")),
        *id_items(ItemKind.HAVE, topic, ids),
        *id_items(ItemKind.WANT, topic, ids[:1]),
    ]
    encoded = [item.encode() for item in items]
    bad = bytes([ItemKind.HAVE]) + (ID_BYTES * (MAX_IDS + 1)).to_bytes(3) + topic
    return tuple(bytes([7 * i]) + data for i, data in enumerate([*encoded, b"".join(encoded), bad]))


def gossip_message_seeds() -> tuple[bytes, ...]:
    """Messages as they travel, one of them a bomb."""
    return (packed(b"abc" * 100), packed(b"x"), packed(b""), packed(bytes(MAX_GOSSIP_BYTES)), packed(bytes(10**6)))


def check_pool_packet(data: bytes) -> None:
    """A header that is read is written alike; masks too, when there are as many as there should be."""
    if len(data) < HEADER_BYTES:
        return
    try:
        header = parse_header(data[:HEADER_BYTES])
    except MisconductError:
        return
    assert header.encode() == data[:HEADER_BYTES]
    payload = data[HEADER_BYTES : HEADER_BYTES + header.length]
    chunk_count = header.length // 2 % (MAX_CHUNKS + 1)
    with suppress(MisconductError):
        assert encode_masks(parse_masks(payload, chunk_count)) == payload
    assert is_newer(next_serial(header.serial), header.serial)
    assert not is_newer(header.serial, header.serial)


def pool_packet_seeds() -> tuple[bytes, ...]:
    """Every kind, with and without a payload."""
    masks = encode_masks([0xFFFF, 1, 0])
    packets = [packet(kind, 7, masks, extra=3, serial=2) for kind in PacketKind]
    return (*packets, *(packet(kind, 2**64 - 1) for kind in PacketKind))


def check_yamux(data: bytes) -> None:
    """The first byte sizes the portions; frames do not depend on them, and together they are the bytes that came."""
    if not data:
        return
    whole, error = yamux_of(data[1:], len(data))
    assert yamux_of(data[1:], 1 + data[0]) == (whole, error)
    assert data[1:].startswith(whole)
    assert error or len(data) - 1 - len(whole) < yamux.HEADER.size


def yamux_of(data: bytes, portion: int) -> tuple[bytes, str]:
    """What was read, written again, and why it ended if it did."""
    parser = yamux.FrameParser()
    written = b""
    try:
        for start in range(0, len(data), portion):
            for event in parser.feed(data[start : start + portion]):
                if isinstance(event, yamux.Payload):
                    assert 0 < len(event.data) <= portion + yamux.HEADER.size
                    written += event.data
                else:
                    written += yamux.header_bytes(event.type, event.flags, event.stream_id, event.length)
    except yamux.YamuxError as error:
        return written, str(error)
    return written, ""


def yamux_seeds() -> tuple[bytes, ...]:
    """A short talk, and headers that are none."""
    header = yamux.header_bytes
    talk = header(yamux.DATA, yamux.SYN, 1, 5) + b"hello" + header(yamux.WINDOW_UPDATE, yamux.ACK, 1, 9)
    end = header(yamux.PING, yamux.SYN, 0, 77) + header(yamux.DATA, yamux.FIN, 1, 0)
    bad = (b"\x01" + header(yamux.DATA, 0, 1, 0)[1:], header(4, 0, 1, 0), header(yamux.DATA, 16, 1, 2**32 - 1))
    return tuple(bytes([5 * i]) + data for i, data in enumerate((talk + end, talk, end + talk, *bad)))


def check_nat_pmp(data: bytes) -> None:
    """Nothing is raised; what is accepted says what its bytes say, and a lease that is used can be used."""
    host = read_external_host(data)
    if isinstance(host, ExternalHost):
        packed_host = bytes(int(part) for part in host.host.split("."))
        assert data.startswith(b"\0\x80\0\0" + host.epoch.to_bytes(4) + packed_host)
    mapping = read_mapping(data, INNER_PORT)
    if isinstance(mapping, MappedPort):
        assert data.startswith(_ANSWER.pack(0, 130, 0, mapping.epoch, INNER_PORT, mapping.outer, mapping.seconds))
        with suppress(RouterRefusedError):
            lease = mapping.lease()
            assert lease.outer > 0
            assert len(mapping_question(lease.inner, lease.outer, int(lease.seconds))) == 12
    for refused in (host, mapping):
        if isinstance(refused, NatPmpRefusal):
            assert refused.result
            assert refused.error().message


def nat_pmp_seeds() -> tuple[bytes, ...]:
    """Good answers and refusals."""
    good = _ANSWER.pack(0, 130, 0, 1000, INNER_PORT, 40_001, 3600)
    return (
        bytes((0, 128, 0, 0)) + (1000).to_bytes(4) + bytes((203, 0, 113, 7)),
        good,
        _ANSWER.pack(0, 130, 0, 1000, INNER_PORT, 0, 10),
        *(bytes((0, 130, 0, result)) + bytes(4) for result in range(7)),
        bytes((0, 128, 0, 3)) + bytes(8),
        mapping_question(INNER_PORT, 0, 0),
    )


def check_nearby(data: bytes) -> None:
    """Nothing is raised; addresses are of nodes inside the local network, and are heard again when told again."""
    said = read_packet(data, NODE, LAN)
    assert len(said.addresses) <= MAX_ADDRESSES
    for text in said.addresses:
        assert checked_multiaddr(text) == text
        _, _, host, _, port, _, node = text.split("/")
        assert any(host_in(host, network) for network in ("192.0.2.", "2001:db8:"))
        if node in {NODE, OTHER}:
            address = parse_address(text)
            assert read_packet(announcement(address.peer, [host], int(port)), NODE, LAN).addresses == (text,)


def host_in(host: str, prefix: str) -> bool:
    """Whether the text of an address begins so."""
    return host.startswith(prefix)


def nearby_seeds() -> tuple[bytes, ...]:
    """What nodes say to each other."""
    hosts = ("192.0.2.7", "2001:db8::1", "198.51.100.1")
    return (
        question(NODE),
        question(OTHER),
        announcement(OTHER, hosts, 4001),
        announcement(NODE, hosts[:1], 4001),
        announcement(OTHER, hosts, 4001, is_goodbye=True),
    )


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
            agreed: Any = at_once(accept_protocol(stream, SUPPORTED))
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
    Target("gossip-items", check_gossip_items, gossip_item_seeds),
    Target("gossip-message", check_gossip_message, gossip_message_seeds),
    Target("pool-packet", check_pool_packet, pool_packet_seeds),
    Target("yamux", check_yamux, yamux_seeds),
    Target("nat-pmp", check_nat_pmp, nat_pmp_seeds),
    Target("nearby", check_nearby, nearby_seeds),
    Target("gossip-router", check_gossip_router, gossip_router_seeds, short_inputs=500),
    Target("muxer", check_muxer, muxer_seeds, short_inputs=150),
    Target("negotiation", check_negotiation, negotiation_seeds),
)
