"""A relay: it carries bytes between nodes and others that are connected with it, slowly, and cannot read them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import anyio
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Reservation, Status, StopMessage
from multiaddr import Multiaddr

from neuroshard.network.libp2p.admission import is_loopback
from neuroshard.network.libp2p.connections import Connections
from neuroshard.network.libp2p.host import stream_of
from neuroshard.network.libp2p.negotiation import confirm, proposal
from neuroshard.network.libp2p.relay_messages import (
    MESSAGE_SECONDS,
    STOP_PROTOCOL,
    RelayError,
    bytes_of,
    encoded,
    node_of,
    received,
)
from neuroshard.network.libp2p.streams import YamuxStream
from neuroshard.network.libp2p.yamux_frames import INITIAL_WINDOW
from neuroshard.network.pacing import UploadPacer
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId

RESERVATION_SECONDS = 3600.0
PORTION_BYTES = 16 * 1024


@dataclass(frozen=True)
class RelayLimits:
    """What a relay gives: a few nodes' control messages and small tensors."""

    reservations: int = 256
    circuits: int = 256
    circuits_of_node: int = 24  # fewer than the streams that a peer may open
    circuits_of_address: int = 64  # asked for from one IP address, this computer's own excepted
    bytes_per_second: float = 256 * 1024  # of one circuit in one direction


class RelayServer:
    """The relay of one node."""

    def __init__(
        self,
        connections: Connections,
        own_addresses: Callable[[], tuple[str, ...]],
        now: Callable[[], float],
        limits: RelayLimits | None = None,
    ) -> None:
        self._connections = connections
        self._own_addresses = own_addresses
        self._now = now
        self._limits = limits or RelayLimits()
        self._reservations: dict[NodeId, float] = {}  # until when
        self._circuits: Counter[NodeId] = Counter()  # of both ends
        self._circuits_of_address: Counter[str] = Counter()  # of those who asked for them

    async def handle_stream(self, net_stream: INetStream) -> None:
        """One question of a client: to be reachable through this relay, or to reach another."""
        client, stream = NodeId(str(net_stream.muxed_conn.peer_id)), stream_of(net_stream)
        try:
            with anyio.fail_after(MESSAGE_SECONDS):
                question = await received(stream, HopMessage())
            if self._connections.kind_of(client) is ConnectionKind.RELAYED:
                await _tell(stream, Status.PERMISSION_DENIED)  # no chains of relays
            elif question.type == HopMessage.RESERVE:
                await stream.write(encoded(self._reserved(client)), is_last=True)
                await _wait_ended(stream)
            elif question.type == HopMessage.CONNECT:
                await self._connect(client, node_of(question.peer.id), stream)
            else:
                await _tell(stream, Status.UNEXPECTED_MESSAGE)
        finally:
            stream.abandon()

    def clients(self) -> set[NodeId]:
        """Nodes that have a place here."""
        return set(self._reservations)

    def part(self, node: NodeId) -> None:
        """A node is gone, and with it its reservation."""
        self._reservations.pop(node, None)

    def _reserved(self, client: NodeId) -> HopMessage:
        now = self._now()
        self._reservations = {node: until for node, until in self._reservations.items() if until > now}
        if client not in self._reservations and len(self._reservations) >= self._limits.reservations:
            return HopMessage(type=HopMessage.STATUS, status=Status.RESERVATION_REFUSED)
        self._reservations[client] = now + RESERVATION_SECONDS
        addresses = [Multiaddr(text).to_bytes() for text in self._own_addresses() if "p2p-circuit" not in text]
        reservation = Reservation(expire=int(now + RESERVATION_SECONDS), addrs=addresses)
        return HopMessage(type=HopMessage.STATUS, status=Status.OK, reservation=reservation)

    async def _connect(self, client: NodeId, target: NodeId, stream: YamuxStream) -> None:
        if self._reservations.get(target, 0.0) <= self._now():
            await _tell(stream, Status.NO_RESERVATION)
            return
        most = self._limits.circuits_of_node
        is_full = self._circuits[client] >= most or self._circuits[target] >= most
        ip = self._connections.direct_ip(client) or ""
        is_crowded = self._circuits_of_address[ip] >= self._limits.circuits_of_address and not is_loopback(ip)
        if is_full or is_crowded or self._circuits.total() >= 2 * self._limits.circuits:
            await _tell(stream, Status.RESOURCE_LIMIT_EXCEEDED)
            return
        self._circuits.update((client, target))
        self._circuits_of_address[ip] += 1
        try:
            await self._join(client, target, stream)
        finally:
            self._circuits.subtract((client, target))
            self._circuits_of_address[ip] -= 1
            self._circuits += Counter()  # forgets zeros
            self._circuits_of_address += Counter()

    async def _join(self, client: NodeId, target: NodeId, stream: YamuxStream) -> None:
        try:
            with anyio.fail_after(MESSAGE_SECONDS):
                other = await self._opened(client, target)
        except (BaseLibp2pError, TimeoutError):
            await _tell(stream, Status.CONNECTION_FAILED)
            return
        try:
            await stream.write(encoded(HopMessage(type=HopMessage.STATUS, status=Status.OK)))
            stream.largest_window = other.largest_window = INITIAL_WINDOW  # enough for the speed of a circuit
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._carry, stream, other)
                tasks.start_soon(self._carry, other, stream)
        finally:
            other.abandon()

    async def _opened(self, client: NodeId, target: NodeId) -> YamuxStream:
        """A stream to the target, which knows who wants it. Raises BaseLibp2pError."""
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

    async def _carry(self, source: YamuxStream, target: YamuxStream) -> None:
        """Copy until the source ends; then both ends of the circuit are over."""
        pacer = UploadPacer(self._limits.bytes_per_second)
        try:
            while True:
                data = await source.read(PORTION_BYTES)
                await pacer.spend(len(data))
                await target.write(data)
        except BaseLibp2pError:
            source.abandon()
            target.abandon()


async def _announce(client: NodeId, stream: YamuxStream) -> None:
    announcement = StopMessage(type=StopMessage.CONNECT, peer=PeerId(id=bytes_of(client)))
    await stream.write(proposal(STOP_PROTOCOL) + encoded(announcement))
    await confirm(stream, STOP_PROTOCOL)
    answer = await received(stream, StopMessage())
    if answer.status != Status.OK:
        raise RelayError("the target does not want it")


async def _tell(stream: YamuxStream, status: Status.ValueType) -> None:
    await stream.write(encoded(HopMessage(type=HopMessage.STATUS, status=status)), is_last=True)
    await _wait_ended(stream)


async def _wait_ended(stream: YamuxStream) -> None:
    """Let the client read the answer before the stream breaks."""
    with anyio.move_on_after(MESSAGE_SECONDS):
        await stream.wait_ended()
