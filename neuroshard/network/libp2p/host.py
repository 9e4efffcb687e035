"""The libp2p host of one node: its swarm without libp2p's own limits and dialling, its streams handed to handlers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Protocol, cast

import anyio
import trio
from anyio.abc import TaskGroup
from libp2p.abc import INetConn, INetStream
from libp2p.connection_types import ConnectionType
from libp2p.crypto.keys import KeyPair
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.stream.net_stream import NetStream
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from neuroshard.network.libp2p.guard import contained
from neuroshard.network.libp2p.identifying import asked
from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.negotiation import accept
from neuroshard.network.libp2p.streams import YamuxStream
from neuroshard.network.libp2p.upgrading import HANDSHAKE_SECONDS

_MOST = 100_000  # libp2p's own limits come after ours: its evictions would even drop this node's key


def silence_libp2p() -> None:
    """Keep libp2p's log lines, warnings about every peer that hangs up, out of the node's log."""
    logging.getLogger("multiaddr").setLevel(logging.WARNING)
    logger = logging.getLogger("libp2p")
    if not logger.handlers:  # LIBP2P_DEBUG brings its own
        logger.addHandler(logging.NullHandler())
        logger.setLevel(logging.CRITICAL)


class _NoAutoConnector(AutoConnector):
    """Dials nobody: libp2p's own would dial whoever it has heard of."""

    async def maybe_connect(self) -> None:
        """Nothing."""
        await trio.lowlevel.checkpoint()


class NodeSwarm(Swarm):
    """libp2p's book of connections. It dials nobody by itself, and streams cost no notifications."""

    def __init__(self, keys: KeyPair, upgrader: TransportUpgrader) -> None:
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

    def forget(self, peer_id: ID) -> None:
        """Drop what a peer that is gone told about itself."""
        if not self.get_connections(peer_id) and self.peerstore.has_peer(peer_id):
            self.peerstore.clear_peerdata(peer_id)

    async def notify_opened_stream(self, stream: INetStream) -> None:
        """Nobody listens."""
        await trio.lowlevel.checkpoint()

    async def notify_closed_stream(self, stream: INetStream) -> None:
        """Nobody listens."""
        await trio.lowlevel.checkpoint()


class AddressObserver(Protocol):
    """Takes what peers say about this node's own address; libp2p's own wants four observers before it believes any."""

    def record(self, muxer: BoundedMuxer, observed: Multiaddr, local: Iterable[Multiaddr]) -> None:
        """A peer saw this node at an address; `local` are those at which it listens."""
        ...

    def remove_conn(self, conn: INetConn) -> None:
        """A connection ended."""
        ...

    def addrs(self) -> list[Multiaddr]:
        """Addresses that others may be told."""
        ...


class NodeHost(BasicHost):
    """Protocols on the streams of a swarm. `tasks` owns everything that runs in the background."""

    def __init__(self, swarm: NodeSwarm, tasks: TaskGroup) -> None:
        super().__init__(swarm, negotiate_timeout=HANDSHAKE_SECONDS)
        self.swarm = swarm
        self._tasks = tasks
        self._observed_addr_manager = None  # unless somebody observes better: see observe_with
        self._observer: AddressObserver | None = None
        self.remove_stream_handler(ID_PUSH)  # whoever moved connects anew

    def observe_with(self, observer: AddressObserver) -> None:
        """Let identify tell where others see this node."""
        self._observer = observer
        self._observed_addr_manager = cast("Any", observer)

    async def _swarm_stream_handler(self, net_stream: INetStream) -> None:
        result = await contained(self._serve(cast("NetStream", net_stream)), "A stream")
        if isinstance(result, Exception):
            await contained(net_stream.reset(), "A reset")

    async def _serve(self, net_stream: NetStream) -> None:
        with anyio.fail_after(HANDSHAKE_SECONDS):
            protocol = TProtocol(await accept(stream_of(net_stream), self.multiselect.handlers))
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
            await contained(self._ask_about(peer_id), "Identify")
        finally:
            self._identify_inflight.discard(peer_id)

    async def _ask_about(self, peer_id: ID) -> None:
        """What a peer says about itself; libp2p's own way reads a MiB of it, and keeps all."""
        muxer = next((conn.muxed_conn for conn in self.swarm.get_connections(peer_id)), None)
        if not isinstance(muxer, BoundedMuxer):
            return
        told = await asked(muxer)
        if not self.swarm.get_connections(peer_id):
            return  # what is known of it is forgotten already
        self.peerstore.set_protocols(peer_id, told.protocols)
        self._identified_peers[peer_id] = ""
        is_relayed = muxer.get_connection_type() == ConnectionType.RELAYED  # it sees the relay's address
        if self._observer is not None and told.observed is not None and not is_relayed:
            self._observer.record(muxer, told.observed, self.get_transport_addrs())


def stream_of(net_stream: INetStream) -> YamuxStream:
    """The muxer's own stream under a libp2p stream."""
    stream = cast("Any", net_stream).muxed_stream
    assert isinstance(stream, YamuxStream)
    return stream
