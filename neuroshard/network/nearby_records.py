"""What nodes on one local network tell each other by multicast DNS (RFC 6762, 6763): bytes in, values out."""

# pyright: reportPrivateImportUsage=false
# (zeroconf keeps these names importable from its top, as it says there, without listing them in __all__)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias

from zeroconf import DNSAddress, DNSIncoming, DNSOutgoing, DNSPointer, DNSQuestion, DNSRecord, DNSService, DNSText

from neuroshard.config.multiaddr import checked_multiaddr
from neuroshard.types import NodeId

SERVICE = "_neuroshard._tcp.local."
FORM_VERSION = b"1"
MAX_PACKET_BYTES = 9000  # RFC 6762, section 17
MAX_ADDRESSES = 16  # that one packet may tell
MAX_TEXT_BYTES = 512

_A, _PTR, _TXT, _AAAA, _SRV, _ANY = 1, 12, 16, 28, 33, 255
_INTERNET, _UNIQUE = 1, 0x8000
_QUERY, _ANSWER = 0x0000, 0x8400
_HOST_SECONDS, _SERVICE_SECONDS = 120, 4500  # how long others may remember, as RFC 6762 recommends

IpNetwork: TypeAlias = IPv4Network | IPv6Network


@dataclass(frozen=True)
class Heard:
    """What one packet says to this node."""

    is_question: bool = False  # somebody looks for nodes
    addresses: tuple[str, ...] = ()  # multiaddrs of nodes, perhaps this one's own among them


def question(node_id: NodeId) -> bytes:
    """The packet that asks who is there besides this node."""
    packet = DNSOutgoing(_QUERY)
    packet.add_question(DNSQuestion(SERVICE, _PTR, _INTERNET))
    packet.add_answer_at_time(_pointer(node_id, _SERVICE_SECONDS), 0)  # known already: nobody answers himself
    return packet.packets()[0]


def announcement(node_id: NodeId, hosts: Sequence[str], port: int, *, is_goodbye: bool = False) -> bytes:
    """The packet that says where a node is, all in one; `is_goodbye`: that it is there no more."""
    host_seconds, service_seconds = (0, 0) if is_goodbye else (_HOST_SECONDS, _SERVICE_SECONDS)
    instance, server = f"{node_id}.{SERVICE}", f"{node_id}.local."
    own = _INTERNET | _UNIQUE
    text = b"".join(bytes([len(item)]) + item for item in (b"v=" + FORM_VERSION, b"id=" + node_id.encode()))
    packet = DNSOutgoing(_ANSWER)
    records: list[DNSRecord] = [
        _pointer(node_id, service_seconds),
        DNSService(instance, _SRV, own, host_seconds, 0, 0, port, server),
        DNSText(instance, _TXT, own, service_seconds, text),
    ]
    for host in map(ip_address, hosts[:MAX_ADDRESSES]):
        kind = _A if host.version == 4 else _AAAA
        records.append(DNSAddress(server, kind, own, host_seconds, host.packed))
    for record in records:
        packet.add_answer_at_time(record, 0)
    return packet.packets()[0]


def heard(packet: bytes, node_id: NodeId, networks: Sequence[IpNetwork]) -> Heard:
    """What a packet says to a node. Only others inside `networks` count: nobody is sent to dial a stranger far away."""
    if len(packet) > MAX_PACKET_BYTES:
        return Heard()
    message = DNSIncoming(packet)
    if not message.valid:
        return Heard()
    records = message.answers()
    if message.is_query():
        return Heard(is_question=any(map(_is_for_nodes, message.questions)) and not _knows(records, node_id))
    return Heard(addresses=tuple(dict.fromkeys(_told(records, networks)))[:MAX_ADDRESSES])


def _pointer(node_id: NodeId, seconds: int) -> DNSPointer:
    return DNSPointer(SERVICE, _PTR, _INTERNET, seconds, f"{node_id}.{SERVICE}")


def _is_for_nodes(entry: DNSQuestion) -> bool:
    return entry.type in {_PTR, _ANY} and entry.name.lower() == SERVICE


def _knows(records: Sequence[DNSRecord], node_id: NodeId) -> bool:
    """Whether somebody who asks says that he knows this node (RFC 6762, section 7.1)."""
    return any(isinstance(record, DNSPointer) and record.alias == f"{node_id}.{SERVICE}" for record in records)


def _told(records: Sequence[DNSRecord], networks: Sequence[IpNetwork]) -> Iterator[str]:
    """Addresses of the nodes that the packet describes fully: SRV, TXT and host address of each."""
    texts = {record.key: record.text for record in records if isinstance(record, DNSText) and record.ttl > 0}
    hosts: dict[str, list[IPv4Address | IPv6Address]] = {}
    for record in records:
        if isinstance(record, DNSAddress) and record.ttl > 0 and len(record.address) in {4, 16}:
            hosts.setdefault(record.key, []).append(ip_address(record.address))
    for record in records:
        if isinstance(record, DNSService) and record.ttl > 0 and record.key.endswith(f".{SERVICE}"):
            node_id = _node_id(texts.get(record.key, b""))
            for host in hosts.get(record.server_key, ())[:MAX_ADDRESSES] if node_id else ():
                if any(host in network for network in networks):
                    yield from _well_formed(f"/ip{host.version}/{host}/tcp/{record.port}/p2p/{node_id}")


def _node_id(text: bytes) -> str:
    """The node id of a TXT record of this version of the form; empty when there is none."""
    items: dict[bytes, bytes] = {}
    while text and len(text) <= MAX_TEXT_BYTES:
        length, text = text[0], text[1:]
        key, _, value = text[:length].partition(b"=")
        items.setdefault(key, value)
        text = text[length:]
    return items.get(b"id", b"").decode("ascii", "replace") if items.get(b"v") == FORM_VERSION else ""


def _well_formed(address: str) -> Iterator[str]:
    try:
        yield checked_multiaddr(address)
    except ValueError:
        return
