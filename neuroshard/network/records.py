"""What a directory accepts: small, young claims that a node made about itself. Every directory checks with this."""

from __future__ import annotations

from neuroshard.identity import DelegationExpiredError, SignedClaim, VerifiedClaim, verify_claim
from neuroshard.types import NodeId

RECORD_DOMAIN = "announcement"
MAX_RECORD_BYTES = 16 * 1024
RECORD_SECONDS = 3600.0  # older ones are gone; nodes announce themselves again well before


def checked_record(owner: NodeId | None, record: bytes, now: float) -> VerifiedClaim:
    """The claim in a record that lies under `owner` (None: whoever signed it).

    Raises DataError: ClaimTooLargeError, MalformedClaimError, ForeignClaimError for a record under another's name,
    SignatureError, ClaimExpiredError or DelegationExpiredError.
    """
    claim = SignedClaim.decode(record, MAX_RECORD_BYTES)
    if now >= claim.delegation.expires_at:  # cheaper than the signatures
        raise DelegationExpiredError(f"The delegation of node {claim.delegation.node_id} expired.")
    return verify_claim(claim, RECORD_DOMAIN, now, owner, max_age_seconds=RECORD_SECONDS)
