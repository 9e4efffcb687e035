"""Passes of the nodes of a run of friends, for tests and benchmarks: every world gets them here."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from neuroshard.identity import Wallet
from neuroshard.identity.invitations import Invitation, InvitationTerms, InvitedPlaces, invite, to_code
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stored_passes import OwnPass, StoredPasses
from neuroshard.types import RunId

LONG_AFTER_EVERY_TEST = 4_000_000_000  # seconds since 1970
BEFORE_EVERY_TEST = 1_600_000_000
EVERYBODY = "everybody"


def invitation_to(run_id: RunId, owner: Wallet, label: str = EVERYBODY) -> Invitation:
    """The same invitation every time for a label, for any number of wallets."""
    terms = InvitationTerms(LONG_AFTER_EVERY_TEST, 10_000, label)
    return invite(owner, run_id, terms, InvitedPlaces("friends"), seed=sha256(label.encode()).digest())


def invitation_code(run_id: RunId, owner: Wallet) -> str:
    """Its code, for `--invite`."""
    return to_code(invitation_to(run_id, owner))


def befriend(data_dir: Path, offer: RunOffer, wallet: bytes, owner: Wallet, label: str = EVERYBODY) -> None:
    """Store the pass of a wallet, given by its public key, where its node finds it at its start."""
    member_pass = invitation_to(offer.run_id, owner, label).pass_for(wallet, BEFORE_EVERY_TEST)
    StoredPasses(data_dir, offer).keep_own(OwnPass(member_pass))
