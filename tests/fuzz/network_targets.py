"""Readers of packets that stand alone: gossip, packets of the pool, yamux, routers, and the local network."""

from __future__ import annotations

import zlib
from contextlib import suppress
from ipaddress import ip_network
from struct import Struct

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
    id_items,
    message_id,
    packed,
    topic_id,
    unpacked,
)
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


TARGETS = (
    Target("gossip-items", check_gossip_items, gossip_item_seeds),
    Target("gossip-message", check_gossip_message, gossip_message_seeds),
    Target("pool-packet", check_pool_packet, pool_packet_seeds),
    Target("yamux", check_yamux, yamux_seeds),
    Target("nat-pmp", check_nat_pmp, nat_pmp_seeds),
    Target("nearby", check_nearby, nearby_seeds),
)
