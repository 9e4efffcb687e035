"""Node identities for tests, the same every time."""

from __future__ import annotations

import time

from neuroshard.identity import Delegation, NodeIdentity, NodeKey, Wallet, parse_token


def identity(number: int) -> NodeIdentity:
    """Node `number` of a wallet made for tests."""
    key = NodeKey.from_seed(number.to_bytes(32, "big"))
    wallet = Wallet.from_secret(parse_token("11" * 32))
    return NodeIdentity(
        wallet.wallet_id, key.node_id, key, Delegation.issue(wallet, key.public_key, time.time() + 86_400)
    )
