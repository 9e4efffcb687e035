"""What is kept of a round: who was in it, what became of whose work, how long its phases took, how it ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from neuroshard.aggregation import Cluster, GateVerdict, MiddleMean, RejectionReason
from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.effects import Judged, RoundPhase, RoundProgress
from neuroshard.consensus.round_messages import Phase, Quorum, VerifiedBody, Vote
from neuroshard.consensus.round_status import (
    KEPT_ROUNDS,
    MAX_CONTRIBUTORS,
    RoundEnd,
    RoundMonitor,
    RoundTerms,
    with_round,
)
from neuroshard.status.rounds import AbandonReason, CertificateStatus, MemberPart, PhaseSeconds, StageRoundsStatus
from neuroshard.types import LayerRange, NodeId, WalletId
from tests.worlds.rounds import value_of

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
VERDICT = GateVerdict((0, 1), {2: RejectionReason.NORM}, (1.0, 1.0), (Cluster((0,)), Cluster((1,))), robust=True)
JUDGED = Judged(VERDICT, MiddleMean.of_equals(2, 0))
TOO_FEW = Judged(VERDICT, None, "Krum needs 5 contributions, and there are 3.")


def certificate(*refused: tuple[GroupMember, str]) -> Quorum:
    """Three of the four called members were in the round; all of them voted."""
    members, refusals = (A, B, C), tuple((member.node_id, why) for member, why in refused)
    bad = {node for node, _ in refusals}
    accepted = tuple(member.node_id for member in members if member.node_id not in bad)
    value = value_of(aggregate=("4" * 64,), members=members, accepted=accepted, refused=refusals, sequences=100)
    vote = Vote("1" * 64, 0, Phase.COMMIT, value.digest)
    votes = tuple(VerifiedBody[Vote].of(member, vote, b"") for member in members)
    return Quorum(value, 0, Phase.COMMIT, votes)


EXCHANGED = (A, B, C)
NONE_YET = StageRoundsStatus(0, LayerRange(0, 2))
END = RoundEnd(time=1_000.0, now=110.0, bytes_sent=5, bytes_received=6)


def watched(*looks: tuple[float, RoundProgress], terms: RoundTerms = TERMS) -> RoundMonitor:
    """A round that began at 100 s."""
    watch = RoundMonitor(terms, 100.0)
    for now, progress in looks:
        watch.look(progress, now)
    return watch


def exchange(view: int = 0) -> RoundProgress:
    return RoundProgress(view, RoundPhase.EXCHANGE, EXCHANGED)


def parts_of(watch: RoundMonitor, reason: str | None = None) -> dict[str, str]:
    return {one.node_id: one.part.value for one in watch.abandoned(reason, END).members}


def test_a_view_begins_when_it_is_first_seen() -> None:
    """What came before it is no measure of how long a round takes."""
    looks = (101.0, exchange()), (130.0, exchange()), (190.0, exchange(1)), (195.0, exchange(1))
    assert watched().view_began == 100.0
    assert watched(*looks[:2]).view_began == 101.0
    assert watched(*looks).view_began == 190.0


def test_a_view_that_waited_in_vain_for_somebody_begins_with_its_proposal() -> None:
    """How long it waited follows from how long rounds have taken: counted, it would make every round wait longer."""
    gather, everybody = RoundProgress(1, RoundPhase.GATHER), RoundProgress(1, RoundPhase.EXCHANGE, (*EXCHANGED, D))
    assert watched((110.0, gather), (140.0, exchange(1)), (142.0, exchange(1))).view_began == 140.0
    assert watched((110.0, gather), (140.0, everybody), (142.0, everybody)).view_began == 110.0


def test_a_completed_round_tells_who_was_in_it_and_what_ended_it() -> None:
    signed = certificate((C, str(RejectionReason.DIRECTION)))
    record = watched((101.0, exchange())).completed(signed, END)
    assert [(one.node_id, one.wallet_id, one.part) for one in record.members] == [
        (A.node_id, A.wallet_id, MemberPart.ACCEPTED),
        (B.node_id, B.wallet_id, MemberPart.ACCEPTED),
        (C.node_id, C.wallet_id, MemberPart.REFUSED),
        (D.node_id, D.wallet_id, MemberPart.ABSENT),  # it was called
    ]
    assert record.members[2].reason == "its direction disagrees with the majority"
    assert record.members[2].refusal == "direction"
    assert record.certificate == CertificateStatus(signed.value.digest[:16], votes=3, voters=4, sequences=100)
    assert (record.outer_step, record.codec, record.aggregator) == (7, "int8", "trimmed_mean(0.2)")
    assert (record.strategy, record.part) == ("streaming", "quarter 4 of 4")
    assert (record.bytes_sent, record.bytes_received, record.is_late, record.abandoned_for) == (5, 6, False, None)


def test_who_did_too_little_to_count_is_not_shown_as_missing() -> None:
    """Neither accepted nor refused, in the value that was agreed on and in what this node judged by itself."""
    value = structs.replace(certificate().value, accepted=(A.node_id, B.node_id))
    record = watched((101.0, exchange())).completed(structs.replace(certificate(), value=value), END)
    assert [one.part for one in record.members] == [
        MemberPart.ACCEPTED,
        MemberPart.ACCEPTED,
        MemberPart.ABSTAINED,
        MemberPart.ABSENT,
    ]
    abstained = GateVerdict((0, 1), {}, (1.0, 1.0), (Cluster((0,)), Cluster((1,))), robust=False, abstained=(2,))
    looked = RoundProgress(0, RoundPhase.EXCHANGE, EXCHANGED, Judged(abstained, None, "too few are left"))
    assert parts_of(watched((101.0, looked))) == {"a": "accepted", "b": "accepted", "c": "abstained", "d": "absent"}


def test_the_phases_of_all_views_add_up_to_the_seconds_of_the_round() -> None:
    watch = watched(
        (102.0, exchange()),
        (103.0, RoundProgress(1, RoundPhase.GATHER)),  # the first view came to nothing
        (104.0, RoundProgress(1, RoundPhase.GATHER)),
        (105.5, exchange(1)),
        (108.0, RoundProgress(1, RoundPhase.VOTE, EXCHANGED, JUDGED)),
    )
    record = watch.completed(certificate(), END)
    assert record.phases == PhaseSeconds(gather=4.5, exchange=3.5, vote=2.0)
    assert record.phases.total == 10.0
    assert record.views == 2
    assert record.ended_at == 1_000.0


def test_a_round_that_ended_before_anybody_looked_ended_then() -> None:
    watch = watched((102.0, exchange()), (104.0, RoundProgress(0, RoundPhase.ENDED)))
    record = watch.completed(certificate(), replace(END, is_late=True))
    assert (record.is_late, record.ended_at, record.phases.total) == (True, 994.0, 4.0)


@pytest.mark.parametrize(
    ("progress", "reason", "kind", "words"),
    [
        (exchange(), None, AbandonReason.NO_ANSWER, "too few members answered in time"),
        (
            RoundProgress(0, RoundPhase.VOTE, EXCHANGED, JUDGED, "worse"),
            "no: worse",
            AbandonReason.OBJECTION,
            "no: worse",
        ),
        (
            RoundProgress(0, RoundPhase.EXCHANGE, EXCHANGED, TOO_FEW),
            TOO_FEW.abort_reason,
            AbandonReason.CONTRIBUTIONS,
            "Krum needs 5 contributions, and there are 3.",
        ),
        (RoundProgress(0, RoundPhase.VOTE, EXCHANGED, JUDGED), "no space", AbandonReason.NODE, "no space"),
    ],
)
def test_a_round_is_abandoned_for_one_of_four_reasons(
    progress: RoundProgress, reason: str | None, kind: AbandonReason, words: str
) -> None:
    record = watched((101.0, progress)).abandoned(reason, END)
    assert (record.abandoned_for, record.reason, record.certificate) == (kind, words, None)


def test_an_abandoned_round_tells_as_much_of_its_members_as_was_seen() -> None:
    assert parts_of(watched()) == dict.fromkeys("abcd", "unjudged")
    unjudged = {**dict.fromkeys("abc", "unjudged"), "d": "absent"}
    assert parts_of(watched((101.0, exchange()))) == unjudged
    judged = (101.0, RoundProgress(0, RoundPhase.EXCHANGE, EXCHANGED, TOO_FEW))
    seen = {"a": "accepted", "b": "accepted", "c": "refused", "d": "absent"}
    assert parts_of(watched(judged), TOO_FEW.abort_reason) == seen
    assert parts_of(watched(judged, (102.0, RoundProgress(1, RoundPhase.GATHER)))) == seen  # of the view before


def test_reasons_that_no_gate_gives_are_counted_together() -> None:
    """Others' certificates may hold any text; what is counted by name must not grow with it."""
    record = watched().completed(certificate((A, "because"), (B, str(RejectionReason.ZERO))), END)
    assert [one.refusal for one in record.members] == ["other", "zero", "", ""]
    assert record.members[0].reason == "because"
    assert with_round(NONE_YET, record).refused == (("other", 1), ("zero", 1))


def test_skipped_audits_of_all_views_are_counted_once() -> None:
    first, second = (replace(exchange(view), skipped_audits=skipped) for view, skipped in ((0, 1), (1, 2)))
    watch = watched((101.0, exchange()), (106.0, first), (130.0, exchange(1)), (140.0, second))
    given_up = watch.abandoned(None, END)
    watch.look(replace(second, skipped_audits=3), 150.0)
    late = watch.completed(certificate(), END)
    assert (given_up.skipped_audits, late.skipped_audits) == (3, 1)
    assert with_round(with_round(NONE_YET, given_up), late).skipped_audits == 4
    assert (given_up.views, late.views) == (2, 2)


def test_the_last_rounds_are_kept_and_all_are_counted() -> None:
    good = watched().completed(certificate((C, str(RejectionReason.NORM))), END)
    bad = watched((101.0, RoundProgress(0, RoundPhase.EXCHANGE, EXCHANGED, TOO_FEW))).abandoned("too many", END)
    rounds = NONE_YET
    for number in range(KEPT_ROUNDS + 5):
        rounds = with_round(rounds, replace(bad if number % 5 == 0 else good, outer_step=number))
    assert [record.outer_step for record in rounds.recent] == list(range(5, KEPT_ROUNDS + 5))
    assert (rounds.completed, rounds.abandoned) == (20, ((AbandonReason.CONTRIBUTIONS, 5),))
    assert (rounds.accepted, rounds.refused) == (40, (("norm", 20),))  # abandoned rounds have no part in it
    assert (rounds.bytes_sent, rounds.bytes_received) == (25 * 5, 25 * 6)
    told = {one.node_id: (one.rounds, one.accepted, one.refused, one.absent) for one in rounds.contributors}
    assert told == {"a": (20, 20, 0, 0), "b": (20, 20, 0, 0), "c": (20, 0, 20, 0), "d": (0, 0, 0, 20)}


def test_of_contributors_those_are_forgotten_that_have_been_away_for_longest() -> None:
    rounds = NONE_YET
    for number in range(MAX_CONTRIBUTORS):
        stranger = GroupMember(NodeId(f"x{number}"), WalletId("f" * 16))
        record = watched(terms=replace(TERMS, called=(*EXCHANGED, stranger))).completed(certificate(), END)
        rounds = with_round(rounds, record)
    names = {one.node_id for one in rounds.contributors}
    assert len(names) == MAX_CONTRIBUTORS
    assert {"a", "b", "c", f"x{MAX_CONTRIBUTORS - 1}"} <= names
    assert "x0" not in names
