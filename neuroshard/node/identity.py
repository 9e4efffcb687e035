"""From settings to wallet and node identity."""

from __future__ import annotations

import time
from pathlib import Path

from neuroshard.config.folders import NodePaths
from neuroshard.config.loading import LoadedSettings, read_token
from neuroshard.identity import Delegation, NodeIdentity, NodeKey, Wallet, parse_token

DELEGATION_SECONDS = 365 * 24 * 3600.0


def wallet_of(loaded: LoadedSettings) -> tuple[Wallet, str, tuple[str, ...]]:
    """Wallet of the given token, the token's kind, and warnings about it.

    Raises TokenError when there is none or it is damaged.
    """
    secret = parse_token(read_token(loaded).get_secret_value())
    warnings = (*loaded.warnings, secret.warning) if secret.warning else loaded.warnings
    return Wallet.from_secret(secret), secret.kind, warnings


def node_identity(wallet: Wallet, data_dir: Path) -> NodeIdentity:
    """Identity of this node: its own key, made on first start, delegated by the wallet."""
    key = NodeKey.load_or_create(NodePaths.below(data_dir).node_key)
    delegation = Delegation.issue(wallet, key.public_key, expires_at=time.time() + DELEGATION_SECONDS)
    return NodeIdentity(wallet_id=wallet.wallet_id, node_id=key.node_id, key=key, delegation=delegation)
