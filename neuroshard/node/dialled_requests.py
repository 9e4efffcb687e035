"""Requests to nodes of the run on the present network, dialled first when they must be."""

from __future__ import annotations

from dataclasses import dataclass

import anyio

from neuroshard.errors import NeuroShardError
from neuroshard.membership.swarm_view import Membership
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import Network, PeerUnreachableError
from neuroshard.node.networking import Networking
from neuroshard.types import NodeId

DIAL_SECONDS = 10.0


@dataclass(frozen=True)
class DialledRequests:
    """Where members announced that they can be reached is where they are dialled."""

    networking: Networking
    membership: Membership

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """See Transport.request."""
        network = self.networking.current
        if network is None:
            raise PeerUnreachableError("The network is down at present.", "It is tried again by itself.")
        if peer not in network.transport.peers():
            await self._dial(network, peer)
        return await network.transport.request(peer, frame, reply=reply, timeout_seconds=timeout_seconds)

    async def _dial(self, network: Network, peer: NodeId) -> None:
        announced = self.membership.announcements.get(peer)
        for address in () if announced is None else announced.addresses:
            with anyio.move_on_after(DIAL_SECONDS):
                try:
                    await network.transport.connect(address)
                except NeuroShardError:
                    continue
                return
        raise PeerUnreachableError(f"Node {peer} cannot be reached at any address that is known.")
