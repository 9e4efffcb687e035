"""A node's network as its settings want it, apart from the run it serves: a seed serves none, and loads no PyTorch."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from neuroshard.config.settings import Settings
from neuroshard.identity import NodeIdentity
from neuroshard.membership.claim_intake import is_announcement
from neuroshard.model.memory_limit import available_mb, network_memory, probe_memory
from neuroshard.network import Network, Reputation
from neuroshard.network.libp2p import NetworkOptions, NetworkParts, libp2p_network
from neuroshard.network.libp2p.peer_limits import ReceiveLimits
from neuroshard.network.limits import frame_budget
from neuroshard.network.nat.external_addresses import ExternalAddresses
from neuroshard.node.networking import NetworkOpener

PEERS_FILE = "network/peers.json"
BITS_PER_BYTE = 8


def upload_limit(settings: Settings) -> float | None:
    """Most bytes a second that go to other nodes; None: as many as the line takes."""
    return None if settings.max_upload is None else settings.max_upload * 1e6 / BITS_PER_BYTE


def memory_limit_mb(settings: Settings) -> int:
    """What this node may use in all."""
    return available_mb(probe_memory(), settings.memory)


def libp2p_opener(
    settings: Settings, identity: NodeIdentity, outside: ExternalAddresses | None = None, *, serves_others: bool = False
) -> NetworkOpener:
    """Opens libp2p networks with the owner's limits. `serves_others`: as a relay of nodes that cannot be dialled.

    `outside`: where the networks say at which ports they listen, and read how these are reached from outside.
    """
    options = NetworkOptions(
        host=settings.p2p_host,
        port=settings.p2p_port,
        lan_discovery=settings.lan_discovery,
        port_mapping=settings.port_mapping,
        relay=settings.relay and not serves_others,
        serve_relay=serves_others,
        upload_bytes_per_second=upload_limit(settings),
    )
    reputation = Reputation()  # what peers did is not forgiven by a restart of the network
    limit_mb = memory_limit_mb(settings)

    def opened() -> AbstractAsyncContextManager[Network]:
        return libp2p_network(identity, options, parts=network_parts(limit_mb, reputation, outside))

    return opened


def network_parts(limit_mb: int, reputation: Reputation, outside: ExternalAddresses | None = None) -> NetworkParts:
    """What one network gets from the rest of the node, which may use so much memory in all."""
    memory = network_memory(limit_mb)
    return NetworkParts(
        reputation=reputation,
        budget=frame_budget(memory.frames),
        heads=frame_budget(memory.heads),
        receive=ReceiveLimits.within(memory.unread),
        outside=outside,
        accepts_record=is_announcement,
        directory_bytes=memory.directory,
        gossip_bytes=memory.gossip,
    )
