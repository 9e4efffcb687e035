"""Circuit relay v2: the client of a node that peers cannot dial, and the server that forwards its connections.

The server serves the peers that the membership gate accepts: without a closed run any peer, otherwise only members. It
limits the bytes between two households and cannot read them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import anyio
from libp2p.abc import INetStream
from libp2p.connection_types import ConnectionType
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Reservation, Status, StopMessage
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from multiaddr import Multiaddr

from neuroshard.network.crowds import network_of
from neuroshard.network.libp2p.address_book import PeerAddressBook
from neuroshard.network.libp2p.addresses import PeerAddress, parse_address
from neuroshard.network.libp2p.connections import Connections
from neuroshard.network.libp2p.host import NodeSwarm, stream_of
from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.negotiation import confirm, proposal
from neuroshard.network.libp2p.peer_limits import contain_errors
from neuroshard.network.libp2p.relay_messages import (
    HOP_PROTOCOL,
    MESSAGE_SECONDS,
    STOP_PROTOCOL,
    RelayDeniedError,
    RelayedBytes,
    RelayError,
    encode_message,
    encoded_node_id,
    node_of,
    read_message,
)
from neuroshard.network.libp2p.streams import YamuxStream
from neuroshard.network.libp2p.tls import TlsConnection
from neuroshard.network.limits import UploadPacer
from neuroshard.network.membership_gate import MembershipGate
from neuroshard.network.transport import PeerUnreachableError
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import MAX_ADDRESS_CHARACTERS, NodeId, is_loopback

WANTED_RELAYS = 2
LOOK_SECONDS = 2.0
REFRESH_SECONDS = 1200.0  # well before a reservation ends
REFUSED_SECONDS = 300.0  # until a relay that refused is asked again
DENIED_SECONDS = 4.0  # the same for one that serves only members: this node may become one at any time
CIRCUIT_AGAIN_SECONDS = 1.0
PATIENCE_SECONDS = 4.0  # in which such a relay hears of a member that has just connected or has just been admitted
ADDRESSES_OF_RELAY = 2
_LOG = logging.getLogger(__name__)


class RelayClient:
    """Keeps reservations at relays while this node cannot be reached directly, and dials through relays."""

    def __init__(
        self,
        swarm: NodeSwarm,
        connections: Connections,
        contacts: PeerAddressBook,
        when_relayed: Callable[[NodeId], Awaitable[None]] | None = None,
    ) -> None:
        self._swarm = swarm
        self._connections = connections
        self._contacts = contacts
        self._when_relayed = when_relayed
        self._places: dict[NodeId, float] = {}  # relays with a reservation, and since when by the loop's clock
        self._refused: dict[NodeId, float] = {}
        self._denials: Counter[NodeId] = Counter()  # in a row

    def relays(self) -> set[NodeId]:
        """The relays at which this node has a reservation."""
        return set(self._places)

    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs through the relays at which this node has a reservation."""
        local = self._connections.local_id
        texts = (
            f"{address.text}/p2p-circuit/p2p/{local}"
            for relay in self._places
            for address in self._contacts.vouched(relay)[:ADDRESSES_OF_RELAY]
            if not address.is_relayed
        )
        return tuple(text for text in texts if len(text) <= MAX_ADDRESS_CHARACTERS)  # peers refuse longer ones

    async def run(self) -> None:
        """Keep reservations at relays, until cancelled."""
        while True:
            await self._keep_places()
            await anyio.sleep(LOOK_SECONDS)

    async def dial(self, address: PeerAddress) -> None:
        """Connect through a relay. Raises PeerUnreachableError."""
        relay = address.of_relay()
        muxer = await self._connections.dial(relay.peer, (relay,))
        failure: Exception | None = TimeoutError("no answer in time")
        with anyio.move_on_after(MESSAGE_SECONDS):
            failure = await contain_errors(self._dial_over(muxer, address), "A circuit")
        if failure is not None:
            raise PeerUnreachableError(f"the relay does not reach it ({failure})")

    async def handle_stream(self, net_stream: INetStream) -> None:
        """Accept a connection that a relay forwards to this node."""
        stream = stream_of(net_stream)
        relay = NodeId(str(net_stream.muxed_conn.peer_id))
        try:
            with anyio.fail_after(MESSAGE_SECONDS):
                announced = await read_message(stream, StopMessage())
            if announced.type != StopMessage.CONNECT or relay not in self._places:
                await stream.write(
                    encode_message(StopMessage(type=StopMessage.STATUS, status=Status.PERMISSION_DENIED))
                )
                return
            await stream.write(encode_message(StopMessage(type=StopMessage.STATUS, status=Status.OK)))
            address = f"/p2p/{relay}/p2p-circuit/p2p/{node_of(announced.peer.id)}"
            circuit = RelayedBytes(stream)
            conn = await self._swarm.accept(_raw(circuit, initiator=False, address=address))
            if isinstance(conn, TlsConnection):
                await self._connections.take(conn, circuit)
            elif isinstance(conn, BoundedMuxer):
                await self._live(conn)
        finally:
            stream.abandon()

    async def another_circuit(self, first: BoundedMuxer) -> RelayedBytes:
        """A further circuit to the end of one that this node dialled. Raises BaseLibp2pError."""
        address = parse_address(first.remote_text)
        relay = self._connections.of(address.of_relay().peer)
        if relay is None:
            raise RelayError("the relay is gone")
        return RelayedBytes(await self._circuit(relay, address.peer))

    async def _live(self, muxer: BoundedMuxer) -> None:
        """Keep a circuit open for as long as the task of its stream runs."""
        async with anyio.create_task_group() as tasks:
            if self._when_relayed is not None:
                tasks.start_soon(contain_errors, self._when_relayed(NodeId(str(muxer.peer_id))), "Punching")
            await muxer.wait_closed()
            tasks.cancel_scope.cancel()

    async def _dial_over(self, muxer: BoundedMuxer, address: PeerAddress) -> None:
        stream = await self._circuit(muxer, address.peer)
        is_connected = False
        try:
            raw = _raw(RelayedBytes(stream), initiator=True, address=address.text)
            await self._swarm.upgrade_outbound_raw_conn(raw, ID.from_base58(address.peer))
            is_connected = True
        finally:
            if not is_connected:
                stream.abandon()

    async def _circuit(self, relay: BoundedMuxer, peer: NodeId) -> YamuxStream:
        """A stream that a relay connects with a peer. Raises BaseLibp2pError.

        A newcomer may ask a relay before it has shown the relay that it is a member, so a denial is not final at once.
        """
        until = anyio.current_time() + PATIENCE_SECONDS
        while True:
            try:
                return await self._asked_circuit(relay, peer)
            except RelayDeniedError:
                if anyio.current_time() >= until:
                    raise
            await anyio.sleep(CIRCUIT_AGAIN_SECONDS)

    async def _asked_circuit(self, relay: BoundedMuxer, peer: NodeId) -> YamuxStream:
        stream = await relay.open_stream()
        try:
            await self._ask(stream, HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=encoded_node_id(peer))))
        except BaseException:
            stream.abandon()
            raise
        return stream

    async def _ask(self, stream: YamuxStream, question: HopMessage) -> HopMessage:
        """Send a request to a relay and return its answer if it agrees. Raises BaseLibp2pError."""
        await stream.write(proposal(HOP_PROTOCOL) + encode_message(question))
        await confirm(stream, HOP_PROTOCOL)
        answer = await read_message(stream, HopMessage())
        if answer.status == Status.PERMISSION_DENIED:
            raise RelayDeniedError("the relay serves only members of a run, and does not know this node as one")
        if answer.status != Status.OK:
            raise RelayError(f"the relay answers {answer.status}")
        return answer

    async def _keep_places(self) -> None:
        now = anyio.current_time()
        connected = {relay for relay in self._places if self._connections.of(relay) is not None}
        self._places = {relay: since for relay, since in self._places.items() if relay in connected}
        self._refused = {relay: until for relay, until in self._refused.items() if until > now}
        for relay in [relay for relay in self._denials if self._connections.of(relay) is None]:
            del self._denials[relay]
        if self._connections.is_reached_from_outside:
            self._places = {}
            return
        for relay in self._relays():
            is_due = now - self._places[relay] > REFRESH_SECONDS if relay in self._places else True
            if is_due and (relay in self._places or len(self._places) < WANTED_RELAYS):
                await self._reserve(relay)

    def _relays(self) -> list[NodeId]:
        """Directly connected peers that offer to relay."""
        found: list[NodeId] = []
        for peer in tuple(self._swarm.connections):
            node = NodeId(str(peer))
            with suppress(PeerStoreError):
                serves = HOP_PROTOCOL in self._swarm.peerstore.get_protocols(peer)
                if serves and node not in self._refused and self._connections.kind_of(node) is ConnectionKind.DIRECT:
                    found.append(node)
        return found

    async def _reserve(self, relay: NodeId) -> None:
        muxer = self._connections.of(relay)
        if muxer is None:
            return
        try:
            stream = await muxer.open_stream()
        except MuxedConnUnavailable:  # the relay hung up; the next search for relays notices
            return
        try:
            with anyio.fail_after(MESSAGE_SECONDS):
                answer = await self._ask(stream, HopMessage(type=HopMessage.RESERVE))
        except (BaseLibp2pError, TimeoutError) as error:
            self._note_refusal(relay, error)
            return
        finally:
            stream.abandon()
        self._denials.pop(relay, None)
        self._places[relay] = anyio.current_time()
        texts = [_text_of(data) for data in answer.reservation.addrs[:8]]
        self._contacts.learn_texts(relay, texts, host=self._connections.direct_ip(relay))

    def _note_refusal(self, relay: NodeId, error: Exception) -> None:
        is_denial = isinstance(error, RelayDeniedError)
        self._denials[relay] += is_denial
        is_news = is_denial and self._denials[relay] == 2  # this node may have just connected
        _LOG.log(logging.INFO if is_news else logging.DEBUG, "Relay %s refuses a reservation: %s", relay, error)
        self._places.pop(relay, None)
        self._refused[relay] = anyio.current_time() + (DENIED_SECONDS if is_denial else REFUSED_SECONDS)


def _raw(circuit: RelayedBytes, *, initiator: bool, address: str) -> RawConnection:
    return RawConnection(circuit, initiator, ConnectionType.RELAYED, [Multiaddr(address)])


def _text_of(data: bytes) -> str:
    try:
        return str(Multiaddr(data))
    except ValueError:
        return ""  # not an address; it is left out


RESERVATION_SECONDS = 3600.0
PORTION_BYTES = 64 * 1024


@dataclass(frozen=True)
class RelayLimits:
    """Limits of a relay. Two nodes exchange a round's tensors at the speed of the lines, but not without end."""

    reservations: int = 256
    reservations_of_address: int = 32  # of one IP address (IPv6: /64), this computer's own excepted
    circuits: int = 512
    circuits_of_node: int = 48  # fewer than the streams that a peer may open; a pair has two while it sends bodies
    circuits_of_address: int = 128  # requested from one IP address (IPv6: /64), this computer's own excepted
    bytes_per_second: float = 256 * 1024  # from one household to another, in the long run
    burst_seconds: float = 2048  # worth of it may leave at once: 512 MiB


class RelayServer:
    """The relay of one node."""

    def __init__(
        self,
        connections: Connections,
        own_addresses: Callable[[], tuple[str, ...]],
        now: Callable[[], float],
        limits: RelayLimits | None = None,
        *,
        gate: MembershipGate | None = None,
    ) -> None:
        """Only the peers that `gate` accepts are served; None: any peer."""
        self._connections = connections
        self._own_addresses = own_addresses
        self._now = now
        self._limits = limits or RelayLimits()
        self._gate = gate or MembershipGate()
        self._reservations: dict[NodeId, float] = {}  # end of each reservation
        self._circuits: Counter[NodeId] = Counter()  # counted at both ends
        self._circuits_of_address: Counter[str] = Counter()  # counted at the requesting end
        self._pacers: dict[tuple[str, str], UploadPacer] = {}  # from one household to another

    async def handle_stream(self, net_stream: INetStream) -> None:
        """Answer one request of a client: a reservation, or a connection to another node."""
        client, stream = NodeId(str(net_stream.muxed_conn.peer_id)), stream_of(net_stream)
        try:
            with anyio.fail_after(MESSAGE_SECONDS):
                question = await read_message(stream, HopMessage())
            if self._connections.kind_of(client) is ConnectionKind.RELAYED:
                await _send_status(stream, Status.PERMISSION_DENIED)  # no chains of relays
            elif reason := self._gate.refusal(client):
                _LOG.debug("The relay does not serve node %s: %s", client, reason)
                self.part(client)
                await _send_status(stream, Status.PERMISSION_DENIED)
            elif question.type == HopMessage.RESERVE:
                await stream.write(encode_message(self._reserved(client)), is_last=True)
                await _wait_ended(stream)
            elif question.type == HopMessage.CONNECT:
                await self._connect(client, node_of(question.peer.id), stream)
            else:
                await _send_status(stream, Status.UNEXPECTED_MESSAGE)
        finally:
            stream.abandon()

    def clients(self) -> set[NodeId]:
        """Nodes with a reservation here."""
        return {node for node in self._reservations if self._has_place(node)}

    def part(self, node: NodeId) -> None:
        """Remove the reservation of a node that left."""
        self._reservations.pop(node, None)

    def _has_place(self, node: NodeId) -> bool:
        """Whether a node has a reservation. It ends with the node's membership."""
        return self._reservations.get(node, 0.0) > self._now() and not self._gate.refusal(node)

    def _reserved(self, client: NodeId) -> HopMessage:
        now = self._now()
        self._reservations = {node: until for node, until in self._reservations.items() if self._has_place(node)}
        household = self._household(client)
        held = [node for node in self._reservations if node != client]
        of_address = sum(self._household(node) == household for node in held)
        is_crowded = of_address >= self._limits.reservations_of_address and not self._is_here(client)
        if is_crowded or len(held) >= self._limits.reservations:
            return HopMessage(type=HopMessage.STATUS, status=Status.RESERVATION_REFUSED)
        self._reservations[client] = now + RESERVATION_SECONDS
        addresses = [Multiaddr(text).to_bytes() for text in self._own_addresses() if "p2p-circuit" not in text]
        reservation = Reservation(expire=int(now + RESERVATION_SECONDS), addrs=addresses)
        return HopMessage(type=HopMessage.STATUS, status=Status.OK, reservation=reservation)

    async def _connect(self, client: NodeId, target: NodeId, stream: YamuxStream) -> None:
        if not self._has_place(target):
            await _send_status(stream, Status.NO_RESERVATION)
            return
        most = self._limits.circuits_of_node
        is_full = self._circuits[client] >= most or self._circuits[target] >= most
        household = self._household(client)
        is_crowded = self._circuits_of_address[household] >= self._limits.circuits_of_address
        is_crowded = is_crowded and not self._is_here(client)
        if is_full or is_crowded or self._circuits.total() >= 2 * self._limits.circuits:
            await _send_status(stream, Status.RESOURCE_LIMIT_EXCEEDED)
            return
        self._circuits.update((client, target))
        self._circuits_of_address[household] += 1
        try:
            await self._join(client, target, stream)
        finally:
            self._circuits.subtract((client, target))
            self._circuits_of_address[household] -= 1
            self._circuits += Counter()  # drops zero entries
            self._circuits_of_address += Counter()

    async def _join(self, client: NodeId, target: NodeId, stream: YamuxStream) -> None:
        try:
            with anyio.fail_after(MESSAGE_SECONDS):
                other = await self._opened(client, target)
        except (BaseLibp2pError, TimeoutError):
            await _send_status(stream, Status.CONNECTION_FAILED)
            return
        try:
            await stream.write(encode_message(HopMessage(type=HopMessage.STATUS, status=Status.OK)))
            here, there = self._household(client), self._household(target)
            self._forget_rested()
            ends = (client, target)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._carry, stream, other, (here, there), ends)
                tasks.start_soon(self._carry, other, stream, (there, here), ends)
        finally:
            other.abandon()

    async def _opened(self, client: NodeId, target: NodeId) -> YamuxStream:
        """Open a stream to the target, with the name of the source. Raises BaseLibp2pError."""
        muxer = self._connections.of(target)
        if muxer is None:
            raise RelayError("the target is gone")
        stream = await muxer.open_stream()
        try:
            await _announce(client, stream)
        except BaseException:
            stream.abandon()
            raise
        return stream

    def _is_here(self, node: NodeId) -> bool:
        return is_loopback(self._connections.direct_ip(node) or "")

    def _household(self, node: NodeId) -> str:
        return network_of(self._connections.direct_ip(node) or "", 32)

    async def _carry(
        self, source: YamuxStream, target: YamuxStream, way: tuple[str, str], ends: tuple[NodeId, NodeId]
    ) -> None:
        """Copy until the source ends or one of the nodes `ends` is not served any more; then the circuit closes."""
        try:
            while True:
                data = await source.read(PORTION_BYTES)
                if any(map(self._gate.refusal, ends)):
                    raise RelayError("the membership of one end has ended")
                await self._pacer(way).spend(len(data))
                await target.write(data)
        except BaseLibp2pError:
            source.abandon()
            target.abandon()

    def _forget_rested(self) -> None:
        self._pacers = {way: pacer for way, pacer in self._pacers.items() if not pacer.is_rested}

    def _pacer(self, way: tuple[str, str]) -> UploadPacer:
        """One for all circuits between two households: names and circuits cost nothing."""
        if way not in self._pacers:
            self._pacers[way] = UploadPacer(self._limits.bytes_per_second, self._limits.burst_seconds)
        return self._pacers[way]


async def _announce(client: NodeId, stream: YamuxStream) -> None:
    announcement = StopMessage(type=StopMessage.CONNECT, peer=PeerId(id=encoded_node_id(client)))
    await stream.write(proposal(STOP_PROTOCOL) + encode_message(announcement))
    await confirm(stream, STOP_PROTOCOL)
    answer = await read_message(stream, StopMessage())
    if answer.status != Status.OK:
        raise RelayError("the target refused it")


async def _send_status(stream: YamuxStream, status: Status.ValueType) -> None:
    await stream.write(encode_message(HopMessage(type=HopMessage.STATUS, status=status)), is_last=True)
    await _wait_ended(stream)


async def _wait_ended(stream: YamuxStream) -> None:
    """Let the client read the answer before the stream breaks."""
    with anyio.move_on_after(MESSAGE_SECONDS):
        await stream.wait_ended()
