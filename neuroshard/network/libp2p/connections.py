"""The connections of one node: accepted within limits, dialled on demand, closed when idle, listed for the status."""

from __future__ import annotations

import logging
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address
from math import inf
from typing import Protocol, TypeAlias, cast

import anyio
import trio
from libp2p.abc import IMuxedConn, INetConn
from libp2p.connection_types import ConnectionType
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from neuroshard.network.libp2p.address_book import PeerAddressBook
from neuroshard.network.libp2p.addresses import PeerAddress, is_near
from neuroshard.network.libp2p.host import NodeSwarm
from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.peer_limits import contain_errors
from neuroshard.network.libp2p.places import ConnectionAdmission, DialBudget
from neuroshard.network.libp2p.relay_messages import RelayedBytes
from neuroshard.network.libp2p.sockets import SocketBytes, share_port
from neuroshard.network.libp2p.tls import TlsConnection
from neuroshard.network.pool import PeerTraffic
from neuroshard.network.transport import Connection, NobodyListensError, PeerUnreachableError
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId

PUNCH_SECONDS = 3.0  # for two simultaneous dials to meet


class Dialler:
    """Dials connections for one node. `source` is its listening address and port, used as the local end as well."""

    def __init__(
        self,
        swarm: NodeSwarm,
        budget: DialBudget,
        source: tuple[str, int] | None = None,
        congestion_control: str | None = None,
    ) -> None:
        self._swarm = swarm
        self.budget = budget
        self._source = source
        self.congestion_control = congestion_control

    async def dial(self, address: PeerAddress) -> BoundedMuxer:
        """Connect to a peer at an address.

        Raises OSError, or PeerUnreachableError if another node answers or the host was dialled too often.
        """
        stream = await self._shared_call(address)
        if stream is not None:
            # the peer may dial at the same moment, also from its listening port: then both are the client
            with suppress(PeerUnreachableError):
                muxer = await self._upgraded(stream, address)
                muxer.is_from_listening_port = True
                return muxer
        self._count(address)
        return await self._upgraded(await trio.open_tcp_stream(address.host, address.port), address)

    def _count(self, address: PeerAddress) -> None:
        """Count a socket that is opened to a host. Raises PeerUnreachableError if there were too many."""
        if not self.budget.take(address, anyio.current_time()):
            raise PeerUnreachableError("this host was dialled too often without success; it is tried again later")

    async def punch(self, address: PeerAddress, *, is_client: bool) -> BoundedMuxer | None:
        """Connect to a peer that dials this node at the same moment; the two must have different roles."""
        with anyio.move_on_after(PUNCH_SECONDS), suppress(PeerUnreachableError):
            stream = await self._shared_call(address)
            if stream is not None:
                return await self._upgraded(stream, address, is_client=is_client)
        return None

    async def _shared_call(self, address: PeerAddress) -> trio.SocketStream | None:
        if self._can_call(address):
            self._count(address)
        return await self.call(address)

    def _can_call(self, address: PeerAddress) -> bool:
        return self._source is not None and _is_same_family(self._source[0], address.host)

    async def call(self, address: PeerAddress) -> trio.SocketStream | None:
        """Dial from the listening port: the router maps it to the same external port as all other connections.

        None if that fails, or if the port cannot be shared.
        """
        if self._source is None or not self._can_call(address):
            return None
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            sock = trio.socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # for example because too many files are open
            return None
        try:
            share_port(sock)
            await sock.bind(self._source)
            await sock.connect((address.host, address.port))
        except OSError:  # for example while the last connection with this address lingers
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return trio.SocketStream(sock)

    async def _upgraded(
        self, stream: trio.SocketStream, address: PeerAddress, *, is_client: bool = True
    ) -> BoundedMuxer:
        raw = SocketBytes(stream, self.congestion_control)
        result: BoundedMuxer | Exception | None = None
        try:
            result = await contain_errors(self._shake_hands(raw, address, is_client=is_client), "A handshake")
        finally:
            if not isinstance(result, BoundedMuxer):
                with anyio.CancelScope(shield=True):
                    await contain_errors(raw.close(), "Closing")
        if not isinstance(result, BoundedMuxer):
            raise PeerUnreachableError(f"it does not answer as that node ({result})")
        self.budget.note_worked(address, anyio.current_time())
        return result

    async def _shake_hands(self, raw: SocketBytes, address: PeerAddress, *, is_client: bool) -> BoundedMuxer:
        peer = ID.from_base58(address.peer)
        if is_client:
            conn = await self._swarm.upgrade_outbound_raw_conn(RawConnection(raw, initiator=True), peer)
            muxer = conn.muxed_conn
        else:
            muxer = await self._swarm.upgrade_inbound_raw_conn(
                RawConnection(raw, initiator=False), Multiaddr(address.text)
            )
        if not isinstance(muxer, BoundedMuxer):
            raise TypeError("every connection has a BoundedMuxer")
        if muxer.peer_id != peer:
            await muxer.close()
            raise PeerUnreachableError("another node answers there")
        return muxer


def _is_same_family(first: str, second: str) -> bool:
    try:
        return ip_address(first).version == ip_address(second).version
    except ValueError:
        return False  # a name


DIAL_SECONDS = 10.0
NEXT_ADDRESS_SECONDS = 0.25  # delay before the next address is tried in parallel
REACHED_SECONDS = 3600.0
KEPT_PEERS = 96  # above this number, connections that are not in use are closed
IDLE_SECONDS = 120.0
TRIM_SECONDS = 30.0
MAX_PUNCHED_IPS = 256
MOST_IDS = 1024
_LOG = logging.getLogger(__name__)


class RelayDialler(Protocol):
    """Reaches a peer through a relay."""

    async def dial(self, address: PeerAddress) -> None:
        """Connect. Raises PeerUnreachableError."""
        ...

    async def another_circuit(self, first: BoundedMuxer) -> RelayedBytes:
        """A further circuit to the end of one that this node dialled. Raises BaseLibp2pError."""
        ...


TakeBodies: TypeAlias = Callable[[NodeId, TlsConnection, SocketBytes | RelayedBytes], Awaitable[None]]
"""Uses a connection for bodies that this peer opened, until it ends."""


class Connections:
    """Open connections by peer, and the ways to open new ones."""

    def __init__(
        self,
        swarm: NodeSwarm,
        local_id: NodeId,
        admission: ConnectionAdmission,
        contacts: PeerAddressBook,
        dialler: Dialler,
    ) -> None:
        self._swarm = swarm
        self._dialler = dialler
        self.local_id = local_id
        self._admission = admission
        self._contacts = contacts
        self._dials: dict[NodeId, anyio.Lock] = {}
        self._punched: set[BoundedMuxer] = set()
        self._reached_at = -inf
        self._punched_ips: OrderedDict[str, None] = OrderedDict()
        self._id_of = lru_cache(MOST_IDS)(ID.from_base58)  # base58 is slow: it is arithmetic on a long number
        self.relay: RelayDialler | None = None
        self.take_bodies: TakeBodies | None = None

    async def accept(self, stream: trio.SocketStream) -> None:
        """Upgrade an accepted socket to a connection, if the limits allow it."""
        raw = SocketBytes(stream, self._dialler.congestion_control)
        if not self._admission.begin_handshake(raw):
            await contain_errors(raw.close(), "Closing")
            return
        await contain_errors(self._serve(raw), f"A connection from {raw.ip}")

    async def _serve(self, raw: SocketBytes) -> None:
        try:
            muxer = await self._accepted(raw)
        finally:
            self._admission.end_handshake(raw)
        if isinstance(muxer, TlsConnection):
            await self.take(muxer, raw)
            return
        if not isinstance(muxer, BoundedMuxer):
            return
        if raw.ip in self._punched_ips:  # it arrives because this node dialled there
            self._mark_punched(muxer)
        elif not is_near(raw.ip):
            self._reached_at = anyio.current_time()
        await muxer.wait_closed()  # the socket lives as long as this task

    async def _accepted(self, raw: SocketBytes) -> IMuxedConn | TlsConnection:
        try:
            return await self._swarm.accept(RawConnection(raw, initiator=False))
        except BaseException:
            raw.cut()
            raise

    async def take(self, conn: TlsConnection, raw: SocketBytes | RelayedBytes) -> None:
        """Use a connection for bodies, if its peer has one for streams."""
        peer = NodeId(str(conn.get_remote_peer()))
        if self.take_bodies is None or self.of(peer) is None:
            raw.cut()
        else:
            await self.take_bodies(peer, conn, raw)

    def dialled_to(self, peer: NodeId) -> BoundedMuxer | None:
        """A connection with a peer that this node dialled, so that it can dial there again; a circuit if all are."""
        muxers = self._muxers_of(self._id_of(peer))
        usable = [muxer for muxer in muxers if not _is_relayed(muxer)] or muxers
        return max((one for one in usable if one.is_initiator), key=lambda muxer: muxer.opened_at, default=None)

    def of(self, peer: NodeId) -> BoundedMuxer | None:
        """The best open connection to a peer: direct before relayed, new before old."""
        muxers = self._muxers_of(self._id_of(peer))
        return max(muxers, key=lambda muxer: (not _is_relayed(muxer), muxer.opened_at), default=None)

    def has(self, peer: NodeId) -> bool:
        """Whether there is an open connection to a peer."""
        return self.of(peer) is not None

    def note_use(self, peer: NodeId) -> None:
        """Count a peer's best connection as used, because bodies are on their way over others."""
        muxer = self.of(peer)
        if muxer is not None:
            muxer.note_use()

    async def to(self, peer: NodeId) -> BoundedMuxer:
        """A connection to a peer, dialled if there is none. Raises PeerUnreachableError."""
        existing = self.of(peer)
        return existing or await self.dial(peer, self._contacts.to_dial(peer, anyio.current_time()))

    async def follow(self, address: PeerAddress, *, is_given: bool) -> None:
        """Connect at an address from the owner or from another peer. Raises PeerUnreachableError."""
        if not is_given and not self._contacts.may_follow(address):
            raise PeerUnreachableError(
                f"{address.text} is not a public address. Only the owner or a near node may report it."
            )
        if is_given:
            self._dialler.budget.trust(address.of_relay() if address.is_relayed else address)
        await self.dial(address.peer, (address,))

    async def dial(self, peer: NodeId, addresses: Sequence[PeerAddress]) -> BoundedMuxer:
        """Connect at the first address where this peer answers. Raises PeerUnreachableError.

        It is a NobodyListensError if a computer answers at every address and no program listens there.
        """
        if peer == self.local_id:
            raise PeerUnreachableError("That is this node itself.")
        lock = self._dials.setdefault(peer, anyio.Lock())
        try:
            async with lock:
                existing = self.of(peer)
                if existing is not None:
                    return existing
                await self._dial_any(peer, addresses)
        finally:
            if not lock.statistics().locked and not lock.statistics().tasks_waiting:
                self._dials.pop(peer, None)
        reached = self.of(peer)
        if reached is None:
            raise PeerUnreachableError(f"Peer {peer} hung up.")
        return reached

    def peers(self) -> frozenset[NodeId]:
        """The connected peers."""
        known = tuple(self._swarm.connections.items())
        return frozenset(NodeId(str(peer)) for peer, conns in known if any(map(_is_usable, conns)))

    def list(self, bulk: Mapping[NodeId, PeerTraffic]) -> tuple[Connection, ...]:
        """One entry for each peer. Its counts of bytes include the traffic over the pool, `bulk`."""
        peers = tuple(self._swarm.connections)
        return tuple(self._entry(peer, muxers, bulk) for peer in peers if (muxers := self._muxers_of(peer)))

    def direct_ip(self, peer: NodeId) -> str | None:
        """IP address of a peer with a direct connection; None without one."""
        muxer = self.of(peer)
        address = muxer.get_remote_address() if muxer is not None and not _is_relayed(muxer) else None
        return address[0] if address else None

    def kind_of(self, peer: NodeId) -> ConnectionKind | None:
        """The kind of a peer's connection; None if it is not connected."""
        muxer = self.of(peer)
        return None if muxer is None else self._kind(muxer)

    @property
    def is_reached_from_outside(self) -> bool:
        """Whether a peer outside this node's own networks connected to it recently."""
        return anyio.current_time() - self._reached_at < REACHED_SECONDS

    def forget_reached(self) -> None:
        """Forget inbound connections after the address changed: the new address may not be reachable."""
        self._reached_at = -inf

    async def trim(self, needed: Callable[[], set[NodeId]]) -> None:
        """While there are many connections, close the least recently used ones at intervals, until cancelled."""
        while True:
            await anyio.sleep(TRIM_SECONDS)
            for peer in self._needless(needed()):
                await self.close_peer(peer)

    def _needless(self, needed: set[NodeId]) -> list[NodeId]:
        used_at = {
            NodeId(str(peer)): max(muxer.used_at for muxer in muxers)
            for peer in tuple(self._swarm.connections)
            if (muxers := self._muxers_of(peer))
        }
        idle_since = anyio.current_time() - IDLE_SECONDS
        idle = [peer for peer, at in used_at.items() if at < idle_since and peer not in needed]
        return sorted(idle, key=lambda peer: used_at[peer])[: max(0, len(used_at) - KEPT_PEERS)]

    async def close_peer(self, peer: NodeId) -> None:
        """Close all connections with a peer."""
        async with anyio.create_task_group() as tasks:
            for conn in self._swarm.get_connections(ID.from_base58(peer)):
                tasks.start_soon(conn.close)

    async def close(self) -> None:
        """Close all connections at once. libp2p would close them one after the other, each with a pause."""
        async with anyio.create_task_group() as tasks:
            for conn in self._swarm.get_connections():
                tasks.start_soon(contain_errors, conn.close(), "Closing")

    def expect(self, addresses: Sequence[PeerAddress]) -> None:
        """Expect a connection from these addresses, because this node dials them."""
        self._punched_ips.update({address.host: None for address in addresses})
        while len(self._punched_ips) > MAX_PUNCHED_IPS:
            self._punched_ips.popitem(last=False)

    async def punch(self, address: PeerAddress, *, is_client: bool) -> BoundedMuxer | None:
        """Connect directly to a peer that dials this node at the same moment."""
        muxer = await self._dialler.punch(address, is_client=is_client)
        if muxer is not None:
            self._mark_punched(muxer)
        return muxer

    async def reach(self, address: PeerAddress) -> BoundedMuxer | None:
        """Connect directly to a peer that may have a relayed connection; None if that fails."""
        with anyio.move_on_after(PUNCH_SECONDS), suppress(PeerUnreachableError, OSError):
            return await self._dialler.dial(address)
        return None

    async def call(self, address: PeerAddress) -> trio.SocketStream | None:
        """Call an address from the listening port; None if that fails."""
        return await self._dialler.call(address)

    def is_punched(self, muxer: BoundedMuxer) -> bool:
        """Whether a connection goes through a punched hole."""
        return muxer in self._punched

    def _mark_punched(self, muxer: BoundedMuxer) -> None:
        self._punched = {known for known in self._punched if not known.is_closed} | {muxer}

    def _muxers_of(self, peer: ID) -> list[BoundedMuxer]:
        return [cast("BoundedMuxer", conn.muxed_conn) for conn in self._swarm.get_connections(peer) if _is_usable(conn)]

    def _entry(self, peer: ID, muxers: Sequence[BoundedMuxer], bulk_of: Mapping[NodeId, PeerTraffic]) -> Connection:
        best = max(muxers, key=lambda muxer: (not _is_relayed(muxer), muxer.opened_at))
        bulk = bulk_of.get(NodeId(str(peer)), PeerTraffic())
        return Connection(
            peer=NodeId(str(peer)),
            address=best.remote_text,
            kind=self._kind(best),
            is_outbound=best.is_initiator,
            since=min(muxer.opened_at for muxer in muxers),
            bytes_sent=sum(muxer.bytes_sent for muxer in muxers) + bulk.bytes_sent,
            bytes_received=sum(muxer.bytes_received for muxer in muxers) + bulk.bytes_received,
            rtt_seconds=best.round_trips.least,
            bulk_connections=bulk.connections,
            is_far=best.is_far,
            bytes_arrived=bulk.bytes_arrived,
            busy_seconds=bulk.busy_seconds,
        )

    def _kind(self, muxer: BoundedMuxer) -> ConnectionKind:
        if _is_relayed(muxer):
            return ConnectionKind.RELAYED
        return ConnectionKind.PUNCHED if self.is_punched(muxer) else ConnectionKind.DIRECT

    async def _dial_any(self, peer: NodeId, addresses: Sequence[PeerAddress]) -> None:
        if not addresses:
            raise PeerUnreachableError(f"No address of peer {peer} is known.")
        failures: list[_Failure] = []
        async with anyio.create_task_group() as tasks:
            for address in addresses:
                failed = anyio.Event()
                tasks.start_soon(self._try, address, tasks.cancel_scope.cancel, failed, failures)
                with anyio.move_on_after(NEXT_ADDRESS_SECONDS):
                    await failed.wait()
        if len(failures) == len(addresses):
            kind = NobodyListensError if all(failure.is_refused for failure in failures) else PeerUnreachableError
            raise kind(f"Peer {peer} cannot be reached: {'; '.join(failure.text for failure in failures)}.")

    async def _try(
        self, address: PeerAddress, succeed: Callable[[], None], failed: anyio.Event, failures: list[_Failure]
    ) -> None:
        try:
            with anyio.fail_after(DIAL_SECONDS):
                await (self._dial_relayed(address) if address.is_relayed else self._dialler.dial(address))
        except (PeerUnreachableError, OSError, TimeoutError) as error:
            reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            failures.append(_Failure(f"{address.host} port {address.port}: {reason}", is_refused=_is_refusal(error)))
            self._contacts.note_failed(address)
            self._dialler.budget.note_failed(address)
            failed.set()
        else:
            self._contacts.note_worked(address)
            succeed()

    async def _dial_relayed(self, address: PeerAddress) -> None:
        if self.relay is None:
            raise PeerUnreachableError("relays are switched off")
        await self.relay.dial(address)


@dataclass(frozen=True)
class _Failure:
    text: str
    is_refused: bool


def _is_refusal(error: Exception) -> bool:
    """Whether nobody listens at the port. trio groups the errors of all addresses of a name."""
    causes: tuple[object, ...] = getattr(error.__cause__, "exceptions", (error,))
    return all(isinstance(cause, ConnectionRefusedError) for cause in causes)


def _is_usable(conn: INetConn) -> bool:
    muxer = conn.muxed_conn
    return isinstance(muxer, BoundedMuxer) and muxer.is_established


def _is_relayed(muxer: BoundedMuxer) -> bool:
    return muxer.get_connection_type() == ConnectionType.RELAYED
