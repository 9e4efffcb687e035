"""Large bodies: further connections with a peer, at the port and through the router's mapping of the first one.

The side that dialled the first connection dials the others too, because it knows an address that works. The other side
asks it to. Between two routers with a punched hole each further connection punches its own: the dialling side binds a
fresh port and sends its number to the peer, which calls there from its listening port, so that its router lets the
dialler in. That needs a router of the dialler that keeps port numbers, or a router of the peer that filters by address
only. Where only a relay leads to the peer, bodies get one further circuit. With other libp2p programs they stay on
streams.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated
from weakref import WeakKeyDictionary

import anyio
import trio
from anyio.abc import TaskGroup
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from msgspec import Meta, Struct

from neuroshard.errors import NeuroShardError
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network.libp2p.addresses import PeerAddress
from neuroshard.network.libp2p.connections import Connections
from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.peer_limits import contain_errors
from neuroshard.network.libp2p.relay_messages import RelayedBytes
from neuroshard.network.libp2p.sockets import SocketBytes
from neuroshard.network.libp2p.tls import TlsConnection
from neuroshard.network.libp2p.upgrading import NodeUpgrader
from neuroshard.network.limits import TokenBucket
from neuroshard.network.pool import BulkPool, NotDeliveredError
from neuroshard.network.pool.options import MOST_CONNECTIONS, ConnectionLostError, DialRefusedError, PeerFullError
from neuroshard.network.tcp_options import TcpInfo
from neuroshard.network.transfer_policy import BULK_BYTES
from neuroshard.network.transport import NobodyListensError, PeerUnreachableError, RequestRefusedError
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId

PORTION_BYTES = 256 * 1024  # read at a time: memory of the body itself waits for it
CONNECT_KIND = "pool/connect"
CONNECT_SECONDS = 10.0
ASKED_AGAIN_SECONDS = 60.0  # after bodies could not use connections of their own
PUNCH_SECONDS = 4.0
PUNCH_PAUSE_SECONDS = 0.1  # a router may answer the first attempt with a reset
MOST_ANSWERED = 256  # requests for a connection that are answered at once; a peer that does not answer takes its time
PUNCHES_PER_MINUTE = 3 * MOST_CONNECTIONS  # of one peer: it must not make this node call freely


class ConnectMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A peer asks for a connection: to be dialled, or to be called at a port from which it dials."""

    port: Annotated[int, Meta(ge=1, le=65_535)] | None = None


class BodyStream:
    """A connection for bodies; see SecureStream. A task may send while another one receives."""

    def __init__(self, conn: TlsConnection, raw: SocketBytes | RelayedBytes) -> None:
        raw.portion_bytes = PORTION_BYTES
        self.heard_at = trio.current_time()
        self._conn = conn
        self._raw = raw

    @property
    def ip(self) -> str:
        """IP address of the other side, "" through a relay."""
        return self._raw.ip

    async def receive_some(self, memory: memoryview) -> int:
        """Wait for bytes and put some into `memory`. Raises ConnectionLostError, also at the end."""
        try:
            count = await self._conn.read_into(memory)
        except BaseLibp2pError as error:
            raise _lost(error) from None
        self.heard_at = trio.current_time()
        return count

    async def send_all(self, *views: bytes | memoryview) -> None:
        """Hand all bytes to the system. Raises ConnectionLostError."""
        try:
            await self._conn.write_all(views)
        except BaseLibp2pError as error:
            raise _lost(error) from None
        self.heard_at = trio.current_time()

    def close(self) -> None:
        """Close it; a task that waits for it gets ConnectionLostError."""
        self._raw.cut()

    def tcp_info(self) -> TcpInfo | None:
        """The system's measurements, where it has any."""
        return self._raw.tcp_info()


def _lost(error: Exception) -> ConnectionLostError:
    return ConnectionLostError(str(error) or type(error).__name__)


async def upgraded_for_bodies(upgrader: NodeUpgrader, peer: NodeId, raw: SocketBytes | RelayedBytes) -> BodyStream:
    """Make a connection for bodies of one with this peer. Raises ConnectionLostError; then it is closed."""
    result: TlsConnection | Exception | None = None
    try:
        upgrade = upgrader.upgrade_for_bodies(RawConnection(raw, initiator=True), ID.from_base58(peer))
        result = await contain_errors(upgrade, "A handshake for bodies")
    except ValueError as error:  # an id that cannot be one
        raise _lost(error) from None
    finally:
        if not isinstance(result, TlsConnection):
            raw.cut()
    if not isinstance(result, TlsConnection):
        raise _lost(result or ConnectionError("no connection"))
    return BodyStream(result, raw)


async def dialled(address: tuple[str, int], from_port: int = 0, algorithm: str | None = None) -> SocketBytes:
    """A connection to an IP address and port; `from_port` 0 is any, `algorithm` the congestion control.

    Raises ConnectionLostError.
    """
    try:
        sock = trio.socket.socket(_family_of(address[0]), socket.SOCK_STREAM)
    except OSError as error:  # for example because too many files are open
        raise _lost(error) from None
    try:
        if from_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for one attempt after another
            await sock.bind(("", from_port))
        await sock.connect(address)
    except BaseException as error:
        sock.close()
        if isinstance(error, ConnectionRefusedError):
            raise DialRefusedError(str(error)) from None
        if isinstance(error, OSError):
            raise ConnectionLostError(str(error)) from None
        raise
    return SocketBytes(trio.SocketStream(sock), algorithm)


def _family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _free_port(host: str) -> int:
    with socket.socket(_family_of(host), socket.SOCK_STREAM) as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def is_bulk(frame: Frame, reply: FrameLimits) -> bool:
    """Whether a request or its answer is worth connections of its own."""
    return sum(part.spec.byte_count for part in frame.tensors) > BULK_BYTES or reply.max_body_bytes > BULK_BYTES


AskSmall = Callable[[NodeId, Frame, float], Awaitable[Frame]]
"""A small request over a stream: peer, frame, seconds."""


class BodyConnections:
    """Opens the pool's connections, and knows the peers that have none."""

    def __init__(
        self,
        connections: Connections,
        upgrader: NodeUpgrader,
        ask: AskSmall,
        tasks: TaskGroup,
        algorithm: str | None,
    ) -> None:
        """`algorithm` is the congestion control."""
        self._tasks = tasks
        self._punches = dict[NodeId, TokenBucket]()
        self._opening = Counter[NodeId]()  # connections that peers asked for
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
        if self._is_avoided(peer) and not self.pool.connections_with(peer):
            return None
        try:
            return await self.pool.request(peer, frame, reply, timeout_seconds=timeout_seconds)
        except NotDeliveredError:
            self._avoid(peer)
            return None

    async def open_to(self, peer: NodeId) -> BodyStream | None:
        """As `Open` of the pool."""
        try:
            return await self._opened_to(peer)
        except BaseException:  # also when time ran out, because then a shorter request has failed already
            if self.pool is not None and not self.pool.connections_with(peer):
                self._avoid(peer)
            raise

    def _is_avoided(self, peer: NodeId) -> bool:
        first = self._connections.of(peer)
        return first is not None and anyio.current_time() < self._failed_until.get(first, 0.0)

    def _avoid(self, peer: NodeId) -> None:
        """Use streams for a while, unless the peer opens a connection for bodies."""
        first = self._connections.of(peer)
        if first is not None:
            self._failed_until[first] = anyio.current_time() + ASKED_AGAIN_SECONDS

    async def _opened_to(self, peer: NodeId) -> BodyStream | None:
        try:
            await self._connections.to(peer)
        except NobodyListensError as error:
            raise DialRefusedError(str(error)) from None
        except PeerUnreachableError as error:
            raise _lost(error) from None
        first = self._connections.dialled_to(peer)
        if first is not None:
            return await self._dialled(peer, first)
        try:
            await self._ask(peer, Frame(CONNECT_KIND, ConnectMessage()), CONNECT_SECONDS)
        except NeuroShardError as error:
            raise _lost(error) from None
        return None

    async def answer_connect(self, requester: NodeId, question: Frame) -> Frame:
        """Open a connection with a peer that cannot dial this node, or help it to dial. Raises RequestRefusedError."""
        port = question.read(ConnectMessage).port
        if port is not None:
            return self._answer_punch(requester, port)
        first = self._connections.dialled_to(requester)
        if self.pool is None or first is None or not self.pool.has_room_for(requester, self._opening[requester]):
            raise RequestRefusedError("This node has not dialled that one, or has no room for more connections.")
        self._opening[requester] += 1
        try:
            with anyio.fail_after(CONNECT_SECONDS):
                await self.pool.use_dialled(requester, await self._dialled(requester, first))
        except (ConnectionLostError, TimeoutError) as error:
            raise RequestRefusedError(f"No connection could be opened: {str(error) or 'no answer in time'}.") from None
        finally:
            self._opening[requester] -= 1
            self._opening += Counter()  # only those that are not 0
        return Frame(CONNECT_KIND)

    def _answer_punch(self, requester: NodeId, port: int) -> Frame:
        is_punched = self._connections.kind_of(requester) is ConnectionKind.PUNCHED
        ip = self._connections.direct_ip(requester)
        self._punches = {peer: bucket for peer, bucket in self._punches.items() if self._connections.of(peer)}
        allowed = self._punches.setdefault(requester, TokenBucket(PUNCHES_PER_MINUTE, PUNCHES_PER_MINUTE / 60))
        if not is_punched or ip is None or not allowed.take(anyio.current_time()):
            raise RequestRefusedError("There is no punched hole between the two nodes, or there were too many calls.")
        self._tasks.start_soon(self._call, PeerAddress(requester, ip, port))
        return Frame(CONNECT_KIND)

    async def _call(self, address: PeerAddress) -> None:
        """Call a peer that dials this node at the same moment, so that this node's router lets it in."""
        with anyio.move_on_after(PUNCH_SECONDS):
            while True:
                stream = await self._connections.call(address)
                if stream is not None:
                    break
                await anyio.sleep(PUNCH_PAUSE_SECONDS)
            self._tasks.start_soon(self._connections.accept, stream)

    async def take(self, peer: NodeId, conn: TlsConnection, raw: SocketBytes | RelayedBytes) -> None:
        """Use a connection that this peer opened, until it ends."""
        if self.pool is None:
            raw.cut()
        else:
            await self.pool.welcome(peer, BodyStream(conn, raw))

    async def _dialled(self, peer: NodeId, first: BoundedMuxer) -> BodyStream:
        """A new connection to where the first one leads. Raises ConnectionLostError."""
        address = first.get_remote_address()
        if address is None:
            return await self._relayed(peer, first)
        is_punched = self._connections.is_punched(first)
        raw = await (self._punched(peer, address) if is_punched else dialled(address, algorithm=self._algorithm))
        return await upgraded_for_bodies(self._upgrader, peer, raw)

    async def _relayed(self, peer: NodeId, first: BoundedMuxer) -> BodyStream:
        """A further circuit, until the first one ends, for example because a hole was punched.

        Raises ConnectionLostError.
        """
        relay = self._connections.relay
        if relay is None or (self.pool is not None and self.pool.connections_with(peer)):
            raise PeerFullError("one circuit is enough: all of them share one connection with the relay")
        try:
            raw = await relay.another_circuit(first)
        except BaseLibp2pError as error:
            raise _lost(error) from None
        circuit = await upgraded_for_bodies(self._upgrader, peer, raw)
        self._tasks.start_soon(_close_with, first, circuit)
        return circuit

    async def _punched(self, peer: NodeId, address: tuple[str, int]) -> SocketBytes:
        """A connection through both routers. Raises ConnectionLostError."""
        try:
            port = _free_port(address[0])
            await self._ask(peer, Frame(CONNECT_KIND, ConnectMessage(port)), CONNECT_SECONDS)
        except (NeuroShardError, OSError) as error:
            raise _lost(error) from None
        with anyio.move_on_after(PUNCH_SECONDS):
            while True:
                with suppress(ConnectionLostError):
                    return await dialled(address, port, self._algorithm)
                await anyio.sleep(PUNCH_PAUSE_SECONDS)
        raise ConnectionLostError("no hole for another connection could be punched")


async def _close_with(first: BoundedMuxer, circuit: BodyStream) -> None:
    await first.wait_closed()
    circuit.close()
