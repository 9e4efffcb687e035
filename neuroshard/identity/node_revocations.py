"""A wallet's statements that some of its nodes may not act for it any more. Pure.

A statement names the key of the node and has no date. No clock decides whether it counts, a copy of it says nothing
new, and no later delegation makes it void: a computer that is to take part again needs a new node key. A certificate
stays valid with the votes that such a node signed before, because a chain is read without these statements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Struct

from neuroshard.decoders import msgpack_decoder
from neuroshard.identity.claims import MalformedClaimError, PublicKey, Signed, sign_message
from neuroshard.identity.node_key import node_id_of
from neuroshard.identity.signing import Signer
from neuroshard.identity.wallet import wallet_id_of
from neuroshard.types import NodeId, WalletId

NODE_REVOCATION = "node revocation"  # kind of the signed message
MAX_NODE_REVOCATION_BYTES = 160
MOST_REVOKED = 32  # nodes of one wallet that others remember
MOST_SIGNED = 16  # fewer: two computers that sign at once stay below the limit of the others
MAX_NODE_REVOCATIONS = 4096  # of all wallets together
NodeRevocationBytes = Annotated[bytes, Meta(max_length=MAX_NODE_REVOCATION_BYTES)]

RevokedPairs: TypeAlias = Set[tuple[WalletId, NodeId]]
"""Wallets, each with a node that may not act for it any more."""


class NodeRevocation(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The statement of a wallet that a node never acts for it again."""

    node_public_key: PublicKey
    wallet_public_key: PublicKey


def sign_node_revocation(wallet: Signer, node_public_key: bytes) -> bytes:
    """Take the right to act for the wallet from a node, for ever and in every run."""
    statement = NodeRevocation(node_public_key, wallet.public_key)
    return msgspec.msgpack.encode(sign_message(wallet, NODE_REVOCATION, statement))


def revoked_sentence(node: NodeId, wallet: WalletId) -> str:
    """The reason why a revoked node is refused, and the action that helps if its owner has found it again."""
    return (
        f"Wallet {wallet[:8]} has revoked node {node}. If it is yours, stop it, move its file keys/node-key away, and "
        "start it again: it gets a new key."
    )


class RevokedNodes:
    """The revoked nodes of some wallets, each with the signed statement that others get."""

    def __init__(self) -> None:
        self._signed: dict[tuple[WalletId, NodeId], bytes] = {}  # in the order in which they were learned
        self.pairs: RevokedPairs = self._signed.keys()  # grows with every statement that is learned
        self._of_wallet: Counter[WalletId] = Counter()
        self._of_node: Counter[NodeId] = Counter()
        self.count = 0  # statements that were learned; it never falls

    def learn(self, data: bytes, counts: Callable[[WalletId], bool]) -> bool:
        """Record a statement of a wallet that `counts`; return whether it is new.

        Wallets cost nothing, so only those with a place in the run may take memory here, and each only a little. Raises
        MalformedClaimError or SignatureError.
        """
        signed, statement = _read(data)
        wallet, node = wallet_id_of(statement.wallet_public_key), node_id_of(statement.node_public_key)
        number = self._of_wallet[wallet]  # a missing one is 0, and takes no memory
        if self.has(node, wallet) or number >= MOST_REVOKED or not counts(wallet):
            return False  # before the signature, which costs most
        signed.verify(statement.wallet_public_key, NODE_REVOCATION)
        if len(self._signed) >= MAX_NODE_REVOCATIONS and not self._make_room(number + 1):
            return False
        self._signed[wallet, node] = data
        self._of_wallet[wallet] += 1
        self._of_node[node] += 1
        self.count += 1
        return True

    def _make_room(self, number: int) -> bool:
        """Drop the last statement of the wallet with the most, unless that has no more than `number`.

        So no number of wallets displaces the only statement of another one.
        """
        wallet, most = self._of_wallet.most_common(1)[0]
        if most <= number:
            return False
        last = next(key for key in reversed(self._signed) if key[0] == wallet)
        del self._signed[last]
        self._of_wallet -= Counter((wallet,))  # drops what falls to zero, too
        self._of_node -= Counter((last[1],))
        return True

    def has(self, node: NodeId, wallet: WalletId) -> bool:
        """Whether a wallet has revoked a node."""
        return (wallet, node) in self._signed

    def is_named(self, node: NodeId) -> bool:
        """Whether any wallet has revoked a node."""
        return self._of_node[node] > 0

    def nodes_of(self, wallet: WalletId) -> tuple[NodeId, ...]:
        """The revoked nodes of a wallet, in the order in which they were learned."""
        return tuple(node for owner, node in self._signed if owner == wallet)

    def statements(self) -> tuple[bytes, ...]:
        """All signed statements, the newest last."""
        return tuple(self._signed.values())


def _read(data: bytes) -> tuple[Signed[NodeRevocation], NodeRevocation]:
    if len(data) > MAX_NODE_REVOCATION_BYTES:
        raise MalformedClaimError(f"A revocation of a node has more than {MAX_NODE_REVOCATION_BYTES} bytes.")
    try:
        signed: Signed[NodeRevocation] = msgpack_decoder(Signed[NodeRevocation]).decode(data)
    except (ValueError, RecursionError):
        raise MalformedClaimError("A revocation of a node cannot be read.") from None
    return signed, signed.read(NodeRevocation)
