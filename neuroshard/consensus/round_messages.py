"""Messages of a round: the signed bodies with their bounds, and the slices they carry. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Annotated, ClassVar, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from neuroshard.consensus.roster import MAX_SLICES, Encoded, GroupMember, NamedNode, Roster, Step
from neuroshard.identity import hash_parts
from neuroshard.types import PRINTABLE, HexDigest, NodeId

MAX_MEMBERS = 64  # per round; if there are more replicas, they take turns
MAX_CALLED = MAX_MEMBERS * 5 // 4  # candidates for these places
LARGEST = 10**15
MAX_VIEW = 10_000
View = Annotated[int, Meta(ge=0, le=MAX_VIEW)]
_Number = Annotated[int, Meta(ge=0, le=LARGEST)]
_Reason = Annotated[str, Meta(max_length=200, pattern=PRINTABLE)]


class Phase(StrEnum):
    """The two votes of a round."""

    PREPARE = "prepare"  # the voter has the whole aggregate and considers this value correct
    COMMIT = "commit"  # the voter knows that a quorum has prepared this value, and has stored that


class Intent(Struct, frozen=True, forbid_unknown_fields=True):
    """A promise to send exactly this contribution in rounds of this step, from this view on."""

    kind: ClassVar[str] = "round/intent"
    step_id: HexDigest
    view: View
    commitment: HexDigest  # see `commitment_of`
    sequences: _Number  # trained since the last round
    upload: _Number  # bytes per second, for the share of reducing
    # milliseconds since the epoch by the author's clock: of two intents for one view the later one counts
    made_at: _Number


class NewView(Struct, frozen=True, forbid_unknown_fields=True):
    """The author has given up the views before this one; `missing` lists the members whose data did not arrive."""

    kind: ClassVar[str] = "round/new-view"
    step_id: HexDigest
    view: Annotated[int, Meta(ge=1, le=MAX_VIEW)]
    missing: Annotated[tuple[NamedNode, ...], Meta(max_length=MAX_MEMBERS)]


class RoundProposal(Struct, frozen=True, forbid_unknown_fields=True):
    """The members of this view's round, by their attached intents; or a prepared value to vote on again."""

    kind: ClassVar[str] = "round/proposal"
    step_id: HexDigest
    view: View
    round_id: HexDigest  # see `round_id_of`
    value: HexDigest | None  # digest of the prepared value, None for a new round


class DigestsOfSlices(Struct, frozen=True, forbid_unknown_fields=True):
    """Digests of some slices of a round."""

    round_id: HexDigest
    # slice number and digest
    digests: Annotated[
        tuple[tuple[Annotated[int, Meta(ge=0, lt=MAX_SLICES)], HexDigest], ...], Meta(max_length=MAX_SLICES)
    ]

    def has_each_slice_once(self) -> bool:
        """Whether no slice has two digests."""
        return len({index for index, _ in self.digests}) == len(self.digests)


class StatisticsDigests(DigestsOfSlices, frozen=True, forbid_unknown_fields=True):
    """The author has all members' parts of these slices; these are the digests of its statistics of them."""

    kind: ClassVar[str] = "round/statement"


class ResultDigests(DigestsOfSlices, frozen=True, forbid_unknown_fields=True):
    """Digests of the slices of the aggregate that the author has computed."""

    kind: ClassVar[str] = "round/result"


class Vote(Struct, frozen=True, forbid_unknown_fields=True):
    """A vote on a value, in one of the two phases of a view."""

    kind: ClassVar[str] = "round/vote"
    step_id: HexDigest
    view: View
    phase: Phase
    value: HexDigest


Body: TypeAlias = Intent | NewView | RoundProposal | StatisticsDigests | ResultDigests | Vote


class Value(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The subject of a vote: one aggregate, its contributors, and the state that it leads to."""

    step_id: HexDigest
    root: HexDigest  # of the state from which the members started
    round_id: HexDigest
    aggregate: Annotated[tuple[HexDigest, ...], Meta(max_length=MAX_SLICES)]  # digests of the encoded slices
    # the contributors, who are the voters of the next step
    members: Annotated[tuple[GroupMember, ...], Meta(max_length=MAX_MEMBERS)]
    accepted: Annotated[tuple[NamedNode, ...], Meta(max_length=MAX_MEMBERS)]
    refused: Annotated[tuple[tuple[NamedNode, _Reason], ...], Meta(max_length=MAX_MEMBERS)]
    next_root: HexDigest
    sequences: _Number  # trained per member since the step before: the median of the accepted members' claims

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of all fields."""
        return hash_parts("neuroshard/value", msgspec.msgpack.encode(self)).hex()

    def next_roster(self) -> Roster:
        """The voters of the step after this one."""
        return Roster(self.members)


def commitment_of(slice_digests: tuple[bytes, ...]) -> str:
    """Hex hash of the digests of all encoded slices. With it, any slice can be checked that comes with the list."""
    return hash_parts("neuroshard/contribution", *slice_digests).hex()


AnyBody_co = TypeVar("AnyBody_co", bound=Body, covariant=True)


@dataclass(frozen=True)
class VerifiedBody(Generic[AnyBody_co]):
    """A body whose signature was verified, with the claim that proves it to others."""

    member: GroupMember
    body: AnyBody_co
    claim: bytes = field(repr=False, compare=False)


@dataclass(frozen=True)
class Quorum:
    """Votes of one phase and view on one value.

    PREPARE votes form a lock, COMMIT votes the certificate that ends the step.
    """

    value: Value
    view: int
    phase: Phase
    votes: tuple[VerifiedBody[Vote], ...]

    def is_valid_for(self, step: Step) -> bool:
        """Whether enough voters of the step signed exactly this."""
        said = {
            vote.member.node_id
            for vote in self.votes
            if vote.body == Vote(step.id, self.view, self.phase, self.value.digest)
            and vote.member in step.roster.members
        }
        return self.value.step_id == step.id and len(said) >= step.quorum


@dataclass(frozen=True)
class IntentSaid:
    """An intent, sent to all participants."""

    signed: VerifiedBody[Intent]


@dataclass(frozen=True)
class NewViewSaid:
    """A new view with its author's lock, sent to all participants."""

    signed: VerifiedBody[NewView]
    lock: Quorum | None = None


@dataclass(frozen=True)
class ProposalSaid:
    """The proposer's proposal, sent to all participants."""

    signed: VerifiedBody[RoundProposal]
    intents: tuple[VerifiedBody[Intent], ...]
    lock: Quorum | None = None


@dataclass(frozen=True)
class ContributionSent:
    """Some slices for a reducer, and the digests of all slices; the author's intent contains their hash.

    A reducer forwards the parts of other members when a third one has to repeat its slice.
    """

    round_id: str
    author: NodeId
    digests: tuple[bytes, ...]
    slices: Mapping[int, Encoded] = field(repr=False)


@dataclass(frozen=True)
class StatementSaid:
    """A reducer's statistics with their signed digests, sent to all participants."""

    signed: VerifiedBody[StatisticsDigests]
    statistics: Mapping[int, Encoded] = field(repr=False)


@dataclass(frozen=True)
class ResultSaid:
    """A reducer's signed result digests with the results that it has to send, sent to all participants."""

    signed: VerifiedBody[ResultDigests]
    slices: Mapping[int, Encoded] = field(repr=False)


@dataclass(frozen=True)
class VoteSaid:
    """A vote, sent to all participants."""

    signed: VerifiedBody[Vote]


@dataclass(frozen=True)
class CertificateSaid:
    """A certificate that shows the end of the step. Any node may send it to any other."""

    certificate: Quorum


@dataclass(frozen=True)
class AggregateWanted:
    """A request for missing slices of an aggregate, sent to a voter for the value or a holder of its certificate."""

    step_id: str
    value: str  # hex digest
    slices: tuple[int, ...]


@dataclass(frozen=True)
class AggregateSent:
    """The requested slices of an aggregate."""

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


def round_id_of(step: Step, view: int, intents: Sequence[VerifiedBody[Intent]]) -> str:
    """Hex id of a round: the agreement of its members before any exchange, without signatures."""
    parts = [
        f"{one.member.node_id} {one.member.wallet_id} {one.body.commitment} {one.body.sequences} {one.body.upload}"
        for one in sorted(intents, key=lambda one: one.member.node_id)
    ]
    return hash_parts("neuroshard/certified-round", step.id, view, *parts).hex()


def members_of(intents: Collection[VerifiedBody[Intent]]) -> tuple[GroupMember, ...]:
    """Contributors of a round, in row order."""
    return tuple(sorted(one.member for one in intents))


def author_of(message: Message) -> NodeId | None:
    """The author of a message, who must send it itself; None if any node may forward it."""
    match message:
        case ContributionSent() | CertificateSaid() | AggregateWanted() | AggregateSent():
            return None
        case _:
            return message.signed.member.node_id
