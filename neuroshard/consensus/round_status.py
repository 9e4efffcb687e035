"""The status record of a round: its phases, members, verdict and end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from neuroshard.aggregation import RejectionReason
from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.effects import RoundPhase, RoundProgress
from neuroshard.consensus.round_messages import Quorum, Value
from neuroshard.consensus.vote_log import ContributionRecovery
from neuroshard.status.rounds import (
    AbandonReason,
    CertificateStatus,
    Contributor,
    MemberPart,
    PhaseSeconds,
    RoundContribution,
    RoundStatus,
    StageRoundsStatus,
)

KEPT_ROUNDS = 20  # per stage
MAX_CONTRIBUTORS = 256  # listed by name
VALUE_DIGITS = 16  # of a digest, as shown to people
OTHER_REFUSAL = "other"  # used for unknown reasons in a certificate from other members
NO_ANSWER = "too few members answered in time"
NO_QUORUM = "too few voting nodes are online"
_UNJUDGED: tuple[MemberPart, str] = (MemberPart.UNJUDGED, "")
_ABSTAINED: tuple[MemberPart, str] = (MemberPart.ABSTAINED, "")
_REFUSAL_NAMES = {str(refusal): refusal.name.lower() for refusal in RejectionReason}


@dataclass(frozen=True)
class RoundTerms:
    """The facts about a round that are known before it begins."""

    outer_step: int
    called: tuple[GroupMember, ...]  # including this node
    voters: int
    strategy: str
    part: str  # a description of the exchanged part
    codec: str
    aggregator: str


@dataclass(frozen=True)
class RoundEnd:
    """The moment at which a round ended here."""

    time: float  # seconds since the epoch
    now: float  # seconds, by the clock of `look`
    bytes_sent: int = 0  # since the record before
    bytes_received: int = 0
    is_late: bool = False


class RoundMonitor:
    """Follows the progress of one round and makes its record. Times are seconds of any one clock."""

    def __init__(self, terms: RoundTerms, began: float, offered: ContributionRecovery | None = None) -> None:
        """`offered` keeps this member's contributions to the exchanges of the round."""
        self.terms = terms
        self._offered = offered
        self._seconds = dict.fromkeys(RoundPhase, 0.0)
        self._phase = RoundPhase.GATHER
        self._looked_at = began
        self._skipped = dict[int, int]()  # audits, by view
        self._recorded = 0  # skipped audits in an earlier record of this round
        self.view_began = began  # of the last view, or of its proposal if that waited for its full time
        self._judgement = RoundProgress(0, RoundPhase.GATHER)  # the newest progress with members

    def look(self, progress: RoundProgress, now: float) -> None:
        """Record the current progress of the round."""
        self._pass(now)
        self._phase = progress.phase
        if progress.view not in self._skipped or self._has_waited_in_vain(progress):
            self.view_began = now
        self._skipped[progress.view] = progress.skipped_audits
        if progress.members:
            self._judgement = progress
            if self._offered is not None:
                self._offered.note(progress)

    def completed(self, certificate: Quorum, end: RoundEnd) -> RoundStatus:
        """The record of a round that ended with this certificate."""
        self._pass(end.now)
        since_end = self._seconds[RoundPhase.ENDED]
        certified = CertificateStatus(
            certificate.value.digest[:VALUE_DIGITS],
            len(certificate.votes),
            self.terms.voters,
            certificate.value.sequences,
        )
        record = self._record(end, _agreed_contributions(certificate.value, self.terms.called))
        return replace(record, ended_at=end.time - since_end, certificate=certified, is_late=end.is_late)

    def abandoned(self, reason: str | None, end: RoundEnd) -> RoundStatus:
        """The record of an abandoned round, with its reason or None for a timeout."""
        self._pass(end.now)
        judged, objection = self._judgement.judged, self._judgement.objection
        if judged is not None and judged.reduction is None:
            kind = AbandonReason.CONTRIBUTIONS
        elif objection:
            kind = AbandonReason.OBJECTION
        else:
            kind = AbandonReason.NO_ANSWER if reason in (None, NO_QUORUM) else AbandonReason.NODE
        record = self._record(end, self._own_contributions())
        return replace(record, abandoned_for=kind, reason=reason or NO_ANSWER)

    def _has_waited_in_vain(self, progress: RoundProgress) -> bool:
        """Whether this is the first look at a proposal that leaves out a called member."""
        before = self._judgement
        is_proposed = bool(progress.members) and (not before.members or before.view != progress.view)
        return is_proposed and not set(self.terms.called) <= set(progress.members)

    def _pass(self, now: float) -> None:
        self._seconds[self._phase] += max(0.0, now - self._looked_at)
        self._looked_at = now

    def _record(self, end: RoundEnd, contributions: tuple[RoundContribution, ...]) -> RoundStatus:
        seconds, terms, recorded = self._seconds, self.terms, self._recorded
        self._recorded = sum(self._skipped.values())
        return RoundStatus(
            outer_step=terms.outer_step,
            ended_at=end.time,
            phases=PhaseSeconds(seconds[RoundPhase.GATHER], seconds[RoundPhase.EXCHANGE], seconds[RoundPhase.VOTE]),
            members=contributions,
            bytes_sent=end.bytes_sent,
            bytes_received=end.bytes_received,
            strategy=terms.strategy,
            part=terms.part,
            codec=terms.codec,
            aggregator=terms.aggregator,
            views=max(1, len(self._skipped)),
            skipped_audits=self._recorded - recorded,
        )

    def _own_contributions(self) -> tuple[RoundContribution, ...]:
        """The contributions as this node saw them itself."""
        members, judged = self._judgement.members, self._judgement.judged
        if not members:
            return _contributions(self.terms.called, {}, MemberPart.UNJUDGED)
        parts = dict.fromkeys(members, _UNJUDGED)
        if judged is not None and judged.verdict.member_count == len(members):
            parts = {members[row]: (MemberPart.ACCEPTED, "") for row in judged.verdict.accepted}
            parts |= {member: (MemberPart.REFUSED, why) for member, why in _refused_in(self._judgement).items()}
            parts |= dict.fromkeys((members[row] for row in judged.verdict.abstained), _ABSTAINED)
        return _contributions((*members, *self.terms.called), parts, MemberPart.ABSENT)


def with_round(before: StageRoundsStatus, record: RoundStatus) -> StageRoundsStatus:
    """Add a round to the stage's rounds. Contributions count once, in the record of the round that completed."""
    after = replace(
        before,
        recent=(*before.recent, record)[-KEPT_ROUNDS:],
        bytes_sent=before.bytes_sent + record.bytes_sent,
        bytes_received=before.bytes_received + record.bytes_received,
        skipped_audits=before.skipped_audits + record.skipped_audits,
    )
    if record.abandoned_for is not None:
        counts = dict(before.abandoned)
        counts[record.abandoned_for] = counts.get(record.abandoned_for, 0) + 1
        return replace(after, abandoned=tuple(sorted(counts.items())))
    parts = Counter(one.part for one in record.members)
    refusals = Counter(dict(before.refused)) + Counter(one.refusal for one in record.members if one.refusal)
    return replace(
        after,
        completed=before.completed + 1,
        accepted=before.accepted + parts[MemberPart.ACCEPTED],
        refused=tuple(sorted(refusals.items())),
        contributors=_counted(before.contributors, record),
    )


def _counted(before: Sequence[Contributor], record: RoundStatus) -> tuple[Contributor, ...]:
    known = {one.node_id: one for one in before}
    credit = record.certificate.sequences if record.certificate else 0
    for one in record.members:
        old = known.pop(one.node_id, Contributor(one.node_id, one.wallet_id))
        known[one.node_id] = Contributor(
            one.node_id,
            one.wallet_id,
            accepted=old.accepted + (one.part is MemberPart.ACCEPTED),
            refused=old.refused + (one.part is MemberPart.REFUSED),
            absent=old.absent + (one.part is MemberPart.ABSENT),
            sequences=old.sequences + credit * (one.part is MemberPart.ACCEPTED),
        )
    return tuple(known.values())[-MAX_CONTRIBUTORS:]


def _refused_in(progress: RoundProgress) -> dict[GroupMember, str]:
    if progress.judged is None or progress.judged.verdict.member_count != len(progress.members):
        return {}
    return {progress.members[row]: str(why) for row, why in progress.judged.verdict.refused.items()}


def _agreed_contributions(value: Value, called: tuple[GroupMember, ...]) -> tuple[RoundContribution, ...]:
    parts, refused = dict.fromkeys(value.members, _ABSTAINED), dict(value.refused)
    for member in value.members:
        if member.node_id in value.accepted:
            parts[member] = MemberPart.ACCEPTED, ""
        elif member.node_id in refused:
            parts[member] = MemberPart.REFUSED, refused[member.node_id]
    return _contributions((*value.members, *called), parts, MemberPart.ABSENT)


def _contributions(
    members: Iterable[GroupMember], parts: dict[GroupMember, tuple[MemberPart, str]], otherwise: MemberPart
) -> tuple[RoundContribution, ...]:
    contributions = list[RoundContribution]()
    for member in sorted(set(members)):
        part, reason = parts.get(member, (otherwise, ""))
        refusal = _REFUSAL_NAMES.get(reason, OTHER_REFUSAL) if part is MemberPart.REFUSED else ""
        contributions.append(RoundContribution(member.node_id, member.wallet_id, part, refusal, reason))
    return tuple(contributions)
