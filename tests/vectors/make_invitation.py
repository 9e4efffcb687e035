"""Writes `invitation.json` again: `python -m tests.vectors.make_invitation`."""

from __future__ import annotations

import json
from pathlib import Path

from neuroshard.identity import TokenSecret, Wallet
from neuroshard.identity.invitations import InvitationTerms, InvitedPlaces, invite, to_code
from neuroshard.types import RunId
from tests.worlds.claims import identity_of

FILE = Path(__file__).parent / "invitation.json"
NOT_AFTER, ISSUED_AT = 1_800_604_800, 1_800_000_000

if __name__ == "__main__":
    owner = Wallet.from_secret(TokenSecret("hex", bytes(32)))
    address = f"/ip4/203.0.113.7/tcp/4001/p2p/{identity_of(1).node_id}"
    places = InvitedPlaces("friends", (address,), ("https://data.example.org/set",))
    made = invite(
        owner, RunId("ab" * 32), InvitationTerms(NOT_AFTER, 2, "Ada", may_invite=True), places, seed=bytes(range(32))
    )
    values = {"code": to_code(made), "secret": made.secret.hex(), "not_after": NOT_AFTER, "issued_at": ISSUED_AT}
    values |= {"pass": made.pass_for(owner.public_key, ISSUED_AT).hex()}
    FILE.write_text(json.dumps(values, indent=1) + "\n", "utf-8")
