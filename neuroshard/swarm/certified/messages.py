"""What travels in a round: signed bodies with what belongs to them, and the bulk of slices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from neuroshard.identity import hash_parts
from neuroshard.swarm.certified.bodies import (
    Body,
    Intent,
    NewView,
    Phase,
    Proposal,
    Result,
    Statement,
    Value,
    Vote,
)
from neuroshard.swarm.certified.roster import Member, Step
from neuroshard.swarm.certified.slices import Encoded
from neuroshard.types import NodeId

AnyBody_co = TypeVar("AnyBody_co", bound=Body, covariant=True)


@dataclass(frozen=True)
class Signed(Generic[AnyBody_co]):
    """A body whose signature was checked, with the claim that proves it to others."""

    member: Member
    body: AnyBody_co
    claim: bytes = field(repr=False, compare=False)


@dataclass(frozen=True)
class Quorum:
    """Votes of one phase and view on one value: of PREPARE a lock, of COMMIT the certificate that ends the step."""

    value: Value
    view: int
    phase: Phase
    votes: tuple[Signed[Vote], ...]

    def is_valid_for(self, step: Step) -> bool:
        """Whether enough voters of the step said exactly this."""
        said = {
            vote.member.node_id
            for vote in self.votes
            if vote.body == Vote(step.id, self.view, self.phase, self.value.digest)
            and vote.member in step.roster.members
        }
        return self.value.step_id == step.id and len(said) >= step.quorum


@dataclass(frozen=True)
class IntentSaid:
    """To everybody."""

    signed: Signed[Intent]


@dataclass(frozen=True)
class NewViewSaid:
    """To everybody; with what its author is locked on."""

    signed: Signed[NewView]
    lock: Quorum | None = None


@dataclass(frozen=True)
class ProposalSaid:
    """To everybody, by the view's proposer."""

    signed: Signed[Proposal]
    intents: tuple[Signed[Intent], ...]
    lock: Quorum | None = None


@dataclass(frozen=True)
class ContributionSent:
    """To a reducer: some of its slices, and the digests of all slices, whose hash the author's intent names.

    A reducer hands on what it has of others when a third one has to do its slice again.
    """

    round_id: str
    author: NodeId
    digests: tuple[bytes, ...]
    slices: Mapping[int, Encoded] = field(repr=False)


@dataclass(frozen=True)
class StatementSaid:
    """To everybody; with the statistics themselves."""

    signed: Signed[Statement]
    statistics: Mapping[int, Encoded] = field(repr=False)


@dataclass(frozen=True)
class ResultSaid:
    """To everybody; with those of the slices that its author is to send."""

    signed: Signed[Result]
    slices: Mapping[int, Encoded] = field(repr=False)


@dataclass(frozen=True)
class VoteSaid:
    """To everybody."""

    signed: Signed[Vote]


@dataclass(frozen=True)
class CertificateSaid:
    """To everybody, by anybody: the step has ended."""

    certificate: Quorum


@dataclass(frozen=True)
class AggregateWanted:
    """To somebody who has voted for a value, or knows its certificate: which slices of its aggregate are missing."""

    step_id: str
    value: str  # hex digest
    slices: tuple[int, ...]


@dataclass(frozen=True)
class AggregateSent:
    """The slices that were asked for."""

    value: str  # hex digest
    slices: Mapping[int, Encoded] = field(repr=False)


Message: TypeAlias = (
    IntentSaid
    | NewViewSaid
    | ProposalSaid
    | ContributionSent
    | StatementSaid
    | ResultSaid
    | VoteSaid
    | CertificateSaid
    | AggregateWanted
    | AggregateSent
)


def round_id_of(step: Step, view: int, intents: Sequence[Signed[Intent]]) -> str:
    """Hex id of a round: what its members have agreed on before anything is exchanged, without signatures."""
    parts = [
        f"{one.member.node_id} {one.member.wallet_id} {one.body.commitment} {one.body.sequences} {one.body.upload}"
        for one in sorted(intents, key=lambda one: one.member.node_id)
    ]
    return hash_parts("neuroshard/certified-round", step.id, view, *parts).hex()


def members_of(intents: Collection[Signed[Intent]]) -> tuple[Member, ...]:
    """Contributors of a round, in the order of their rows."""
    return tuple(sorted(one.member for one in intents))


def author_of(message: Message) -> NodeId | None:
    """Who signed a message and so has to send it itself; None: anybody may hand it on."""
    match message:
        case ContributionSent() | CertificateSaid() | AggregateWanted() | AggregateSent():
            return None
        case _:
            return message.signed.member.node_id
