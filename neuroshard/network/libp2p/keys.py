"""The node's key as libp2p sees it: it signs, and the secret never leaves `identity`."""

from __future__ import annotations

from libp2p.crypto.ed25519 import Ed25519PublicKey
from libp2p.crypto.keys import KeyPair, KeyType, PrivateKey, PublicKey

from neuroshard.identity import NodeKey


class NodePrivateKey(PrivateKey):
    """Signs with a NodeKey. It cannot be exported: `to_bytes` raises TypeError."""

    def __init__(self, key: NodeKey) -> None:
        self._key = key

    def to_bytes(self) -> bytes:
        """Refused."""
        raise TypeError("the private key of a node is not given away")

    def get_type(self) -> KeyType:
        """Ed25519."""
        return KeyType.Ed25519

    def sign(self, data: bytes) -> bytes:
        """Ed25519 signature of the data, 64 bytes."""
        return self._key.sign(data)

    def get_public_key(self) -> PublicKey:
        """The public half."""
        return Ed25519PublicKey.from_bytes(self._key.public_key)


def key_pair_of(key: NodeKey) -> KeyPair:
    """What libp2p needs to speak for this node."""
    private = NodePrivateKey(key)
    return KeyPair(private, private.get_public_key())
