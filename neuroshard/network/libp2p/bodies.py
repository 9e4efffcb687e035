"""Large bodies: further connections with a peer, at the port and through the router's mapping of the first one.

The side that dialled the first connection dials the others too, because it knows an address that works. The other side
asks it to. Where only a relay leads to the peer, or the peer is another libp2p program, bodies stay on streams.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from weakref import WeakKeyDictionary

import anyio
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID

from neuroshard.errors import NeuroShardError
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network.libp2p.connections import Connections
from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.sockets import SocketBytes
from neuroshard.network.libp2p.tls import TlsConnection
from neuroshard.network.libp2p.upgrading import NodeUpgrader
from neuroshard.network.pool import BulkPool, NotDeliveredError
from neuroshard.network.pool.options import ConnectionLostError, DialRefusedError
from neuroshard.network.tcp_options import TcpInfo
from neuroshard.network.transfer_policy import BULK_BYTES
from neuroshard.network.transport import NobodyListensError, PeerUnreachableError, RequestRefusedError
from neuroshard.types import NodeId

CONNECT_KIND = "pool/connect"
CONNECT_SECONDS = 10.0
ASKED_AGAIN_SECONDS = 60.0  # after bodies could not use connections of their own


class BodyStream:
    """A connection for bodies; see SecureStream. A task may send while another one receives."""

    def __init__(self, conn: TlsConnection, raw: SocketBytes) -> None:
        self._conn = conn
        self._raw = raw
        self._left = memoryview(b"")  # decrypted and not taken

    async def receive_some(self, memory: memoryview) -> int:
        """Wait for bytes and put some into `memory`. Raises ConnectionLostError, also at the end."""
        try:
            while not self._left:
                self._left = memoryview(await self._conn.read())
        except BaseLibp2pError as error:
            raise _lost(error) from None
        count = min(len(memory), len(self._left))
        memory[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    async def send_all(self, *views: bytes | memoryview) -> None:
        """Hand all bytes to the system. Raises ConnectionLostError."""
        try:
            await self._conn.write_all(views)
        except BaseLibp2pError as error:
            raise _lost(error) from None

    def close(self) -> None:
        """Close it; a task that waits for it gets ConnectionLostError."""
        self._raw.close_now()

    def tcp_info(self) -> TcpInfo | None:
        """The system's measurements, where it has any."""
        return self._raw.tcp_info()


def _lost(error: Exception) -> ConnectionLostError:
    return ConnectionLostError(str(error) or type(error).__name__)


async def dial_for_bodies(
    upgrader: NodeUpgrader, peer: NodeId, address: tuple[str, int], algorithm: str | None = None
) -> BodyStream:
    """A new connection with this peer at an IP address and port. Raises ConnectionLostError.

    `algorithm` is the congestion control.
    """
    raw = SocketBytes(await _dialled(address), algorithm)
    try:
        conn = await upgrader.upgrade_for_bodies(RawConnection(raw, initiator=True), ID.from_base58(peer))
    except (BaseLibp2pError, ValueError) as error:  # ValueError: an id that cannot be one
        raw.close_now()
        raise _lost(error) from None
    except BaseException:
        raw.close_now()
        raise
    return BodyStream(conn, raw)


async def _dialled(address: tuple[str, int]) -> trio.SocketStream:
    sock = trio.socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    try:
        await sock.connect(address)
    except BaseException as error:
        sock.close()
        if isinstance(error, ConnectionRefusedError):
            raise DialRefusedError(str(error)) from None
        if isinstance(error, OSError):
            raise ConnectionLostError(str(error)) from None
        raise
    return trio.SocketStream(sock)


def is_bulk(frame: Frame, reply: FrameLimits) -> bool:
    """Whether a request or its answer is worth connections of its own."""
    return sum(part.spec.byte_count for part in frame.tensors) > BULK_BYTES or reply.max_body_bytes > BULK_BYTES


AskSmall = Callable[[NodeId, Frame, float], Awaitable[Frame]]
"""A small request over a stream: peer, frame, seconds."""


class BodyConnections:
    """Opens the pool's connections, and knows the peers that have none."""

    def __init__(self, connections: Connections, upgrader: NodeUpgrader, ask: AskSmall, algorithm: str | None) -> None:
        """`algorithm` is the congestion control."""
        self._connections = connections
        self._upgrader = upgrader
        self._ask = ask
        self._algorithm = algorithm
        self._failed_until: WeakKeyDictionary[BoundedMuxer, float] = WeakKeyDictionary()
        self.pool: BulkPool | None = None

    async def request(self, peer: NodeId, frame: Frame, reply: FrameLimits, timeout_seconds: float) -> Frame | None:
        """The peer's answer; None when it cannot be asked this way and has not handled the request.

        So the request may go over a stream then. Raises as Transport.request, also for a peer that went away when it
        may have handled the request: to send it once more is for those who know what that does.
        """
        assert self.pool is not None
        first = self._connections.of(peer)
        if first is not None and anyio.current_time() < self._failed_until.get(first, 0.0):
            return None
        try:
            return await self.pool.request(peer, frame, reply, timeout_seconds=timeout_seconds)
        except NotDeliveredError:
            first = self._connections.of(peer)
            if first is not None:
                self._failed_until[first] = anyio.current_time() + ASKED_AGAIN_SECONDS
            return None

    async def open_to(self, peer: NodeId) -> BodyStream | None:
        """As `Open` of the pool."""
        try:
            await self._connections.to(peer)
        except NobodyListensError as error:
            raise DialRefusedError(str(error)) from None
        except PeerUnreachableError as error:
            raise _lost(error) from None
        first = self._connections.dialled_to(peer)
        if first is not None:
            return await self._dialled(peer, first)
        if self._connections.direct_ip(peer) is None:
            raise ConnectionLostError("only a relay leads to it")
        try:
            await self._ask(peer, Frame(CONNECT_KIND), CONNECT_SECONDS)
        except NeuroShardError as error:
            raise _lost(error) from None
        return None

    async def answer_connect(self, requester: NodeId, _: Frame) -> Frame:
        """Open a connection with a peer that cannot dial this node. Raises RequestRefusedError."""
        first = self._connections.dialled_to(requester)
        if self.pool is None or first is None or not self.pool.has_room_for(requester):
            raise RequestRefusedError("This node has not dialled that one, or has no room for more connections.")
        try:
            with anyio.fail_after(CONNECT_SECONDS):
                await self.pool.use_dialled(requester, await self._dialled(requester, first))
        except (ConnectionLostError, TimeoutError) as error:
            raise RequestRefusedError(f"No connection could be opened: {error or 'no answer in time'}.") from None
        return Frame(CONNECT_KIND)

    async def take(self, peer: NodeId, conn: TlsConnection, raw: SocketBytes) -> None:
        """Use a connection that this peer opened, until it ends."""
        if self.pool is None:
            raw.close_now()
        else:
            await self.pool.welcome(peer, BodyStream(conn, raw))

    async def _dialled(self, peer: NodeId, first: BoundedMuxer) -> BodyStream:
        """A new connection to where the first one leads. Raises ConnectionLostError."""
        address = first.get_remote_address()
        if address is None:
            raise ConnectionLostError("its address is not known")
        return await dial_for_bodies(self._upgrader, peer, address, self._algorithm)
