"""The node key, created on first start in one private file and never overwritten, and node ids.

A node id is the libp2p peer id of an Ed25519 key (libp2p specification "Peer Ids and Keys").
"""

from __future__ import annotations

import logging
import os
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import base58
import msgspec
from msgspec import Struct

from neuroshard.config.state_file import write_atomically
from neuroshard.decoders import read_json
from neuroshard.errors import StorageError
from neuroshard.identity.signing import PUBLIC_KEY_BYTES, SigningKey
from neuroshard.types import MAX_NODE_ID_CHARACTERS, HexKey, NodeId

# identity multihash (code 0, length 36) of the protobuf message {Type = Ed25519 (1), Data = 32 bytes}
_PREFIX = bytes((0x00, 0x24, 0x08, 0x01, 0x12, 0x20))
MOST_REMEMBERED = 2048  # ids in each direction


@lru_cache(MOST_REMEMBERED)  # base58 is arithmetic on a long number, and the same nodes appear all the time
def node_id_of(public_key: bytes) -> NodeId:
    """Return the peer id ("12D3KooW...") of a raw Ed25519 public key. Raises ValueError unless it has 32 bytes."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"an Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}")
    return NodeId(base58.b58encode(_PREFIX + public_key).decode())


@lru_cache(MOST_REMEMBERED)
def public_key_of(node_id: str) -> bytes:
    """Return the raw Ed25519 public key in a node id. Raises ValueError if it is not the peer id of such a key."""
    if len(node_id) > MAX_NODE_ID_CHARACTERS or not node_id.isascii():  # decoding takes time quadratic in the length
        raise ValueError(f"{node_id[:MAX_NODE_ID_CHARACTERS]!r} is not a node id")
    try:
        raw = base58.b58decode(node_id)
    except ValueError:
        raise ValueError(f"{node_id!r} is not a node id: it is not base58") from None
    if len(raw) != len(_PREFIX) + PUBLIC_KEY_BYTES or not raw.startswith(_PREFIX):
        raise ValueError(f"{node_id!r} is not the peer id of an Ed25519 key")
    public_key = raw[len(_PREFIX) :]
    if node_id_of(public_key) != node_id:  # base58 decoding ignores white space, but a node has one name
        raise ValueError(f"{node_id!r} is not written as a peer id is")
    return public_key


MAX_KEY_FILE_BYTES = 4096
_LOG = logging.getLogger(__name__)


class KeyFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a key file."""

    format: Literal[1]
    node_id: str
    private_key: HexKey  # the seed

    def __repr__(self) -> str:
        return f"KeyFile({self.node_id})"


@dataclass(frozen=True)
class NodeKey(SigningKey):
    """The key that signs the claims of this node; the peer id of its public key is the node id."""

    @classmethod
    def load_or_create(cls, path: Path) -> NodeKey:
        """Return the key in `path`. If there is no such file, create a key and store it there with mode 0600.

        A file that others may read is made private, with a warning in the log. Raises StorageError if the file is
        damaged or cannot be read or written; its content stays as it is.
        """
        try:
            if not path.exists():
                key = cls.generate()
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_atomically(path, key._file_content(), mode=0o600)
                return key
            _make_private(path)
            with path.open("rb") as file:
                data = file.read(MAX_KEY_FILE_BYTES + 1)
        except OSError as error:
            raise StorageError(
                f"The node key {path} cannot be read or written: {error.strerror or error}.",
                "Make the file and its folder readable and writable for this user only.",
            ) from error
        return _parse(path, data)

    @property
    def node_id(self) -> NodeId:
        """libp2p peer id of the public key."""
        return node_id_of(self.public_key)

    def _file_content(self) -> bytes:
        held = KeyFile(1, self.node_id, self.seed.hex())
        return msgspec.json.format(msgspec.json.encode(held), indent=1) + b"\n"


def _make_private(path: Path) -> None:
    if os.name == "nt":  # access lists, not modes, protect the user's folder there
        return
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        path.chmod(0o600)
        _LOG.warning("Other users could read the node key. Now only its owner can.", extra={"path": str(path)})


def _parse(path: Path, data: bytes) -> NodeKey:
    try:
        return _read_key(data)
    except ValueError as error:
        raise StorageError(
            f"The node key {path} is damaged: {error}.",
            "Restore it from a backup, or move it away to make a new node identity.",
        ) from None


def _read_key(data: bytes) -> NodeKey:
    held = read_json(data, KeyFile, MAX_KEY_FILE_BYTES)
    key = NodeKey.from_seed(bytes.fromhex(held.private_key))
    if key.node_id != held.node_id:
        raise ValueError("the key is not that of its node id")
    return key
