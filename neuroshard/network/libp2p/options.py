"""Options of a node's network, and the parts that it shares with the rest of the node.

This file does not need libp2p.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from neuroshard.network.libp2p.gossip_router import GOSSIP_BYTES
from neuroshard.network.libp2p.peer_limits import ConnectionLimits, ReceiveLimits
from neuroshard.network.limits import ByteBudget, UploadPacer
from neuroshard.network.nat.external_addresses import ExternalAddresses
from neuroshard.network.reputation import Reputation
from neuroshard.network.transport import DirectoryRecord
from neuroshard.types import is_loopback

DIRECTORY_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class NetworkOptions:
    """How a node reaches peers. A loopback host disables LAN discovery, port mapping and relays."""

    host: str = "0.0.0.0"  # noqa: S104 - others are to reach this node
    port: int = 0  # 0: any free port
    body_connections: bool = True  # whether large bodies get connections of their own; otherwise they use streams
    lan_discovery: bool = True  # implemented in network/mdns.py, outside libp2p
    port_mapping: bool = True  # implemented in network/nat/port_mapping.py, outside libp2p
    relay: bool = True  # be reachable through relays, and try to replace relayed connections by direct ones
    serve_relay: bool = False
    upload_bytes_per_second: float | None = None
    congestion_control: str | None = "bbr"  # for each connection, where the system has it; None: the system's default
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)

    @property
    def is_local(self) -> bool:
        """Whether only this computer can reach the node."""
        return is_loopback(self.host)

    @property
    def has_neighbours(self) -> bool:
        """Whether peers run on this computer, so that its own addresses, claimed by others, may be dialled."""
        return self.is_local


@dataclass(frozen=True)
class NetworkParts:
    """Parts that a node's network shares with the rest of the node. A part that is None is created."""

    reputation: Reputation | None = None
    budget: ByteBudget | None = None  # for tensors
    heads: ByteBudget | None = None  # for frame headers
    receive: ReceiveLimits | None = None
    pacer: UploadPacer | None = None
    outside: ExternalAddresses | None = None  # gets the listening ports and returns the mapped ones
    record_form: type[DirectoryRecord] = DirectoryRecord  # of the records that are stored or found
    directory_bytes: int = DIRECTORY_BYTES  # half of them for records, half for addresses
    gossip_bytes: int = GOSSIP_BYTES
