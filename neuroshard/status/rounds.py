"""Frozen values that describe the certified rounds in which this node took part, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from neuroshard.types import LayerRange, NodeId, WalletId


class AbandonReason(StrEnum):
    """Why a round came to nothing here, in the classes that are counted."""

    NO_ANSWER = "no_answer"  # too few members answered in time
    OBJECTION = "objection"  # this node voted against the aggregate, and nobody decided without it in time
    CONTRIBUTIONS = "contributions"  # too many of them were refused, or too few were left
    STORAGE = "storage"  # this node could not write down its vote


class MemberPart(StrEnum):
    """What became of a member's contribution."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    ABSTAINED = "abstained"  # it did too little work to count; that goes into its next contribution
    ABSENT = "absent"  # it was called, and nothing of it is in the round
    UNJUDGED = "unjudged"  # the round came to nothing before


@dataclass(frozen=True)
class RoundContribution:
    """One member's part in a round."""

    node_id: NodeId
    wallet_id: WalletId
    part: MemberPart
    refusal: str = ""  # the class of the reason, as it is counted
    reason: str = ""  # why it was refused, in words


@dataclass(frozen=True)
class PhaseSeconds:
    """How long the phases of a round took here, all its views together."""

    gather: float = 0.0  # until a proposal named the members
    exchange: float = 0.0  # slices to their reducers, verdict, slices of the aggregate
    vote: float = 0.0  # check of the aggregate, two votes

    @property
    def total(self) -> float:
        """From entering the round to its end."""
        return self.gather + self.exchange + self.vote


@dataclass(frozen=True)
class CertificateStatus:
    """What ended a round."""

    value: str  # the first 16 hex digits of the digest that was voted on
    votes: int  # to commit
    voters: int  # of the step


@dataclass(frozen=True)
class RoundStatus:
    """One round of one stage. A round that ends after training has gone on is told twice: abandoned, then late."""

    outer_step: int
    ended_at: float  # seconds since the epoch
    seconds: PhaseSeconds
    contributions: tuple[RoundContribution, ...]
    bytes_sent: int  # in messages of the rounds, since the record before
    bytes_received: int
    strategy: str
    part: str  # what it was about, in words
    codec: str
    aggregator: str
    views: int = 1  # tries, each with a proposer of its own
    certificate: CertificateStatus | None = None  # None: abandoned
    is_late: bool = False  # training had gone on; what was learned meanwhile was added
    abandoned_for: AbandonReason | None = None
    reason: str = ""  # why it was abandoned, in words


@dataclass(frozen=True)
class Contributor:
    """A node's parts in the completed rounds since this node's start."""

    node_id: NodeId
    wallet_id: WalletId
    accepted: int = 0
    refused: int = 0
    absent: int = 0

    @property
    def rounds(self) -> int:
        """With a contribution of it."""
        return self.accepted + self.refused


@dataclass(frozen=True)
class StageRoundsStatus:
    """The rounds of one stage since this node's start: the last ones, and counts of all. None of it is saved."""

    stage: int  # of the run's, counted from 0
    layers: LayerRange
    recent: tuple[RoundStatus, ...] = ()  # the newest last
    completed: int = 0
    abandoned: tuple[tuple[AbandonReason, int], ...] = ()
    accepted: int = 0  # contributions to completed rounds, as `refused`
    refused: tuple[tuple[str, int], ...] = ()  # by class of the reason
    bytes_sent: int = 0
    bytes_received: int = 0
    contributors: tuple[Contributor, ...] = ()  # the one that was called last at the end
