"""Options of a node's network, and the parts that it shares with the rest of the node. Nothing here needs libp2p."""

from __future__ import annotations

from dataclasses import dataclass, field

from neuroshard.network.libp2p.addresses import is_loopback_host
from neuroshard.network.libp2p.gossip_router import GOSSIP_BYTES
from neuroshard.network.libp2p.peer_limits import ConnectionLimits, ReceiveLimits
from neuroshard.network.limits import ByteBudget, UploadPacer
from neuroshard.network.nat.external_addresses import ExternalAddresses
from neuroshard.network.reputation import Reputation
from neuroshard.network.transport import RecordCheck, any_record

DIRECTORY_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True)
class NetworkOptions:
    """How a node meets others. A loopback host switches LAN discovery, port mapping and relays off by itself."""

    host: str = "0.0.0.0"  # noqa: S104 - others are to reach this node
    port: int = 0  # 0: any free one
    pool_port: int | None = 0  # of the direct connections for tensors; None: tensors go over libp2p as well
    lan_discovery: bool = True  # done by network/mdns.py, beside libp2p
    port_mapping: bool = True  # done by network/nat/port_mapping.py, beside libp2p
    relay: bool = True  # be reached through relays, and try to get a direct connection from there
    serve_relay: bool = False
    upload_bytes_per_second: float | None = None
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)

    @property
    def is_local(self) -> bool:
        """Whether only this computer can reach the node."""
        return is_loopback_host(self.host)

    @property
    def has_neighbours(self) -> bool:
        """Whether peers are on this computer, so that places on it which others tell of are worth a dial."""
        return self.is_local


@dataclass(frozen=True)
class NetworkParts:
    """What a node's network shares with the rest of the node; whatever is None is made anew."""

    reputation: Reputation | None = None
    budget: ByteBudget | None = None  # of tensors
    heads: ByteBudget | None = None  # of what stands before them in a frame
    receive: ReceiveLimits | None = None
    pacer: UploadPacer | None = None
    outside: ExternalAddresses | None = None  # where the network says what a router may pass on, and reads what it does
    accepts_record: RecordCheck = any_record  # of the directory, whoever stores or finds it
    directory_bytes: int = DIRECTORY_BYTES  # half of them for records, half for addresses
    gossip_bytes: int = GOSSIP_BYTES
