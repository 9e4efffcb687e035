"""What a directory accepts: small, young claims that a node made about itself. Every directory checks with this."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from neuroshard.identity import DelegationExpiredError, MalformedClaimError, SignedClaim, VerifiedClaim, verify_claim
from neuroshard.types import NodeId

RECORD_DOMAIN = "announcement"
MAX_RECORD_BYTES = 16 * 1024
RECORD_SECONDS = 3600.0  # older ones are gone; nodes announce themselves again well before

RecordCheck: TypeAlias = Callable[[VerifiedClaim], bool]
"""Whether a claim that holds says what a record must; only those who make and read records know that. Pure and fast."""


def any_record(_claim: VerifiedClaim) -> bool:
    """The check of a directory that does not care what its records say."""
    return True


def checked_record(owner: NodeId | None, record: bytes, now: float, accepts: RecordCheck = any_record) -> VerifiedClaim:
    """The claim in a record that lies under `owner` (None: whoever signed it).

    Raises DataError: ClaimTooLargeError, MalformedClaimError also for what `accepts` refuses, ForeignClaimError for a
    record under another's name, SignatureError, ClaimExpiredError or DelegationExpiredError.
    """
    claim = SignedClaim.decode(record, MAX_RECORD_BYTES)
    if now >= claim.delegation.expires_at:  # cheaper than the signatures
        raise DelegationExpiredError(f"The delegation of node {claim.delegation.node_id} expired.")
    verified = verify_claim(claim, RECORD_DOMAIN, now, owner, max_age_seconds=RECORD_SECONDS)
    if not accepts(verified):
        raise MalformedClaimError(f"The record of node {verified.node_id} does not say what a record must.")
    return verified
