"""Identities of nodes, the same every time. The keys and signatures are real."""

from __future__ import annotations

from neuroshard.identity import Delegation, NodeIdentity, NodeKey, TokenSecret, Wallet

AFTER_EVERY_TEST = 4e9  # seconds since 1970: neither the true clock nor a virtual one gets there


def identity_of(number: int, expires_at: float = AFTER_EVERY_TEST) -> NodeIdentity:
    """Node `number` and its own wallet, which answers for it until then."""
    wallet = Wallet.from_secret(TokenSecret("hex", (number + 1).to_bytes(32, "big")))
    key = NodeKey.from_seed((number + 1).to_bytes(32, "little"))
    return NodeIdentity(wallet.wallet_id, key.node_id, key, Delegation.issue(wallet, key.public_key, expires_at))
