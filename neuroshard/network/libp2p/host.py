"""The libp2p host of one node: its swarm, its stream handlers, the identify protocol and connection events.

The swarm applies none of libp2p's own limits and never dials by itself. The identify message of a peer is read up to
16 KiB, and the host keeps only two of its fields.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import anyio
import trio
from anyio.abc import TaskGroup
from google.protobuf.message import DecodeError
from libp2p.abc import IMuxedConn, INetConn, INetStream, INetwork, INotifee, IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.crypto.keys import KeyPair
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.io.exceptions import IOException
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.stream.net_stream import NetStream
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.negotiation import accept_protocol, confirm, proposal
from neuroshard.network.libp2p.peer_limits import contain_errors
from neuroshard.network.libp2p.relay_messages import HOP_PROTOCOL
from neuroshard.network.libp2p.streams import YamuxStream
from neuroshard.network.libp2p.tls import TlsConnection
from neuroshard.network.libp2p.upgrading import HANDSHAKE_SECONDS, NodeUpgrader

IDENTIFY_PROTOCOL = "/ipfs/id/1.0.0"
IDENTIFY_SECONDS = 15.0
MAX_IDENTIFY_BYTES = 16 * 1024
_MAX_LENGTH_BYTES = 3  # of a varint up to 2^21
_CHOSEN_BY = frozenset({HOP_PROTOCOL})  # protocols that matter for the choice of a peer; others are negotiated on use


class IdentifyError(IOException):
    """The peer's identify message is too long or cannot be read."""


@dataclass(frozen=True)
class Identified:
    """The two fields of a peer's identify message that are kept."""

    protocols: tuple[str, ...]  # only those that matter for the choice of a peer
    observed: Multiaddr | None  # where the peer sees this node


async def ask_identity(muxer: BoundedMuxer) -> Identified:
    """Ask a peer for its identify message. Raises BaseLibp2pError or TimeoutError."""
    stream = await muxer.open_stream()
    try:
        with anyio.fail_after(IDENTIFY_SECONDS):
            await stream.write(proposal(IDENTIFY_PROTOCOL))
            await confirm(stream, IDENTIFY_PROTOCOL)
            return identified(await _message(stream))
    finally:
        stream.abandon()


def identified(data: bytes) -> Identified:
    """Parse an identify message. Raises IdentifyError."""
    message = Identify()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise IdentifyError(str(error)) from None
    return Identified(tuple(_CHOSEN_BY.intersection(message.protocols)), _address(message.observed_addr))


async def _message(stream: YamuxStream) -> bytes:
    size = await _length(stream)
    if size > MAX_IDENTIFY_BYTES:
        raise IdentifyError(f"{size} bytes about itself")
    data = b""
    while len(data) < size:
        data += await stream.read(size - len(data))
    return data


async def _length(stream: YamuxStream) -> int:
    size = 0
    for position in range(_MAX_LENGTH_BYTES):
        byte = (await stream.read(1))[0]
        size |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return size
    raise IdentifyError("a length that is too long")


def _address(data: bytes) -> Multiaddr | None:
    try:
        address = Multiaddr(data) if data else None
        str(address)  # the bytes are only parsed here
    except ValueError:
        return None
    return address


_MOST = 100_000  # libp2p's own limits are above ours: its evictions would even drop this node's key


def silence_libp2p() -> None:
    """Keep libp2p's log lines, warnings about every peer that hangs up, out of the node's log."""
    logging.getLogger("multiaddr").setLevel(logging.WARNING)
    logger = logging.getLogger("libp2p")
    if not logger.handlers:  # LIBP2P_DEBUG adds its own
        logger.addHandler(logging.NullHandler())
        logger.setLevel(logging.CRITICAL)


class _NoAutoConnector(AutoConnector):
    """Replaces libp2p's connector, which dials every peer that it has heard of."""

    async def maybe_connect(self) -> None:
        await trio.lowlevel.checkpoint()


class NodeSwarm(Swarm):
    """libp2p's table of connections, which never dials by itself and sends no notifications for streams."""

    def __init__(self, keys: KeyPair, upgrader: NodeUpgrader) -> None:
        peer_id = ID.from_pubkey(keys.public_key)
        peerstore = PeerStore(max_records=_MOST, max_peers=_MOST)
        peerstore.add_key_pair(peer_id, keys)
        config = ConnectionConfig(
            max_connections=_MOST,
            high_watermark=_MOST,
            low_watermark=0,
            min_connections=0,
            max_connections_per_peer=_MOST,
            inbound_upgrade_timeout=HANDSHAKE_SECONDS,
            outbound_upgrade_timeout=HANDSHAKE_SECONDS,
        )
        super().__init__(peer_id, peerstore, upgrader, [TCP()], RetryConfig(max_retries=0), config)
        self.auto_connector = _NoAutoConnector(self)
        self._node_upgrader = upgrader

    async def accept(self, raw: IRawConnection) -> IMuxedConn | TlsConnection:
        """Upgrade a connection that a peer opened; one with streams becomes part of the table. Raises BaseLibp2pError.

        A TlsConnection is one for bodies.
        """
        with anyio.fail_after(HANDSHAKE_SECONDS):
            conn = await self._node_upgrader.upgrade_accepted(raw)
        if not isinstance(conn, TlsConnection):
            await self.add_conn(conn, direction="inbound")
        return conn

    def forget(self, peer_id: ID) -> None:
        """Drop the identify data of a peer that left."""
        if not self.get_connections(peer_id) and self.peerstore.has_peer(peer_id):
            self.peerstore.clear_peerdata(peer_id)

    async def notify_opened_stream(self, stream: INetStream) -> None:
        await trio.lowlevel.checkpoint()

    async def notify_closed_stream(self, stream: INetStream) -> None:
        await trio.lowlevel.checkpoint()


class AddressObserver(Protocol):
    """Collects the addresses at which peers see this node. libp2p's own collector needs four observers."""

    def record(self, muxer: BoundedMuxer, observed: Multiaddr, local: Iterable[Multiaddr]) -> None:
        """Record where a peer sees this node; `local` are the addresses at which it listens."""
        ...

    def remove_conn(self, conn: INetConn) -> None: ...

    def addrs(self) -> list[Multiaddr]:
        """The observed addresses that may be announced."""
        ...


class NodeHost(BasicHost):
    """Runs the protocols on the streams of a swarm. `tasks` owns all background tasks."""

    def __init__(self, swarm: NodeSwarm, tasks: TaskGroup) -> None:
        super().__init__(swarm, negotiate_timeout=HANDSHAKE_SECONDS)
        self.swarm = swarm
        self._tasks = tasks
        self._observed_addr_manager = None  # until a better observer is set: see observe_with
        self._observer: AddressObserver | None = None
        self.remove_stream_handler(ID_PUSH)  # a node that moved connects again

    def observe_with(self, observer: AddressObserver) -> None:
        """Let identify report where peers see this node."""
        self._observer = observer
        self._observed_addr_manager = cast("Any", observer)

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        result = await contain_errors(self._serve(cast("NetStream", net_stream)), "A stream")
        if isinstance(result, Exception):
            await contain_errors(net_stream.reset(), "A reset")

    async def _serve(self, net_stream: NetStream) -> None:
        with anyio.fail_after(HANDSHAKE_SECONDS):
            protocol = TProtocol(await accept_protocol(stream_of(net_stream), self.multiselect.handlers))
        handler = self.multiselect.handlers[protocol]
        if handler is not None:
            net_stream.set_protocol(protocol)
            await handler(net_stream)

    def _schedule_identify(self, peer_id: ID, *, reason: str) -> None:
        if peer_id not in self._identify_inflight and peer_id not in self._identified_peers:
            self._identify_inflight.add(peer_id)
            self._tasks.start_soon(self._identify, peer_id)

    async def _identify(self, peer_id: ID) -> None:
        try:
            await contain_errors(self._ask_about(peer_id), "Identify")
        finally:
            self._identify_inflight.discard(peer_id)

    async def _ask_about(self, peer_id: ID) -> None:
        """Ask a peer for its identify message. libp2p's own function reads up to 1 MiB and keeps all of it."""
        muxer = next((conn.muxed_conn for conn in self.swarm.get_connections(peer_id)), None)
        if not isinstance(muxer, BoundedMuxer):
            return
        identified = await ask_identity(muxer)
        if not self.swarm.get_connections(peer_id):
            return  # its data is already dropped
        self.peerstore.set_protocols(peer_id, identified.protocols)
        self._identified_peers[peer_id] = ""
        is_relayed = muxer.get_connection_type() == ConnectionType.RELAYED  # it sees the relay's address
        if self._observer is not None and identified.observed is not None and not is_relayed:
            self._observer.record(muxer, identified.observed, self.get_transport_addrs())


def stream_of(net_stream: INetStream) -> YamuxStream:
    """The muxer's own stream under a libp2p stream."""
    stream = cast("Any", net_stream).muxed_stream
    assert isinstance(stream, YamuxStream)
    return stream


class PeerEvents(INotifee):
    """Calls `meet` for every new connection of a peer and `part` when the last one ended."""

    def __init__(self, meet: Callable[[ID], None], part: Callable[[ID], None]) -> None:
        self._meet = meet
        self._part = part

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        await trio.lowlevel.checkpoint()
        self._meet(conn.muxed_conn.peer_id)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        await trio.lowlevel.checkpoint()
        peer = conn.muxed_conn.peer_id
        if not network.get_connections(peer):
            self._part(peer)

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...
    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...
    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...
    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...
