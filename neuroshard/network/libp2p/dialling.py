"""Calling others: ordinary calls, and calls that meet the other side's own in the middle."""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address

import anyio
import trio
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from neuroshard.network.libp2p.addresses import PeerAddress
from neuroshard.network.libp2p.guard import contained
from neuroshard.network.libp2p.host import NodeSwarm
from neuroshard.network.libp2p.listening import share_port
from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.sockets import SocketBytes
from neuroshard.network.transport import PeerUnreachableError

PUNCH_SECONDS = 3.0  # for the two calls to meet


class Dialler:
    """Makes connections of one node. `source`: address and port that listen, to call from there as well."""

    def __init__(self, swarm: NodeSwarm, source: tuple[str, int] | None = None) -> None:
        self._swarm = swarm
        self._source = source

    async def dial(self, address: PeerAddress) -> BoundedMuxer:
        """A connection with whoever answers there, if it is that peer. Raises PeerUnreachableError or OSError."""
        stream = await self._shared_call(address)
        if stream is not None:
            # the peer may have called at the same moment, from its listening port too: then both are the client
            with suppress(PeerUnreachableError):
                muxer = await self._upgraded(stream, address)
                muxer.is_from_listening_port = True
                return muxer
        return await self._upgraded(await trio.open_tcp_stream(address.host, address.port), address)

    async def punch(self, address: PeerAddress, *, is_client: bool) -> BoundedMuxer | None:
        """A connection with a peer that calls here at the same moment; the two must have different roles."""
        with anyio.move_on_after(PUNCH_SECONDS):
            stream = await self._shared_call(address)
            if stream is not None:
                try:
                    return await self._upgraded(stream, address, is_client=is_client)
                except PeerUnreachableError:
                    return None
        return None

    async def _shared_call(self, address: PeerAddress) -> trio.SocketStream | None:
        """A call from the port that listens: a router gives it the same outside port as all others from there."""
        if self._source is None or not _is_same_family(self._source[0], address.host):
            return None
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = trio.socket.socket(family, socket.SOCK_STREAM)
        try:
            share_port(sock)
            await sock.bind(self._source)
            await sock.connect((address.host, address.port))
        except OSError:  # such as: the last connection with this address still lingers
            sock.close()
            return None
        except BaseException:
            sock.close()
            raise
        return trio.SocketStream(sock)

    async def _upgraded(
        self, stream: trio.SocketStream, address: PeerAddress, *, is_client: bool = True
    ) -> BoundedMuxer:
        raw = SocketBytes(stream)
        result: BoundedMuxer | Exception | None = None
        try:
            result = await contained(self._shake_hands(raw, address, is_client=is_client), "A handshake")
        finally:
            if not isinstance(result, BoundedMuxer):
                with anyio.CancelScope(shield=True):
                    await contained(raw.close(), "Closing")
        if not isinstance(result, BoundedMuxer):
            raise PeerUnreachableError(f"it does not answer as that node ({result})")
        return result

    async def _shake_hands(self, raw: SocketBytes, address: PeerAddress, *, is_client: bool) -> BoundedMuxer:
        peer = ID.from_base58(address.peer)
        if is_client:
            conn = await self._swarm.upgrade_outbound_raw_conn(RawConnection(raw, initiator=True), peer)
            muxer = conn.muxed_conn
        else:
            muxer = await self._swarm.upgrade_inbound_raw_conn(
                RawConnection(raw, initiator=False), Multiaddr(address.text)
            )
        if not isinstance(muxer, BoundedMuxer):
            raise TypeError("every connection has a BoundedMuxer")
        if muxer.peer_id != peer:
            await muxer.close()
            raise PeerUnreachableError("somebody else answers there")
        return muxer


def _is_same_family(first: str, second: str) -> bool:
    try:
        return ip_address(first).version == ip_address(second).version
    except ValueError:
        return False  # a name
