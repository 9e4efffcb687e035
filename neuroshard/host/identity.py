"""Wallet and node identity of a data folder, the nodes that the wallet has revoked, and the sealed backup file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from neuroshard.config.folders import NodePaths, prepare_data_dir
from neuroshard.config.loading import LoadedSettings, load_settings, read_token
from neuroshard.config.saving import TOKEN_FILE, save_settings
from neuroshard.config.state_file import StateFile, read_bounded, sync_folder, write_atomically
from neuroshard.errors import ConflictError, DataError, NeuroShardError, StorageError, UsageError
from neuroshard.identity import Delegation, NodeIdentity, NodeKey, Wallet, parse_token, public_key_of
from neuroshard.identity.backup import MAX_BACKUP_BYTES, Identity, seal, unseal
from neuroshard.identity.claims import DELEGATION_SECONDS
from neuroshard.identity.node_key import MAX_KEY_FILE_BYTES
from neuroshard.identity.node_revocations import (
    MOST_SIGNED,
    NodeRevocationBytes,
    RevokedNodes,
    sign_node_revocation,
)
from neuroshard.types import NodeId

IF_DAMAGED = "It names the nodes that you have revoked: restore it, or delete it and revoke them again."
MAX_SIGNED_HERE = 4 * MOST_SIGNED  # of all wallets with which this data folder was used


def wallet_of(loaded: LoadedSettings) -> tuple[Wallet, str, tuple[str, ...]]:
    """Return the wallet of the given token, the token's kind, and warnings about it.

    Raises TokenError if the token is missing or damaged.
    """
    secret = parse_token(read_token(loaded).get_secret_value())
    warnings = (*loaded.warnings, secret.warning) if secret.warning else loaded.warnings
    return Wallet.from_secret(secret), secret.kind, warnings


def node_identity(wallet: Wallet, data_dir: Path) -> NodeIdentity:
    """Return this node's identity: its own key, created on the first start, and a delegation that the wallet renews.

    Raises ConflictError if the wallet has revoked this key, and StorageError.
    """
    file = NodePaths.below(data_dir).node_key
    key = NodeKey.load_or_create(file)
    if StoredRevocations(data_dir).revoked().has(key.node_id, wallet.wallet_id):
        raise ConflictError(
            f"Your wallet has revoked this computer's node {key.node_id}.",
            f"Move {file} away: the next start creates a new key.",
        )
    delegation = Delegation.issue(wallet, key.public_key, expires_at=time.time() + DELEGATION_SECONDS)
    return NodeIdentity(wallet.wallet_id, key.node_id, key, delegation, wallet)


class SignedRevocations(Struct, frozen=True):
    """The statements about revoked nodes that were signed on this computer."""

    signed: Annotated[tuple[NodeRevocationBytes, ...], Meta(max_length=MAX_SIGNED_HERE)] = ()


class StoredRevocations:
    """The nodes that wallets have revoked on this computer. A running node reads the file again and passes it on."""

    def __init__(self, data_dir: Path) -> None:
        self._file = StateFile(
            NodePaths.below(data_dir).revoked_nodes,
            SignedRevocations,
            "fail",
            IF_DAMAGED,
            max_bytes=MAX_SIGNED_HERE * 512,
            data_dir=data_dir,
        )

    def read(self) -> tuple[bytes, ...]:
        """The signed statements. Raises StorageError."""
        return (self._file.read() or SignedRevocations()).signed

    def revoked(self) -> RevokedNodes:
        """The nodes that the statements revoke, of every wallet. Raises StorageError."""
        revoked = RevokedNodes()
        try:
            for data in self.read():
                revoked.learn(data, lambda _: True)
        except DataError as error:
            raise StorageError(f"{self._file.path} is damaged: {error.message}", IF_DAMAGED) from None
        return revoked

    def revoke(self, wallet: Wallet, node: NodeId) -> bool:
        """Sign and store that a node may not act for the wallet any more. Returns False if that is known already.

        Raises UsageError if the wallet has revoked too many, and StorageError.
        """
        with self._file.alone():
            signed, revoked = self.read(), self.revoked()
            if revoked.has(node, wallet.wallet_id):
                return False
            if len(revoked.nodes_of(wallet.wallet_id)) >= MOST_SIGNED or len(signed) >= MAX_SIGNED_HERE:
                raise UsageError(
                    f"The wallet has revoked {MOST_SIGNED} nodes, the most that it can.",
                    "Create a new wallet with `neuroshard wallet new`, and ask for an invitation for it.",
                )
            new = sign_node_revocation(wallet, public_key_of(node))
            self._file.write(SignedRevocations((*signed, new)))
        return True


def back_up(loaded: LoadedSettings, file: Path, passphrase: Callable[[], str]) -> Identity:
    """Write token and node key of these settings to a new private file. Raises StorageError, TokenError.

    The passphrase is requested last, so that no user types one in vain.
    """
    wallet, _, _ = wallet_of(loaded)
    if file.exists():
        raise _is_there(file)
    key = loaded.settings.paths.node_key
    node_key = None
    if key.exists():
        NodeKey.load_or_create(key)  # report a damaged key now, not when the backup is needed
        node_key = key.read_text(encoding="ascii")
    identity = Identity(read_token(loaded).get_secret_value(), wallet.wallet_id, node_key)
    _write_new(file, seal(identity, passphrase()))
    return identity


def restore_identity(file: Path, passphrase: Callable[[], str], data_dir: Path) -> Identity:
    """Write the identity of a backup into a data folder, so that the next start there needs no token.

    Raises ConflictError if the folder contains another wallet or node key; then nothing is overwritten. Raises
    StorageError and TokenError.
    """
    data = read_bounded(file, MAX_BACKUP_BYTES)
    if data is None:
        raise StorageError(f"{file} cannot be read: there is no such file.", "Check the path.")
    identity = unseal(data, passphrase())
    prepare_data_dir(data_dir)
    token_file, key = data_dir / TOKEN_FILE, NodePaths.below(data_dir).node_key
    _refuse_others(identity, data_dir)
    try:
        token_file.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomically(token_file, f"{identity.token}\n".encode())
        if identity.node_key is not None:
            write_atomically(key, identity.node_key.encode())
    except OSError as error:
        raise StorageError(f"{data_dir} cannot be written: {error.strerror or error}.", "Name another.") from error
    if identity.node_key is not None:
        NodeKey.load_or_create(key)
    save_settings(data_dir, {"token_file": TOKEN_FILE})
    return identity


def _refuse_others(identity: Identity, data_dir: Path) -> None:
    held = load_settings({"data_dir": data_dir}, {})  # config.toml alone, as the next start reads it
    places = [data_dir / TOKEN_FILE, *([held.settings.token_file] if held.settings.token_file else [])]
    for place in places:
        if place.exists() and _wallet_in(place) != identity.wallet_id:
            raise ConflictError(f"{place} belongs to another wallet.", "Name another folder with --data-dir FOLDER.")
    key = NodePaths.below(data_dir).node_key
    if identity.node_key is None or not key.exists():
        return
    if key.read_bytes()[:MAX_KEY_FILE_BYTES] != identity.node_key.encode():
        raise ConflictError(
            f"{key} is the key of another node.",
            "Restore into another folder with --data-dir FOLDER, or move that file away.",
        )


def _wallet_in(token_file: Path) -> str | None:
    """The wallet id of the token in a file, or None if the file has no usable token."""
    try:
        loaded = load_settings({"token_file": token_file}, {})
        return Wallet.from_secret(parse_token(read_token(loaded).get_secret_value())).wallet_id
    except NeuroShardError:
        return None


def _is_there(file: Path) -> StorageError:
    return StorageError(f"{file} already exists.", "Name a new file. Existing files are never overwritten.")


def _write_new(file: Path, data: bytes) -> None:
    """Create the file with mode 0600. O_EXCL makes the call fail if the file exists."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    except FileExistsError as error:
        raise _is_there(file) from error
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror or error}.", "Name another place.") from error
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        sync_folder(file.absolute().parent)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise StorageError(f"{file} cannot be written: {error.strerror or error}.", "Free space.") from error
