"""A node's network over libp2p: everything starts and ends with one block."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from functools import partial
from random import SystemRandom
from typing import Any

import anyio
from anyio.abc import TaskGroup
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.tools.anyio_service import background_trio_service

from neuroshard.identity import NodeIdentity
from neuroshard.messages import FrameLimits
from neuroshard.network.libp2p.address_book import PeerAddressBook
from neuroshard.network.libp2p.bodies import CONNECT_KIND, MOST_ANSWERED, BodyConnections, ConnectMessage
from neuroshard.network.libp2p.connections import Connections, Dialler
from neuroshard.network.libp2p.directory import KademliaDirectory
from neuroshard.network.libp2p.gossip import GOSSIP_PROTOCOL, Libp2pGossip
from neuroshard.network.libp2p.gossip_router import GossipRouter
from neuroshard.network.libp2p.hole_punching import PUNCH_PROTOCOL, HolePuncher, ObservedAddresses
from neuroshard.network.libp2p.host import NodeHost, NodeSwarm, PeerEvents, silence_libp2p
from neuroshard.network.libp2p.kademlia import RecordStore
from neuroshard.network.libp2p.muxer import MuxerOptions
from neuroshard.network.libp2p.options import NetworkOptions, NetworkParts
from neuroshard.network.libp2p.peer_limits import ReceiveMemory, StreamAdmission
from neuroshard.network.libp2p.places import ConnectionAdmission, DialBudget
from neuroshard.network.libp2p.relay import RelayClient, RelayServer
from neuroshard.network.libp2p.relay_messages import HOP_PROTOCOL, STOP_PROTOCOL
from neuroshard.network.libp2p.sockets import BoundListener
from neuroshard.network.libp2p.transport import FRAME_PROTOCOL, Libp2pTransport, RequestStreams
from neuroshard.network.libp2p.upgrading import NodeUpgrader, key_pair_of
from neuroshard.network.limits import ByteBudget, PeerStanding, UploadPacer, frame_budget
from neuroshard.network.membership_gate import MembershipGate
from neuroshard.network.nat.external_addresses import ExternalAddresses
from neuroshard.network.pool import bulk_pool
from neuroshard.network.reputation import Reputation, ScoreReason
from neuroshard.network.serving import RequestServer
from neuroshard.network.transport import Network, NetworkFailedError
from neuroshard.types import NodeId

CLOSING_SECONDS = 5.0


@asynccontextmanager
async def running_network(
    identity: NodeIdentity, options: NetworkOptions, now: Callable[[], float], parts: NetworkParts
) -> AsyncGenerator[Network]:
    """Run this node's network; `libp2p_network` documents it."""
    silence_libp2p()
    listening = await BoundListener.open(options.host, options.port, is_shared=options.relay and not options.is_local)
    failure: Exception | None = None
    try:
        async with anyio.create_task_group() as tasks:
            node = _Node(identity, options, now, parts, tasks=tasks, listening=listening)
            async with background_trio_service(node.swarm), node.pooled(), node.mappable():
                tasks.start_soon(listening.serve, node.connections.accept)
                for work in node.background():
                    tasks.start_soon(work)
                try:
                    yield Network(node.transport, node.gossip, node.directory, node.reputation, node.gate)
                except Exception as error:
                    failure = error
                    raise
                finally:
                    with anyio.CancelScope(shield=True), anyio.move_on_after(CLOSING_SECONDS):
                        await node.close()
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:
        if failure is not None:  # an error of the code that uses the network is raised unchanged
            raise failure from None
        raise NetworkFailedError("The network stopped because of a defect.", "Start it again.") from group
    finally:
        with anyio.CancelScope(shield=True):
            await listening.close()


class _Node:
    """The parts of one node's network, connected with each other."""

    def __init__(
        self,
        identity: NodeIdentity,
        options: NetworkOptions,
        now: Callable[[], float],
        parts: NetworkParts,
        *,
        tasks: TaskGroup,
        listening: BoundListener,
    ) -> None:
        self._identity = identity
        self._options = options
        self._tasks = tasks
        self._listening = listening
        self._outside = parts.outside or ExternalAddresses()
        self.reputation = parts.reputation or Reputation()
        self._pacer = parts.pacer or UploadPacer(options.upload_bytes_per_second)
        admission = ConnectionAdmission(options.limits)
        muxing = MuxerOptions(
            StreamAdmission(options.limits),
            self._pacer.spend,
            now,
            self._report_peer,
            ReceiveMemory(parts.receive),
        )
        keys = key_pair_of(identity.key)
        self._upgrader = NodeUpgrader(keys, admission, muxing, self._is_welcome)
        self.swarm = NodeSwarm(keys, self._upgrader)
        self.swarm.listeners["tcp"] = listening
        self.host = NodeHost(self.swarm, tasks)
        contacts = PeerAddressBook(identity.node_id, parts.directory_bytes // 2, has_neighbours=options.has_neighbours)
        self.connections = Connections(self.swarm, identity.node_id, admission, contacts, self._dialler())
        self.gate = MembershipGate()
        self._server = RequestServer(self.gate)
        self._budget = parts.budget or frame_budget()
        self.transport = Libp2pTransport(
            self.connections,
            self._server,
            self._request_streams(parts.heads),
            own_addresses=self._addresses,
            report=self.reputation.report,
        )
        router = GossipRouter(SystemRandom(), parts.gossip_bytes, self.gate)
        self.gossip = Libp2pGossip(self.connections, self.reputation.report, tasks, router, self.gate)
        self.directory = KademliaDirectory(
            self.transport,
            contacts,
            now=now,
            random=SystemRandom(),
            report=self.reputation.report,
            host_of=self.connections.direct_ip,
            form=parts.record_form,
            store=RecordStore(parts.directory_bytes // 2),
        )
        self._relay_client = self._joined_relays(contacts)
        self._relay_server = self._serving_relay(now)
        self.host.set_stream_handler(TProtocol(FRAME_PROTOCOL), self.transport.handle_stream)
        self.host.set_stream_handler(TProtocol(GOSSIP_PROTOCOL), self.gossip.handle_stream)
        self.swarm.register_notifee(PeerEvents(self._meet, self._part))

    def _dialler(self) -> Dialler:
        """Where relays are used, it dials from the listening port, so that other peers see the same external port."""
        uses_relays = self._options.relay and not self._options.is_local
        source = (self._options.host, self._listening.port) if uses_relays else None
        return Dialler(self.swarm, DialBudget(self._options.limits), source, self._options.congestion_control)

    def _request_streams(self, heads: ByteBudget | None) -> RequestStreams:
        streams = RequestStreams(self._server, self._budget, self.reputation.report, heads)
        streams.share_by(self._standing_of)
        return streams

    def _joined_relays(self, contacts: PeerAddressBook) -> RelayClient | None:
        if not self._options.relay or self._options.is_local:
            return None
        observed = ObservedAddresses(self.connections.forget_reached)
        self.host.observe_with(observed)
        puncher = HolePuncher(self.connections, observed, self._own_places, contacts.may_follow)
        self.host.set_stream_handler(TProtocol(PUNCH_PROTOCOL), puncher.handle_stream)
        client = RelayClient(self.swarm, self.connections, contacts, puncher.upgrade)
        self.host.set_stream_handler(TProtocol(STOP_PROTOCOL), client.handle_stream)
        self.connections.relay = client
        return client

    def _serving_relay(self, now: Callable[[], float]) -> RelayServer | None:
        if not self._options.serve_relay:
            return None
        server = RelayServer(self.connections, self._addresses, now, gate=self.gate)
        self.host.set_stream_handler(TProtocol(HOP_PROTOCOL), server.handle_stream)
        return server

    @asynccontextmanager
    async def pooled(self) -> AsyncGenerator[None]:
        """Give large bodies connections of their own within the block, unless the options disable it."""
        if not self._options.body_connections:
            yield
            return
        ask, algorithm = self.transport.ask_small, self._options.congestion_control
        bodies = BodyConnections(self.connections, self._upgrader, ask, self._tasks, algorithm)
        async with bulk_pool(
            self._identity.node_id,
            self._server,
            bodies.open_to,
            budget=self._budget,
            pacer=self._pacer,
            reputation=self.reputation,
            streams=self.connections,
        ) as pool:
            self._server.serve(
                CONNECT_KIND, bodies.answer_connect, FrameLimits(message=ConnectMessage), MOST_ANSWERED, for_anyone=True
            )
            self.connections.take_bodies = bodies.take
            with self.transport.large_over(bodies, pool):
                yield

    @asynccontextmanager
    async def mappable(self) -> AsyncGenerator[None]:
        """Register the port for port mapping within the block."""
        if self._options.is_local:
            yield
            return
        with self._outside.listening(self._listening.hosts, (self._listening.port,)):
            yield

    def background(self) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
        """Run the background tasks of the network."""
        yield self.gossip.run
        yield self.directory.run
        yield partial(self.connections.trim, self._needed_peers)
        yield self._part_with_banned
        if self._relay_client is not None:
            yield self._relay_client.run

    async def close(self) -> None:
        """Close the transport and all connections."""
        await self.gossip.flush()
        self.gossip.close()
        self.directory.close()
        await self.transport.close()
        await self.connections.close()

    async def _part_with_banned(self) -> None:
        """Close the connections of peers that are banned, until cancelled."""
        while True:
            count = self.reputation.banned.count
            for peer in filter(self.reputation.is_banned, self.connections.peers()):
                self._tasks.start_soon(self.connections.close_peer, peer)
            await self.reputation.banned.wait(count)

    def _report_peer(self, peer: ID, reason: ScoreReason) -> None:
        self.reputation.report(NodeId(str(peer)), reason)

    def _meet(self, peer: ID) -> None:
        if not self._is_welcome(peer):  # banned since its handshake
            self._tasks.start_soon(self.connections.close_peer, NodeId(str(peer)))
        self.gossip.meet(NodeId(str(peer)))
        self.directory.meet(NodeId(str(peer)))

    def _part(self, peer: ID) -> None:
        self.gossip.part(NodeId(str(peer)))
        if self._relay_server is not None:
            self._relay_server.part(NodeId(str(peer)))
        self.swarm.forget(peer)

    def _needed_peers(self) -> set[NodeId]:
        relays = self._relay_client.relays() if self._relay_client is not None else set[NodeId]()
        clients = self._relay_server.clients() if self._relay_server is not None else set[NodeId]()
        return self.gossip.router.linked_peers() | relays | clients | self.transport.busy_peers()

    def _is_welcome(self, peer: ID) -> bool:
        return not self.reputation.is_banned(NodeId(str(peer)))

    def _standing_of(self, peer: NodeId) -> PeerStanding:
        return PeerStanding(self.connections.direct_ip(peer) or "", self.gate.knows(peer))

    def _addresses(self) -> tuple[str, ...]:
        mapped = (f"{place}/p2p/{self._identity.node_id}" for place in self._places_outside())
        direct = (str(address) for address in self.host.get_addrs())
        relayed = self._relay_client.addresses() if self._relay_client else ()
        # other peers may have observed the mapped ones as well
        return tuple(dict.fromkeys((*mapped, *direct, *relayed)))

    def _own_places(self) -> list[str]:
        """As `_addresses`, but only direct ones and without this node's id."""
        return [*self._places_outside(), *(str(address) for address in self.host.get_transport_addrs())]

    def _places_outside(self) -> tuple[str, ...]:
        outside = self._outside.of(self._listening.port)
        return () if outside is None else (f"/ip4/{outside[0]}/tcp/{outside[1]}",)
