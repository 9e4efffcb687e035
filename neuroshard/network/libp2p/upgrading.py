"""The upgrade of a socket to an authenticated connection with streams, within limits: node keys, TLS or Noise, yamux.

The secret key never leaves the room `identity`.
"""

from __future__ import annotations

from collections.abc import Callable

import trio
from libp2p.abc import IMuxedConn, IRawConnection, ISecureConn
from libp2p.crypto.ed25519 import Ed25519PublicKey
from libp2p.crypto.keys import KeyPair, KeyType, PrivateKey, PublicKey
from libp2p.crypto.x25519 import create_new_key_pair as new_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.transport.exceptions import MuxerUpgradeFailure
from libp2p.transport.upgrader import TransportUpgrader

from neuroshard.identity import NodeKey
from neuroshard.network.libp2p.muxer import BoundedMuxer, MuxerOptions
from neuroshard.network.libp2p.negotiation import confirm, proposal
from neuroshard.network.libp2p.peer_limits import contain_errors
from neuroshard.network.libp2p.places import ConnectionAdmission, ConnectionPlace, NoPlaceError
from neuroshard.network.libp2p.tls import TLS_PROTOCOL, TlsConnection, TlsTransport

HANDSHAKE_SECONDS = 10
BODIES_PROTOCOL = TProtocol("/neuroshard/bodies/1")  # instead of a multiplexer


class NodeUpgrader(TransportUpgrader):
    """Prefers TLS to Noise and knows no other: libp2p's defaults also accept plain text under any claimed name."""

    def __init__(
        self,
        keys: KeyPair,
        admission: ConnectionAdmission,
        options: MuxerOptions,
        is_welcome: Callable[[ID], bool],
    ) -> None:
        noise = NoiseTransport(keys, noise_privkey=new_x25519_key_pair().private_key)
        tls = TlsTransport(keys, options.now)
        super().__init__({TLS_PROTOCOL: tls, NOISE: noise}, {TProtocol(YAMUX): BoundedMuxer}, HANDSHAKE_SECONDS)
        self._accepted = Multiselect({TProtocol(YAMUX): None, BODIES_PROTOCOL: None})
        self._admission = admission
        self._options = options
        self._is_welcome = is_welcome

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Upgrade a connection whose peer is authenticated.

        Raises MuxerUpgradeFailure if the limits do not allow it.
        """
        await self.muxer_multistream.select_transport(conn)
        return await self._placed(conn, peer_id)

    async def upgrade_accepted(self, raw: IRawConnection) -> IMuxedConn | TlsConnection:
        """Upgrade a connection that a peer opened. A TlsConnection is one for bodies.

        Raises SecurityUpgradeFailure, MuxerUpgradeFailure or MultiselectError.
        """
        conn = await self.upgrade_security(raw, is_initiator=False)
        protocol, _ = await self._accepted.negotiate(MultiselectCommunicator(conn), HANDSHAKE_SECONDS)
        if protocol != BODIES_PROTOCOL:
            return await self._placed(conn, conn.get_remote_peer())
        if not isinstance(conn, TlsConnection):
            raise MuxerUpgradeFailure("bodies need TLS")
        return conn

    async def upgrade_for_bodies(self, raw: IRawConnection, peer_id: ID) -> TlsConnection:
        """Upgrade a connection that this node opened. Raises SecurityUpgradeFailure or BaseLibp2pError."""
        conn = await self.upgrade_security(raw, is_initiator=True, peer_id=peer_id)
        if not isinstance(conn, TlsConnection):
            raise MuxerUpgradeFailure("bodies need TLS")
        await conn.write(proposal(BODIES_PROTOCOL))
        await confirm(conn, BODIES_PROTOCOL)
        return conn

    async def _placed(self, conn: ISecureConn, peer_id: ID) -> BoundedMuxer:
        """The streams of a connection that gets a place, maybe that of another one. Raises MuxerUpgradeFailure."""
        if not self._is_welcome(peer_id):
            raise MuxerUpgradeFailure(f"{peer_id} is banned")
        address = conn.get_remote_address()
        place = ConnectionPlace(address[0] if address else "", str(peer_id), conn.is_initiator, trio.current_time())
        try:
            replaced = self._admission.enter(place)
        except NoPlaceError as error:
            raise MuxerUpgradeFailure(f"{error} for {peer_id} at {place.ip}") from error
        muxer = BoundedMuxer(conn, peer_id, self._options, lambda: self._admission.leave(place))
        self._admission.opened(place, muxer)
        try:
            if replaced is not None and isinstance(replaced.streams, BoundedMuxer):
                await contain_errors(replaced.streams.close(), "Closing a replaced connection")
        except BaseException:
            self._admission.leave(place)
            raise
        return muxer


class NodePrivateKey(PrivateKey):
    """Signs with a NodeKey. It cannot be exported: `to_bytes` raises TypeError."""

    def __init__(self, key: NodeKey) -> None:
        self._key = key

    def to_bytes(self) -> bytes:
        raise TypeError("the private key of a node cannot be exported")

    def get_type(self) -> KeyType:
        return KeyType.Ed25519

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature of the data, 64 bytes."""
        return self._key.sign(data)

    def get_public_key(self) -> PublicKey:
        return Ed25519PublicKey.from_bytes(self._key.public_key)


def key_pair_of(key: NodeKey) -> KeyPair:
    """The key pair with which libp2p acts for this node."""
    private = NodePrivateKey(key)
    return KeyPair(private, private.get_public_key())
