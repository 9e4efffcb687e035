"""Being reached, and reaching others, through relays: for a node behind a router that lets nobody in."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
from libp2p.abc import INetStream
from libp2p.connection_types import ConnectionType
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Status, StopMessage
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from multiaddr import Multiaddr

from neuroshard.network.libp2p.addresses import PeerAddress
from neuroshard.network.libp2p.connections import Connections
from neuroshard.network.libp2p.contacts import Contacts
from neuroshard.network.libp2p.guard import contained
from neuroshard.network.libp2p.host import NodeSwarm, stream_of
from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.negotiation import confirm, proposal
from neuroshard.network.libp2p.relay_messages import (
    HOP_PROTOCOL,
    MESSAGE_SECONDS,
    RelayedBytes,
    RelayError,
    bytes_of,
    encoded,
    node_of,
    received,
)
from neuroshard.network.libp2p.streams import YamuxStream
from neuroshard.network.transport import PeerUnreachableError
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId

WANTED_RELAYS = 2
LOOK_SECONDS = 2.0
REFRESH_SECONDS = 1200.0  # well before a reservation ends
REFUSED_SECONDS = 300.0  # until a relay that refused is asked again
ADDRESSES_OF_RELAY = 2
_LOG = logging.getLogger(__name__)


class RelayClient:
    """Keeps places at relays while this node cannot be reached otherwise, and dials through relays."""

    def __init__(
        self,
        swarm: NodeSwarm,
        connections: Connections,
        contacts: Contacts,
        when_relayed: Callable[[NodeId], Awaitable[None]] | None = None,
    ) -> None:
        self._swarm = swarm
        self._connections = connections
        self._contacts = contacts
        self._when_relayed = when_relayed
        self._places: dict[NodeId, float] = {}  # at relays, since when by the loop's clock
        self._refused: dict[NodeId, float] = {}

    def relays(self) -> set[NodeId]:
        """Where this node has a place."""
        return set(self._places)

    def addresses(self) -> tuple[str, ...]:
        """Multiaddrs through the relays at which this node has a place."""
        local = self._connections.local_id
        return tuple(
            f"{address.text}/p2p-circuit/p2p/{local}"
            for relay in self._places
            for address in self._contacts.vouched(relay)[:ADDRESSES_OF_RELAY]
            if not address.is_relayed
        )

    async def run(self) -> None:
        """Keep places at relays, until cancelled."""
        while True:
            await self._keep_places()
            await anyio.sleep(LOOK_SECONDS)

    async def dial(self, address: PeerAddress) -> None:
        """Connect through a relay. Raises PeerUnreachableError."""
        relay = address.of_relay()
        muxer = await self._connections.dial(relay.peer, (relay,))
        failure: Exception | None = TimeoutError("no answer in time")
        with anyio.move_on_after(MESSAGE_SECONDS):
            failure = await contained(self._dial_over(muxer, address), "A circuit")
        if failure is not None:
            raise PeerUnreachableError(f"the relay does not reach it ({failure})")

    async def handle_stream(self, net_stream: INetStream) -> None:
        """A relay brings somebody who wants this node."""
        stream = stream_of(net_stream)
        relay = NodeId(str(net_stream.muxed_conn.peer_id))
        try:
            with anyio.fail_after(MESSAGE_SECONDS):
                announced = await received(stream, StopMessage())
            if announced.type != StopMessage.CONNECT or relay not in self._places:
                await stream.write(encoded(StopMessage(type=StopMessage.STATUS, status=Status.PERMISSION_DENIED)))
                return
            await stream.write(encoded(StopMessage(type=StopMessage.STATUS, status=Status.OK)))
            address = f"/p2p/{relay}/p2p-circuit/p2p/{node_of(announced.peer.id)}"
            raw = _circuit(stream, initiator=False, address=address)
            muxer = await self._swarm.upgrade_inbound_raw_conn(raw, Multiaddr(address))
            if isinstance(muxer, BoundedMuxer):
                await self._live(muxer)
        finally:
            stream.abandon()

    async def _live(self, muxer: BoundedMuxer) -> None:
        """A circuit lives as long as the task of its stream."""
        async with anyio.create_task_group() as tasks:
            if self._when_relayed is not None:
                tasks.start_soon(contained, self._when_relayed(NodeId(str(muxer.peer_id))), "Punching")
            await muxer.wait_closed()
            tasks.cancel_scope.cancel()

    async def _dial_over(self, muxer: BoundedMuxer, address: PeerAddress) -> None:
        stream = await muxer.open_stream()
        is_connected = False
        try:
            question = HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=bytes_of(address.peer)))
            await self._ask(stream, question)
            raw = _circuit(stream, initiator=True, address=address.text)
            await self._swarm.upgrade_outbound_raw_conn(raw, ID.from_base58(address.peer))
            is_connected = True
        finally:
            if not is_connected:
                stream.abandon()

    async def _ask(self, stream: YamuxStream, question: HopMessage) -> HopMessage:
        """A relay's answer when it agrees. Raises BaseLibp2pError."""
        await stream.write(proposal(HOP_PROTOCOL) + encoded(question))
        await confirm(stream, HOP_PROTOCOL)
        answer = await received(stream, HopMessage())
        if answer.status != Status.OK:
            raise RelayError(f"the relay answers {answer.status}")
        return answer

    async def _keep_places(self) -> None:
        now = anyio.current_time()
        connected = {relay for relay in self._places if self._connections.of(relay) is not None}
        self._places = {relay: since for relay, since in self._places.items() if relay in connected}
        self._refused = {relay: until for relay, until in self._refused.items() if until > now}
        if self._connections.is_reached_from_outside:
            self._places = {}
            return
        for relay in self._relays():
            is_due = now - self._places[relay] > REFRESH_SECONDS if relay in self._places else True
            if is_due and (relay in self._places or len(self._places) < WANTED_RELAYS):
                await self._reserve(relay)

    def _relays(self) -> list[NodeId]:
        """Directly connected peers that relay for others."""
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
        except MuxedConnUnavailable:  # it hung up; whoever looks for relays next finds it gone
            return
        try:
            with anyio.fail_after(MESSAGE_SECONDS):
                answer = await self._ask(stream, HopMessage(type=HopMessage.RESERVE))
        except (BaseLibp2pError, TimeoutError) as error:
            _LOG.debug("The relay %s has no place: %s", relay, error)
            self._places.pop(relay, None)
            self._refused[relay] = anyio.current_time() + REFUSED_SECONDS
            return
        finally:
            stream.abandon()
        self._places[relay] = anyio.current_time()
        texts = [_text_of(data) for data in answer.reservation.addrs[:8]]
        self._contacts.learn_texts(relay, texts, host=self._connections.direct_ip(relay))


def _circuit(stream: YamuxStream, *, initiator: bool, address: str) -> RawConnection:
    return RawConnection(RelayedBytes(stream), initiator, ConnectionType.RELAYED, [Multiaddr(address)])


def _text_of(data: bytes) -> str:
    try:
        return str(Multiaddr(data))
    except ValueError:
        return ""  # no address; it is left out
