"""What a node does on the local network it is in: be found there and find others, and ask the router for ports."""

from __future__ import annotations

from ipaddress import ip_address

from neuroshard.config.settings import Settings
from neuroshard.network.mdns import MdnsDiscovery
from neuroshard.network.nat.external_addresses import ExternalAddresses
from neuroshard.network.nat.port_mapping import PortMapping
from neuroshard.node.networking import Networking
from neuroshard.types import NodeId


def use_surroundings(
    settings: Settings, node_id: NodeId, networking: Networking, outside: ExternalAddresses
) -> PortMapping | None:
    """Attach what the owner wants; on a loopback host nothing. What asks the router, if anything does."""
    if ip_address(settings.p2p_host).is_loopback:
        return None
    if settings.lan_discovery:
        networking.attach(MdnsDiscovery(node_id, networking.book.add).live)
    if not settings.port_mapping:
        return None
    mapping = PortMapping(outside)
    networking.attach(mapping.live)
    return mapping
