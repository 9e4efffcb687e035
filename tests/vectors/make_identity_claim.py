"""Writes the claim of `identity.json` again: `python -m tests.vectors.make_identity_claim`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from neuroshard.identity import Delegation, NodeIdentity, NodeKey, TokenSecret, Wallet, sign_claim

FILE = Path(__file__).parent / "identity.json"


def golden_claim() -> dict[str, Any]:
    """A claim that every version of the program must write in these bytes."""
    wallet = Wallet.from_secret(TokenSecret("hex", bytes(32)))
    key = NodeKey.from_seed(bytes(range(32)))
    identity = NodeIdentity(wallet.wallet_id, key.node_id, key, Delegation.issue(wallet, key.public_key, 2e9))
    payload, issued_at = {"stage": 0, "loss": 2.5}, 1_700_000_000.25
    return {
        "kind": "announcement",
        "payload": payload,
        "issued_at": issued_at,
        "verified_at": 1_700_000_010,
        "encoded": sign_claim(identity, "announcement", payload, issued_at).encode().hex(),
        "node_id": identity.node_id,
        "wallet_id": identity.wallet_id,
    }


if __name__ == "__main__":
    vectors = json.loads(FILE.read_text("utf-8"))
    FILE.write_text(json.dumps({**vectors, "claim": golden_claim()}, indent=1) + "\n", "utf-8")
