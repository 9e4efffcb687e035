"""What a node sees of a round, made by hand."""

from __future__ import annotations

from neuroshard.aggregation import GateVerdict, MiddleMean, RejectionReason
from neuroshard.consensus.effects import Judged
from neuroshard.consensus.roster import GroupMember
from neuroshard.consensus.round_messages import Phase, Quorum, Value, VerifiedBody, Vote
from neuroshard.consensus.round_status import RoundTerms
from neuroshard.types import NodeId, WalletId

A, B, C, D = (GroupMember(NodeId(name), WalletId(name * 16)) for name in "abcd")
TERMS = RoundTerms(
    outer_step=7,
    called=(A, B, C, D),
    voters=4,
    strategy="streaming",
    part="quarter 4 of 4",
    codec="int8",
    aggregator="trimmed_mean(0.2)",
)
VERDICT = GateVerdict((0, 1), {2: RejectionReason.NORM}, (1.0, 1.0), robust=True)
JUDGED = Judged(VERDICT, MiddleMean((0, 1), (1.0, 1.0), 0))
TOO_MANY = Judged(VERDICT, None, "1 of 3 contributions were refused, at most 0 may be")


def certificate(*refused: tuple[GroupMember, str]) -> Quorum:
    """Three of the four called members were in the round; all of them voted."""
    members, refusals = (A, B, C), tuple((member.node_id, why) for member, why in refused)
    bad = {node for node, _ in refusals}
    accepted = tuple(member.node_id for member in members if member.node_id not in bad)
    value = Value("1" * 64, "2" * 64, "3" * 64, ("4" * 64,), members, accepted, refusals, "5" * 64, 100)
    votes = tuple(VerifiedBody(member, Vote("1" * 64, 0, Phase.COMMIT, value.digest), b"") for member in members)
    return Quorum(value, 0, Phase.COMMIT, votes)
