"""Frozen values that describe the certified rounds in which this node took part, stage by stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from neuroshard.status.values import Number, about, derived
from neuroshard.types import LayerRange, NodeId, WalletId


class AbandonReason(StrEnum):
    """Class of the reason for which this node abandoned a round."""

    NO_ANSWER = "no_answer"  # too few members answered in time
    OBJECTION = "objection"  # this node voted against the aggregate, and the others did not decide in time
    CONTRIBUTIONS = "contributions"  # none was accepted, or too few for the aggregator
    NODE = "node"  # this node could not take part, or the step ended without it


class MemberPart(StrEnum):
    """Outcome of a member's contribution."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    ABSTAINED = "abstained"  # too little work to count; it goes into the member's next contribution
    ABSENT = "absent"  # the member was called, and the round has nothing from it
    UNJUDGED = "unjudged"  # the round ended before a decision


@dataclass(frozen=True)
class RoundContribution:
    """One member's part in a round."""

    node_id: Annotated[NodeId, about("libp2p peer id of the member")]
    wallet_id: Annotated[WalletId, about("public name of the member's wallet")]
    part: Annotated[
        MemberPart,
        about(
            "outcome of its contribution; abstained: too little work to count; absent: called, but sent nothing; "
            "unjudged: the round ended before a decision"
        ),
    ]
    refusal: Annotated[str, about("class of the reason for a refusal, as in /metrics; empty if it was not refused")] = (
        ""
    )
    reason: Annotated[str, about("reason for a refusal, in a sentence; empty if it was not refused")] = ""


@dataclass(frozen=True)
class PhaseSeconds:
    """Durations of a round's phases on this node, over all its views."""

    gather: Annotated[
        Number, about("time until a proposal named the members", "s", gauge="round_seconds{phase=gather}")
    ] = 0.0
    exchange: Annotated[
        Number,
        about("exchange of slices, verdict, and exchange of the aggregate", "s", gauge="round_seconds{phase=exchange}"),
    ] = 0.0
    vote: Annotated[
        Number, about("check of the aggregate and the two votes", "s", gauge="round_seconds{phase=vote}")
    ] = 0.0

    @property
    def total(self) -> float:
        """Seconds over all phases, from the entry into the round to its end."""
        return self.gather + self.exchange + self.vote


@dataclass(frozen=True)
class CertificateStatus:
    """The certificate that ended a round."""

    value: Annotated[str, about("first 16 hex digits of the digest that was voted on")]
    votes: Annotated[int, about("number of votes to commit")]
    voters: Annotated[int, about("number of voters of the step")]
    sequences: Annotated[int, about("sequences for which it credits each accepted member")] = 0


@dataclass(frozen=True)
class RoundStatus:
    """One round of one stage. A round that ends after training has continued has two records: abandoned, then late."""

    outer_step: Annotated[int, about("number of the outer step that the round decided")]
    ended_at: Annotated[float, about("time at which the round ended", "s since 1970")]
    phases: Annotated[PhaseSeconds, about("durations of the phases")]
    members: Annotated[tuple[RoundContribution, ...], about("called members and their contributions")]
    bytes_sent: Annotated[int, about("sent in messages of rounds since the previous record", "bytes")]
    bytes_received: Annotated[int, about("received in messages of rounds since the previous record", "bytes")]
    strategy: Annotated[str, about("strategy of the run: diloco, streaming, sparta or averaging")]
    part: Annotated[
        str,
        about('exchanged part of the state: "all weights", "quarter 2 of 4", "slice 7 of 20", "gradient"'),
    ]
    codec: Annotated[str, about("encoding of the contributions, as the run's file names it")]
    aggregator: Annotated[str, about("rule that combined the contributions, as the run's file names it")]
    views: Annotated[int, about("number of attempts, each with another proposer")] = 1
    skipped_audits: Annotated[
        int, about("audits of the result that this node skipped because a member did not send its blocks in 5 s")
    ] = 0
    certificate: Annotated[CertificateStatus | None, about("proof of the result; null: the round was abandoned")] = None
    is_late: Annotated[
        bool, about("the round completed after training had continued; an earlier record shows it as abandoned")
    ] = False
    abandoned_for: Annotated[
        AbandonReason | None, about("class of the reason why it was abandoned; null: the round completed")
    ] = None
    reason: Annotated[str, about("reason why the round was abandoned, in a sentence; empty if it completed")] = ""

    @derived('"completed" or "abandoned"')
    @property
    def result(self) -> str:
        return "completed" if self.abandoned_for is None else "abandoned"

    @derived("time from the start of the round to its end", "s")
    @property
    def seconds(self) -> Number:
        return self.phases.total


@dataclass(frozen=True)
class Contributor:
    """A node's parts in the completed rounds since this node's start."""

    node_id: NodeId
    wallet_id: WalletId
    accepted: int = 0
    refused: int = 0
    absent: Annotated[int, about("rounds to which it was called without a contribution")] = 0
    sequences: Annotated[int, about("sequences for which certificates credit it")] = 0

    @derived("rounds with a contribution from it")
    @property
    def rounds(self) -> int:
        return self.accepted + self.refused


@dataclass(frozen=True)
class Voter:
    """A seat of a stage. Only the votes of seats decide how an outer step ends."""

    node_id: NodeId
    wallet_id: WalletId
    is_owner: Annotated[bool, about("the seat of the run's owner")]
    is_online: Annotated[bool, about("this node, or one that has answered lately")]


@dataclass(frozen=True)
class StageRoundsStatus:
    """Rounds of one stage since this node's start: the last ones, and counts of all. It is not saved to disk."""

    stage: Annotated[int, about("index of the run's stage, counted from 0", label="stage")]
    layers: LayerRange
    recent: Annotated[tuple[RoundStatus, ...], about("the newest last")] = ()
    completed: Annotated[int, about("certified rounds that completed", counter="rounds_completed")] = 0
    abandoned: Annotated[
        tuple[tuple[AbandonReason, int], ...],
        about("certified rounds that this node abandoned", counter="rounds_abandoned", label="reason"),
    ] = ()
    accepted: Annotated[int, about("contributions to completed rounds", counter="round_contributions_accepted")] = 0
    refused: Annotated[
        tuple[tuple[str, int], ...],
        about(
            "contributions refused in completed rounds, by class of the reason",
            counter="round_contributions_refused",
            label="reason",
        ),
    ] = ()
    bytes_sent: Annotated[int, about("in messages of rounds", "bytes", counter="round_sent_bytes")] = 0
    bytes_received: Annotated[int, about("in messages of rounds", "bytes", counter="round_received_bytes")] = 0
    skipped_audits: Annotated[
        int,
        about(
            "audits of results that this node skipped because a member did not send its blocks in 5 s",
            counter="round_audits_skipped",
        ),
    ] = 0
    contributors: Annotated[
        tuple[Contributor, ...], about("in the order in which they were last called, the newest last")
    ] = ()
    voters: Annotated[tuple[Voter, ...], about("in order of seating")] = ()

    @derived("durations of the last round")
    @property
    def last_phases(self) -> PhaseSeconds | None:
        return self.recent[-1].phases if self.recent else None


@dataclass(frozen=True)
class AcceptedWork:
    """Work of this computer that certificates of rounds accepted since the start of the node."""

    rounds: Annotated[int, about("certified rounds that accepted this computer's work", brief="rounds accepted")] = 0
    refused: Annotated[int, about("certified rounds that refused this computer's work")] = 0
    tokens: Annotated[int, about("tokens for which certificates credit this computer", "tokens")] = 0
    share: Annotated[
        Number | None, about("this computer's share of all work that these certificates credit", "0..1")
    ] = None


def accepted_work(stages: Iterable[StageRoundsStatus], node_id: NodeId | None, sequence_length: int) -> AcceptedWork:
    """Accepted work of a node, in the stage for which it is credited most: a token passes through every stage."""
    best = AcceptedWork()
    for stage in stages:
        own = next((one for one in stage.contributors if one.node_id == node_id), None)
        if own is None:
            continue
        everyone = sum(one.sequences for one in stage.contributors)
        share = own.sequences / everyone if everyone else None
        work = AcceptedWork(own.accepted, own.refused, own.sequences * sequence_length, share)
        best = max(best, work, key=lambda one: (one.tokens, one.rounds))
    return best
