"""Writes the code with a tip into `invitation.json`: `python -m tests.vectors.make_invitation`.

The other values are of a version without tips, which must stay readable: nothing makes them again.
"""

from __future__ import annotations

import json
from pathlib import Path

from neuroshard.identity import TokenSecret, Wallet
from neuroshard.identity.invitations import InvitationTerms, InvitedPlaces, InvitedTip, invite, to_code
from neuroshard.types import RunId
from tests.worlds.claims import identity_of

FILE = Path(__file__).parent / "invitation.json"
NOT_AFTER = 1_800_604_800
TIP = InvitedTip(3, 2, b"\xaa" * 32, 1024, b"\xbb" * 32)

if __name__ == "__main__":
    owner = Wallet.from_secret(TokenSecret("hex", bytes(32)))
    address = f"/ip4/203.0.113.7/tcp/4001/p2p/{identity_of(1).node_id}"
    places = InvitedPlaces("friends", (address,), ("https://data.example.org/set",))
    terms = InvitationTerms(NOT_AFTER, 2, "Ada", may_invite=True, tip=TIP)
    made = invite(owner, RunId("ab" * 32), terms, places, seed=bytes(range(32)))
    values = json.loads(FILE.read_text("utf-8")) | {"code_with_tip": to_code(made)}
    FILE.write_text(json.dumps(values, indent=1) + "\n", "utf-8")
