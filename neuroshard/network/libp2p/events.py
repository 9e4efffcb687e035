"""Who came and who went, told by libp2p's swarm."""

from __future__ import annotations

from collections.abc import Callable

import trio
from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.peer.id import ID
from multiaddr import Multiaddr


class PeerEvents(INotifee):
    """Calls `meet` for every new connection of a peer and `part` when the last one ended."""

    def __init__(self, meet: Callable[[ID], None], part: Callable[[ID], None]) -> None:
        self._meet = meet
        self._part = part

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        """A connection began."""
        await trio.lowlevel.checkpoint()
        self._meet(conn.muxed_conn.peer_id)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        """A connection ended."""
        await trio.lowlevel.checkpoint()
        peer = conn.muxed_conn.peer_id
        if not network.get_connections(peer):
            self._part(peer)

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None:
        """Not told."""

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None:
        """Not told."""

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None:
        """Not told."""

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None:
        """Not told."""
