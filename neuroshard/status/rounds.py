"""Frozen values that describe the certified rounds in which this node took part, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from neuroshard.status.values import Number, about, derived
from neuroshard.types import LayerRange, NodeId, WalletId


class AbandonReason(StrEnum):
    """Class of the reason for which this node abandoned a round."""

    NO_ANSWER = "no_answer"  # too few members answered in time
    OBJECTION = "objection"  # this node voted against the aggregate, and the others did not decide in time
    CONTRIBUTIONS = "contributions"  # too many were refused, or too few were left
    STORAGE = "storage"  # this node could not write its vote to disk


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

    node_id: NodeId
    wallet_id: WalletId
    part: Annotated[
        MemberPart, about("abstained: too little work to count; absent: called, but the round has nothing from it")
    ]
    refusal: Annotated[str, about("class of the reason for a refusal, as in /metrics; empty without one")] = ""
    reason: Annotated[str, about("reason for a refusal")] = ""


@dataclass(frozen=True)
class PhaseSeconds:
    """Durations of a round's phases on this node, over all its views."""

    gather: Annotated[Number, about("until a proposal named the members", "s", gauge="round_seconds{phase=gather}")] = (
        0.0
    )
    exchange: Annotated[
        Number,
        about("slices to their reducers, verdict, slices of the aggregate", "s", gauge="round_seconds{phase=exchange}"),
    ] = 0.0
    vote: Annotated[Number, about("check of the aggregate, two votes", "s", gauge="round_seconds{phase=vote}")] = 0.0

    @property
    def total(self) -> float:
        """Seconds over all phases, from the entry into the round to its end."""
        return self.gather + self.exchange + self.vote


@dataclass(frozen=True)
class CertificateStatus:
    """The certificate that ended a round."""

    value: Annotated[str, about("first 16 hex digits of the digest that was voted on")]
    votes: Annotated[int, about("votes to commit")]
    voters: Annotated[int, about("voters of the step")]


@dataclass(frozen=True)
class RoundStatus:
    """One round of one stage. A round that ends after training has continued has two records: abandoned, then late."""

    outer_step: int
    ended_at: Annotated[float, about(unit="s since 1970")]
    phases: PhaseSeconds
    members: tuple[RoundContribution, ...]
    bytes_sent: Annotated[int, about("in messages of rounds since the record before this one", "bytes")]
    bytes_received: Annotated[int, about("in messages of rounds since the record before this one", "bytes")]
    strategy: Annotated[str, about("diloco, streaming, sparta or averaging")]
    part: Annotated[
        str,
        about('part of the state: "all weights", "quarter 2 of 4", "slice 7 of 20", "gradient"'),
    ]
    codec: Annotated[str, about("encoding of the contributions, as the run's file names it")]
    aggregator: str
    views: Annotated[int, about("attempts, each with another proposer")] = 1
    certificate: Annotated[CertificateStatus | None, about("null: the round was abandoned")] = None
    is_late: Annotated[bool, about("completed after training had continued; recorded as abandoned before")] = False
    abandoned_for: Annotated[AbandonReason | None, about("null: the round completed")] = None
    reason: Annotated[str, about("reason why the round was abandoned")] = ""

    @derived('"completed" or "abandoned"')
    @property
    def result(self) -> str:
        return "completed" if self.abandoned_for is None else "abandoned"

    @derived("from the entry into the round to its end", "s")
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

    @derived("rounds with a contribution from it")
    @property
    def rounds(self) -> int:
        return self.accepted + self.refused


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
    contributors: Annotated[
        tuple[Contributor, ...], about("in the order in which they were last called, the newest last")
    ] = ()

    @derived("durations of the last round")
    @property
    def last_phases(self) -> PhaseSeconds | None:
        return self.recent[-1].phases if self.recent else None
