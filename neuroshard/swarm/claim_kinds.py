"""The two kinds of claims that nodes of a run make all the time, and how each is read."""

from __future__ import annotations

from neuroshard.errors import DataError
from neuroshard.identity import NodeIdentity, SignedClaim, VerifiedClaim, sign_claim
from neuroshard.identity.claims import MAX_CLOCK_SKEW_SECONDS
from neuroshard.network.records import MAX_RECORD_BYTES, RECORD_DOMAIN, RECORD_SECONDS
from neuroshard.swarm.announcement import Announcement
from neuroshard.swarm.claim_reading import ClaimRules
from neuroshard.swarm.packing import MAX_PACKED_BYTES, packed, unpacked
from neuroshard.swarm.training_report import TrainingReport

REPORT_DOMAIN = "report"
REPORT_SECONDS = MAX_CLOCK_SKEW_SECONDS + 60  # a clock may be as wrong as that, and gossip takes a while

REPORT_RULES: ClaimRules[TrainingReport] = ClaimRules(
    domain=REPORT_DOMAIN,
    decode=unpacked,
    read=lambda payload, _node_id: TrainingReport.from_json(payload),
    run_of=lambda report: report.run_id,
    sequence_of=lambda report: report.sequence,
    max_bytes=MAX_PACKED_BYTES,
    max_age_seconds=REPORT_SECONDS,
)
ANNOUNCEMENT_RULES: ClaimRules[Announcement] = ClaimRules(
    domain=RECORD_DOMAIN,
    decode=lambda data: SignedClaim.decode(data, MAX_RECORD_BYTES),
    read=Announcement.from_json,
    run_of=lambda announcement: announcement.run_id,
    sequence_of=None,
    max_bytes=MAX_RECORD_BYTES,
    max_age_seconds=RECORD_SECONDS,
)


def is_announcement(claim: VerifiedClaim) -> bool:
    """Whether a record says what an announcement must: whoever keeps the directory's records asks, too."""
    try:
        Announcement.from_json(claim.payload, claim.node_id)
    except (DataError, ValueError):
        return False
    return True


def signed_report(identity: NodeIdentity, report: TrainingReport, now: float) -> bytes:
    """A report as it travels."""
    return packed(sign_claim(identity, REPORT_DOMAIN, report.to_json(), now))


def signed_announcement(identity: NodeIdentity, announcement: Announcement, now: float) -> bytes:
    """An announcement as it travels and lies in the directory."""
    return sign_claim(identity, RECORD_DOMAIN, announcement.to_json(), now).encode()
