"""A network that has addresses and no connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from neuroshard.network import Network
from neuroshard.types import NodeId


@dataclass
class AddressesOnly:
    """A transport of a node that listens somewhere and does nothing."""

    local_id: NodeId
    told: tuple[str, ...]

    def addresses(self) -> tuple[str, ...]:
        return self.told

    def peers(self) -> frozenset[NodeId]:
        return frozenset()


def network_at(node_id: NodeId, *addresses: str) -> Network:
    """A network whose node is dialled at these multiaddrs."""
    nothing = cast("Any", None)
    return Network(cast("Any", AddressesOnly(node_id, addresses)), nothing, nothing)


def move(network: Network, *addresses: str) -> None:
    """From now on the node is dialled elsewhere."""
    cast("Any", network.transport).told = addresses
