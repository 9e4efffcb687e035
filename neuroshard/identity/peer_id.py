"""Node ids: libp2p peer ids of Ed25519 keys, both ways (libp2p specification "Peer Ids and Keys")."""

from __future__ import annotations

from functools import lru_cache

import base58

from neuroshard.identity.signing import PUBLIC_KEY_BYTES
from neuroshard.types import NodeId

# identity multihash (code 0, length 36) of the protobuf message {Type = Ed25519 (1), Data = 32 bytes}
_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))
MOST_REMEMBERED = 2048  # of each way
_MAX_CHARACTERS = 64  # an Ed25519 peer id has 52; decoding is quadratic in the length


@lru_cache(MOST_REMEMBERED)  # base58 is arithmetic on a long number, and the same nodes speak all the time
def node_id_of(public_key: bytes) -> NodeId:
    """The peer id ("12D3KooW...") of a raw Ed25519 public key of 32 bytes. Raises ValueError for another length."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"an Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}")
    return NodeId(base58.b58encode(_PREFIX + public_key).decode())


@lru_cache(MOST_REMEMBERED)
def public_key_of(node_id: str) -> bytes:
    """The raw Ed25519 public key inside a node id. Raises ValueError when it is no peer id of such a key."""
    if len(node_id) > _MAX_CHARACTERS or not node_id.isascii():
        raise ValueError(f"{node_id[:_MAX_CHARACTERS]!r} is not a node id")
    try:
        raw = base58.b58decode(node_id)
    except ValueError:
        raise ValueError(f"{node_id!r} is not a node id: it is not base58") from None
    if len(raw) != len(_PREFIX) + PUBLIC_KEY_BYTES or not raw.startswith(_PREFIX):
        raise ValueError(f"{node_id!r} is not the peer id of an Ed25519 key")
    public_key = raw[len(_PREFIX) :]
    if node_id_of(public_key) != node_id:  # base58 readers forgive white space; a node has one name
        raise ValueError(f"{node_id!r} is not written as a peer id is")
    return public_key
