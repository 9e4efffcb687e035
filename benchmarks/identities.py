"""Identities of nodes that live for one benchmark."""

from __future__ import annotations

from neuroshard.identity import Delegation, NodeIdentity, NodeKey, TokenSecret, Wallet

_EXPIRES_AT = 4e9


def identity_of(number: int) -> NodeIdentity:
    """The same identity for the same number, 1 to 255."""
    wallet = Wallet.from_secret(TokenSecret("hex", bytes([number]) * 32))
    key = NodeKey.from_seed(bytes([number]) * 32)
    delegation = Delegation.issue(wallet, key.public_key, _EXPIRES_AT)
    return NodeIdentity(wallet.wallet_id, key.node_id, key, delegation)
