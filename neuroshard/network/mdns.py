"""Discovery of nodes on the local network by multicast DNS (RFC 6762, RFC 6763), without a server.

A node announces its addresses when it starts and when another node asks, and sends a goodbye when it ends. In
between it sends nothing. A node that can let others into its run also announces the run, for the list of the wizard.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from random import Random, SystemRandom
from typing import Annotated, Protocol, TypeAlias

import anyio
import psutil
import trio
from msgspec import Meta, Struct, convert, structs
from zeroconf import DNSAddress, DNSIncoming, DNSOutgoing, DNSPointer, DNSQuestion, DNSRecord, DNSService, DNSText

from neuroshard.config.multiaddr import checked_multiaddr
from neuroshard.network.limits import TokenBucket
from neuroshard.network.transport import Network
from neuroshard.types import NamedRun, NodeId

# pyright: reportPrivateImportUsage=false
# (zeroconf keeps these names importable from its top, as it says there, without listing them in __all__)

SERVICE = "_neuroshard._tcp.local."
FORM_VERSION = b"1"
MAX_PACKET_BYTES = 9000  # RFC 6762, section 17
MAX_ADDRESSES = 16  # in one packet
MAX_TEXT_BYTES = 512
MAX_NOTICES = 16  # in one packet
MAX_NAME_CHARACTERS = 40  # of a run
MAX_COMPUTERS = 1_000_000

_A, _PTR, _TXT, _AAAA, _SRV, _ANY = 1, 12, 16, 28, 33, 255
_INTERNET, _UNIQUE = 1, 0x8000
_QUERY, _ANSWER = 0x0000, 0x8400
_HOST_SECONDS, _SERVICE_SECONDS = 120, 4500  # time to live in caches, as RFC 6762 recommends

IpNetwork: TypeAlias = IPv4Network | IPv6Network


class RunNotice(Struct, frozen=True):
    """A run into which an announced node can let others. Any computer of the network can claim any of these values."""

    run: NamedRun
    name: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)]
    computers: Annotated[int, Meta(ge=1, le=MAX_COMPUTERS)]  # that take part

    def __post_init__(self) -> None:
        if not self.name.isprintable():
            raise ValueError("name must be printable text")


@dataclass(frozen=True)
class MdnsMessage:
    """The part of one packet's content that concerns this node."""

    is_question: bool = False  # another node looks for nodes
    addresses: tuple[str, ...] = ()  # multiaddrs of nodes, possibly including this one's own
    notices: tuple[RunNotice, ...] = ()  # runs that the announced nodes open to others


def question(node_id: NodeId) -> bytes:
    """The packet that asks for nodes other than this one."""
    packet = DNSOutgoing(_QUERY)
    packet.add_question(DNSQuestion(SERVICE, _PTR, _INTERNET))
    packet.add_answer_at_time(_pointer(node_id, _SERVICE_SECONDS), 0)  # already known: this node does not answer itself
    return packet.packets()[0]


def announcement(
    node_id: NodeId, hosts: Sequence[str], port: int, notice: RunNotice | None = None, *, is_goodbye: bool = False
) -> bytes:
    """The packet that announces a node's addresses and its run; with `is_goodbye`, that the node has left."""
    host_seconds, service_seconds = (0, 0) if is_goodbye else (_HOST_SECONDS, _SERVICE_SECONDS)
    instance, server = f"{node_id}.{SERVICE}", f"{node_id}.local."
    own = _INTERNET | _UNIQUE
    items = [b"v=" + FORM_VERSION, b"id=" + node_id.encode()]
    if notice is not None:
        items += [f"{key}={value}".encode() for key, value in structs.asdict(notice).items()]
    text = b"".join(bytes([len(item)]) + item for item in items)
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


def read_packet(packet: bytes, node_id: NodeId, networks: Sequence[IpNetwork]) -> MdnsMessage:
    """The content of a packet.

    Only addresses inside `networks` count: no packet may make this node dial a distant stranger.
    """
    if len(packet) > MAX_PACKET_BYTES:
        return MdnsMessage()
    message = DNSIncoming(packet)
    if not message.valid:
        return MdnsMessage()
    records = message.answers()
    if message.is_query():
        return MdnsMessage(is_question=any(map(_is_for_nodes, message.questions)) and not _knows(records, node_id))
    addresses = tuple(dict.fromkeys(_complete_addresses(records, networks)))[:MAX_ADDRESSES]
    return MdnsMessage(addresses=addresses, notices=tuple(_notices(records))[:MAX_NOTICES])


def _pointer(node_id: NodeId, seconds: int) -> DNSPointer:
    return DNSPointer(SERVICE, _PTR, _INTERNET, seconds, f"{node_id}.{SERVICE}")


def _is_for_nodes(entry: DNSQuestion) -> bool:
    return entry.type in {_PTR, _ANY} and entry.name.lower() == SERVICE


def _knows(records: Sequence[DNSRecord], node_id: NodeId) -> bool:
    """Whether the question lists this node as known (RFC 6762, section 7.1)."""
    return any(isinstance(record, DNSPointer) and record.alias == f"{node_id}.{SERVICE}" for record in records)


def _complete_addresses(records: Sequence[DNSRecord], networks: Sequence[IpNetwork]) -> Iterator[str]:
    """Addresses of the nodes that the packet describes completely: SRV, TXT and host address each."""
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
    """The node id of a TXT record in this version of the format; empty if there is none."""
    return _items(text).get(b"id", b"").decode("ascii", "replace")


def _notices(records: Sequence[DNSRecord]) -> Iterator[RunNotice]:
    """The runs in the TXT records of nodes. A record without a run, or with a wrong value, is skipped."""
    for record in records:
        if not isinstance(record, DNSText) or record.ttl == 0 or not record.key.endswith(f".{SERVICE}"):
            continue
        with suppress(ValueError):  # also of bytes that are not UTF-8
            items = {key.decode(): value.decode() for key, value in _items(record.text).items()}
            yield convert(items, RunNotice, strict=False)  # without strict, a number may be text


def _items(text: bytes) -> dict[bytes, bytes]:
    """The values of a TXT record in this version of the format, by key; none of any other record."""
    items: dict[bytes, bytes] = {}
    while text and len(text) <= MAX_TEXT_BYTES:
        length, text = text[0], text[1:]
        key, _, value = text[:length].partition(b"=")
        items.setdefault(key, value)
        text = text[length:]
    return items if items.get(b"v") == FORM_VERSION else {}


def _well_formed(address: str) -> Iterator[str]:
    try:
        yield checked_multiaddr(address)
    except ValueError:
        return


GROUP = "224.0.0.251"
PORT = 5353
MAX_INTERFACES = 8
_LINK_LOCAL_HOPS = 255  # RFC 6762, section 11
_LINUX_IP_MULTICAST_ALL = 49  # Python has no constant for it


class _Entry(Protocol):
    """One address of an interface, as psutil returns it."""

    @property
    def family(self) -> int: ...
    @property
    def address(self) -> str: ...
    @property
    def netmask(self) -> str | None: ...


@dataclass(frozen=True)
class LanInterface:
    """A network interface with an IPv4 address that supports multicast."""

    name: str
    host: str  # IPv4 address of the socket
    hosts: tuple[str, ...]  # all its addresses
    networks: tuple[IpNetwork, ...]


@dataclass(frozen=True)
class ReachableInterface:
    """An interface and the addresses at which peers on it can dial this node."""

    interface: LanInterface
    hosts: tuple[str, ...]
    port: int


def lan_interfaces() -> tuple[LanInterface, ...]:
    """The interfaces of this computer on local networks."""
    states = psutil.net_if_stats()
    found: list[LanInterface] = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        state = states.get(name)
        if state is None or not state.isup or not _is_of_many(state.flags):
            continue
        ips = tuple(_ips(entries))
        first = next((ip for ip, _ in ips if ip.version == 4), None)
        if first is not None:
            hosts, networks = tuple(str(ip) for ip, _ in ips), tuple(network for _, network in ips)
            found.append(LanInterface(name, str(first), hosts, networks))
    return tuple(found[:MAX_INTERFACES])


def places_of(addresses: Iterable[str], interfaces: Iterable[LanInterface]) -> tuple[ReachableInterface, ...]:
    """Where a node with these multiaddrs is dialled from each interface; none where it is not."""
    endpoints = tuple(direct_endpoints(addresses))
    places: list[ReachableInterface] = []
    for interface in interfaces:
        near = [(host, port) for host, port in endpoints if host in interface.hosts]
        if near:
            port = near[0][1]
            places.append(ReachableInterface(interface, tuple(host for host, other in near if other == port), port))
    return tuple(places)


def direct_endpoints(addresses: Iterable[str]) -> Iterator[tuple[str, int]]:
    """IP address and port of the multiaddrs that lead to a node directly, without a relay."""
    for address in addresses:
        match address.split("/"):
            case ["", "ip4" | "ip6", host, "tcp", port, "p2p", _]:
                yield host, int(port)
            case _:
                continue


def open_socket(interface: LanInterface) -> trio.socket.SocketType:
    """Open a socket of the multicast group on one interface, shared with other programs. Raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if sys.platform == "linux":  # otherwise packets of the other interfaces arrive as well
            sock.setsockopt(socket.IPPROTO_IP, _LINUX_IP_MULTICAST_ALL, 0)
        own = socket.inet_aton(interface.host)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, _LINK_LOCAL_HOPS)
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)  # for two nodes on one computer
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
        sock.bind(("", PORT))
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(GROUP) + own)
        return trio.socket.from_stdlib_socket(sock)
    except BaseException:
        sock.close()
        raise


def _is_of_many(flags: str) -> bool:
    """Whether an interface reaches a local network: neither loopback nor tunnel. Windows reports no flags."""
    kinds = set(flags.split(","))
    return not flags or ({"multicast", "broadcast"} <= kinds and not kinds & {"loopback", "pointopoint"})


def _ips(entries: Iterable[_Entry]) -> Iterator[tuple[IPv4Address | IPv6Address, IpNetwork]]:
    """The addresses with a meaning outside this computer, and their networks."""
    for entry in entries:
        if entry.family not in {socket.AF_INET, socket.AF_INET6} or not entry.netmask:
            continue
        with suppress(ValueError):
            ip = ip_address(entry.address.partition("%")[0])
            if not ip.is_loopback and not (ip.version == 6 and ip.is_link_local):
                prefix = int(ip_address(entry.netmask)).bit_count()
                yield ip, ip_network(f"{ip}/{prefix}", strict=False)


_LOG = logging.getLogger(__name__)

INTRODUCTION_SECONDS = (0.0, 1.0, 2.0)  # pauses before each announcement with a question
FIRST_DELAY_SECONDS = 0.1  # at most, random: computers that get power together must not send together
ANSWER_DELAY_SECONDS = (0.02, 0.12)
ANSWER_PAUSE_SECONDS = 1.0  # between two answers, however many nodes ask
LOOK_SECONDS = 10.0  # between checks whether this computer joined another network
RETRY_SECONDS = 300.0  # after a failure; also between questions of a node without connections
GOODBYE_SECONDS = 1.0
MAX_DATAGRAM_BYTES = 65_536
PACKETS_A_SECOND = 100.0  # read per second; the rest waits in the system's buffer or is lost
MAX_FOUND = 256  # reported addresses to remember
NEW_ADDRESSES = 64  # burst of new addresses, then
NEW_ADDRESSES_A_SECOND = 1.0


class DiscoveredAddresses:
    """Reports addresses to `report`; new ones only at the rate at which real nodes appear."""

    def __init__(self, own_id: NodeId, report: Callable[[Iterable[str]], None]) -> None:
        self._own_end = f"/p2p/{own_id}"
        self._report = report
        self._reported: dict[str, None] = {}  # the oldest first
        self._new = TokenBucket(NEW_ADDRESSES, NEW_ADDRESSES_A_SECOND)

    def add(self, addresses: Iterable[str], now: float) -> None:
        """Report the addresses of other nodes: known ones always, new ones within the rate limit."""
        for address in addresses:
            if address.endswith(self._own_end) or (address not in self._reported and not self._new.take(now)):
                continue
            self._reported.pop(address, None)
            self._reported[address] = None
            if len(self._reported) > MAX_FOUND:
                del self._reported[next(iter(self._reported))]
            self._report((address,))


@dataclass
class MdnsDiscovery:
    """Finds nodes on the local network.

    `report` gets the multiaddrs of other nodes; only their form has been checked. `notice` returns the run to announce.
    """

    node_id: NodeId
    report: Callable[[Iterable[str]], None]
    interfaces: Callable[[], tuple[LanInterface, ...]] = lan_interfaces
    notice: Callable[[], RunNotice | None] | None = None
    random: Random = field(default_factory=SystemRandom)
    _has_complained: bool = False

    async def live(self, network: Network) -> None:
        """Announce this node and look for others until the network ends. A failed interface is tried again later."""
        findings = DiscoveredAddresses(self.node_id, self.report)
        while True:
            places = self._places(network)
            has_failed = anyio.Event()
            with ExitStack() as sockets:
                async with anyio.create_task_group() as tasks:
                    for place in places:
                        channel = self._opened(place, sockets)
                        if channel is None:
                            has_failed.set()
                        else:
                            tasks.start_soon(self._serve, channel, network, findings, has_failed)
                    await self._wait_for_change(network, places, has_failed)
                    tasks.cancel_scope.cancel()

    def _notice(self) -> RunNotice | None:
        return None if self.notice is None else self.notice()

    def _places(self, network: Network) -> tuple[ReachableInterface, ...]:
        return places_of(network.transport.addresses(), self.interfaces())

    async def _wait_for_change(
        self, network: Network, places: Sequence[ReachableInterface], has_failed: anyio.Event
    ) -> None:
        """Wait until this node's addresses change, or until a failed interface is due again."""
        failed_at: float | None = None
        while self._places(network) == places:
            await anyio.sleep(LOOK_SECONDS)
            if has_failed.is_set():
                failed_at = failed_at or anyio.current_time()
                if anyio.current_time() - failed_at >= RETRY_SECONDS:
                    return

    def _opened(self, place: ReachableInterface, sockets: ExitStack) -> MulticastChannel | None:
        try:
            sock = open_socket(place.interface)
        except OSError as error:
            self._complain(place, error)
            return None
        sockets.callback(sock.close)
        return MulticastChannel(self.node_id, place, sock)

    async def _serve(
        self, channel: MulticastChannel, network: Network, findings: DiscoveredAddresses, has_failed: anyio.Event
    ) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._introduce, channel, network)
                tasks.start_soon(self._answer, channel)
                tasks.start_soon(_listen, channel, findings)
        except* OSError as group:
            self._complain(channel.place, group.exceptions[0])
            has_failed.set()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(GOODBYE_SECONDS):
                await channel.say_goodbye()

    async def _introduce(self, channel: MulticastChannel, network: Network) -> None:
        """Announce this node and ask for others. Later only ask, and only while this node has no connection."""
        await anyio.sleep(self.random.uniform(0, FIRST_DELAY_SECONDS))
        for seconds in INTRODUCTION_SECONDS:
            await anyio.sleep(seconds)
            await channel.ask()
            await channel.say(self._notice())
        while True:
            await anyio.sleep(RETRY_SECONDS)
            if not network.transport.peers():
                await channel.ask()

    async def _answer(self, channel: MulticastChannel) -> None:
        """Answer questions; all that arrive within one second get one answer."""
        while True:
            await channel.asked.wait()
            earliest = channel.said_at + ANSWER_PAUSE_SECONDS
            await anyio.sleep(self.random.uniform(*ANSWER_DELAY_SECONDS))
            await anyio.sleep_until(earliest)
            channel.asked = anyio.Event()
            await channel.say(self._notice())

    def _complain(self, place: ReachableInterface, error: BaseException) -> None:
        level = logging.DEBUG if self._has_complained else logging.INFO
        self._has_complained = True
        _LOG.log(level, "Discovery on the local network is off for now on %s: %s", place.interface.name, error)


class MulticastChannel:
    """One node's multicast socket on one interface."""

    def __init__(self, node_id: NodeId, place: ReachableInterface, sock: trio.socket.SocketType) -> None:
        self.place = place
        self.asked = anyio.Event()
        self.said_at = float("-inf")
        self._node_id = node_id
        self._socket = sock

    async def ask(self) -> None:
        """Ask for nodes. Raises OSError."""
        await self._socket.sendto(question(self._node_id), (GROUP, PORT))

    async def say(self, notice: RunNotice | None = None) -> None:
        """Announce this node and the run that it opens to others. Raises OSError."""
        self.said_at = anyio.current_time()
        packet = announcement(self._node_id, self.place.hosts, self.place.port, notice)
        await self._socket.sendto(packet, (GROUP, PORT))

    async def say_goodbye(self) -> None:
        """Send a goodbye if this node was ever announced. Skip it if the network is gone."""
        if self.said_at == float("-inf"):
            return
        packet = announcement(self._node_id, self.place.hosts, self.place.port, is_goodbye=True)
        try:
            await self._socket.sendto(packet, (GROUP, PORT))
        except OSError as error:
            _LOG.debug("Could not send a goodbye on %s: %s", self.place.interface.name, error)

    async def receive(self) -> MdnsMessage:
        """Content of the next packet; empty if it comes from outside the interface's networks. Raises OSError."""
        packet, (host, port, *_) = await self._socket.recvfrom(MAX_DATAGRAM_BYTES)
        source, networks = ip_address(host), self.place.interface.networks
        is_local = port == PORT and any(source in network for network in networks)
        return read_packet(packet, self._node_id, networks) if is_local else MdnsMessage()


async def _listen(channel: MulticastChannel, findings: DiscoveredAddresses) -> None:
    pace = TokenBucket(PACKETS_A_SECOND, PACKETS_A_SECOND)
    while True:
        while not pace.take(anyio.current_time()):
            await anyio.sleep(1 / PACKETS_A_SECOND)
        said = await channel.receive()
        if said.is_question:
            channel.asked.set()
        findings.add(said.addresses, anyio.current_time())
