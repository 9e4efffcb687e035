"""Opens the network that the settings require, finds the local network and the router, and meters traffic."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from neuroshard.config.settings import Settings
from neuroshard.config.state_file import StateFile
from neuroshard.errors import NetworkRefusedError, StorageError
from neuroshard.identity import NodeIdentity
from neuroshard.membership.announcements import Announcement
from neuroshard.membership.connectivity import Networking, NetworkOpener
from neuroshard.model.memory_limit import available_mb, network_memory, probe_memory
from neuroshard.network import Connection, Network, Reputation
from neuroshard.network.libp2p import NetworkOptions, NetworkParts, libp2p_network
from neuroshard.network.libp2p.peer_limits import ReceiveLimits
from neuroshard.network.limits import UploadPacer, frame_budget
from neuroshard.network.mdns import MdnsDiscovery, RunNotice, direct_endpoints
from neuroshard.network.nat.external_addresses import ExternalAddresses
from neuroshard.network.nat.port_mapping import PortMapping
from neuroshard.types import NodeId

_LOG = logging.getLogger(__name__)

PEERS_FILE, PORT_FILE = "network/peers.json", "network/port.json"


def memory_limit_mb(settings: Settings) -> int:
    """Return the memory that this node may use in total, in MB of 10**6 bytes."""
    return available_mb(probe_memory(), settings.memory)


def libp2p_opener(
    settings: Settings,
    identity: NodeIdentity,
    outside: ExternalAddresses | None = None,
    *,
    upload: UploadPacer | None = None,
    uses_relays: bool = True,
    serves_others: bool = False,
) -> NetworkOpener:
    """Return an opener of libp2p networks with the owner's limits.

    All networks share `upload`, whose limit may change meanwhile; None: the limit of the settings. Without
    `uses_relays` the node is not a client of relays, whatever the settings allow. With `serves_others` it is a relay
    for nodes that cannot be dialled. The networks write their listening ports to `outside` and read from it how these
    are reached from outside.
    """
    options = NetworkOptions(
        host=settings.p2p_host,
        port=settings.p2p_port,
        lan_discovery=settings.lan_discovery,
        port_mapping=settings.port_mapping,
        relay=uses_relays and settings.relay,
        serve_relay=serves_others,
    )
    reputation = Reputation()  # shared by all networks: a restart of the network does not clear the scores of peers
    pacer = upload or UploadPacer(settings.upload_bytes_per_second)
    limit_mb = memory_limit_mb(settings)
    kept_port = KeptPort(settings.data_dir)

    def at(port: int) -> AbstractAsyncContextManager[Network]:
        return libp2p_network(
            identity, replace(options, port=port), parts=network_parts(limit_mb, reputation, outside, pacer)
        )

    @asynccontextmanager
    async def opened() -> AsyncGenerator[Network]:
        async with AsyncExitStack() as opening:
            wanted = settings.p2p_port or kept_port.read()
            try:
                network = await opening.enter_async_context(at(wanted))
            except NetworkRefusedError:
                if wanted == settings.p2p_port:
                    raise
                network = await opening.enter_async_context(at(0))  # another program has the port now
            if settings.p2p_port == 0:
                kept_port.note(network.transport.addresses())  # no router has given it another address yet
            yield network

    return opened


def searches_lan(settings: Settings) -> bool:
    """Whether the owner lets this node look at the local network."""
    return settings.network and settings.lan_discovery and not ip_address(settings.p2p_host).is_loopback


class _Port(Struct, frozen=True):
    """The port at which this node listened last."""

    port: Annotated[int, Meta(ge=0, le=65_535)]


class KeptPort:
    """The port that a node without a chosen one takes again at its next start.

    Otherwise the addresses that its friends remember, and those in its invitations, would end with every start.
    """

    def __init__(self, data_dir: Path) -> None:
        self._file = StateFile(
            data_dir / PORT_FILE, _Port, "ignore", "the node takes another port", max_bytes=1_000, data_dir=data_dir
        )

    def read(self) -> int:
        """The port; 0 if none is stored that can be read."""
        try:
            stored = self._file.read()
        except StorageError as error:
            _LOG.warning("The port of the last start is not used: %s", error)
            return 0
        return 0 if stored is None else stored.port

    def note(self, addresses: Sequence[str]) -> None:
        """Store the port of the first of these own addresses. A disk error is only logged."""
        port = next((port for _, port in direct_endpoints(addresses)), 0)
        if port in (0, self.read()):
            return
        try:
            self._file.write(_Port(port))
        except StorageError as error:
            _LOG.warning("The port of the network cannot be stored: %s", error)


def network_parts(
    limit_mb: int,
    reputation: Reputation,
    outside: ExternalAddresses | None = None,
    pacer: UploadPacer | None = None,
) -> NetworkParts:
    """Return the parts that the node gives to one network, within a total of `limit_mb` of memory."""
    memory = network_memory(limit_mb)
    return NetworkParts(
        reputation=reputation,
        budget=frame_budget(memory.frames),
        heads=frame_budget(memory.heads),
        receive=ReceiveLimits.within(memory.unread),
        pacer=pacer,
        outside=outside,
        record_form=Announcement,
        directory_bytes=memory.directory,
        gossip_bytes=memory.gossip,
    )


WINDOW_SECONDS = 10.0  # the rates are means over this time


@dataclass(frozen=True)
class Traffic:
    """Totals in bytes, rates in bytes per second."""

    sent: int = 0
    received: int = 0
    sent_a_second: float = 0.0
    received_a_second: float = 0.0


class TrafficMeter:
    """Adds up the bytes of all connections, including those that have ended."""

    def __init__(self) -> None:
        self._open: dict[tuple[NodeId, float], tuple[int, int]] = {}
        self._ended = (0, 0)
        self._points: deque[tuple[float, int, int]] = deque()  # time, sent, received

    def look(self, connections: Iterable[Connection], now: float) -> Traffic:
        """Return the traffic up to now; call it about once per second."""
        present = {(c.peer, c.since): (c.bytes_sent, c.bytes_received) for c in connections}
        for key, (sent, received) in self._open.items():
            if key not in present:
                self._ended = self._ended[0] + sent, self._ended[1] + received
        self._open = present
        sent = self._ended[0] + sum(counts[0] for counts in present.values())
        received = self._ended[1] + sum(counts[1] for counts in present.values())
        self._points.append((now, sent, received))
        while self._points[0][0] < now - WINDOW_SECONDS:
            self._points.popleft()
        first = self._points[0]
        seconds = max(now - first[0], 1e-9)
        if len(self._points) == 1:
            return Traffic(sent, received)
        return Traffic(sent, received, (sent - first[1]) / seconds, (received - first[2]) / seconds)


def use_surroundings(
    settings: Settings,
    node_id: NodeId,
    networking: Networking,
    outside: ExternalAddresses,
    notice: Callable[[], RunNotice | None] | None = None,
) -> PortMapping | None:
    """Attach local discovery and port mapping as the owner set them; on a loopback host, nothing.

    `notice` returns the run into which this node lets computers of the local network. Returns the port mapping, or
    None if it is off.
    """
    if ip_address(settings.p2p_host).is_loopback:
        return None
    if settings.lan_discovery:
        networking.attach(MdnsDiscovery(node_id, partial(networking.book.add, is_near=True), notice=notice).live)
    if not settings.port_mapping:
        return None
    mapping = PortMapping(outside)
    networking.attach(mapping.live)
    return mapping
