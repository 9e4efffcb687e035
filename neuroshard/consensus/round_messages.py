"""Messages of a round: the signed bodies, strict parsing of them, and the slices they carry. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import ClassVar, Generic, TypeAlias, TypeVar

from neuroshard.consensus.roster import MAX_SLICES, Encoded, GroupMember, Roster, Step
from neuroshard.identity import canonical_json, hash_parts
from neuroshard.identity.strict_json import exact_object, hash_field, line_field, list_field, whole_field
from neuroshard.types import JsonValue, NodeId, WalletId

MAX_MEMBERS = 64  # per round; if there are more replicas, they take turns
MAX_CALLED = MAX_MEMBERS * 5 // 4  # candidates for these places
MAX_NODE_ID_CHARACTERS = 64
LARGEST = 10**15
MAX_VIEW = 10_000


class Phase(StrEnum):
    """The two votes of a round."""

    PREPARE = "prepare"  # the voter has the whole aggregate and considers this value correct
    COMMIT = "commit"  # the voter knows that a quorum has prepared this value, and has stored that


@dataclass(frozen=True)
class Intent:
    """A promise to send exactly this contribution in rounds of this step, from this view on."""

    kind: ClassVar[str] = "round/intent"
    step_id: str
    view: int
    commitment: str  # hex; see `commitment_of`
    sequences: int  # trained since the last round
    upload: int  # bytes per second, for the share of reducing
    made_at: int  # milliseconds since the epoch by the author's clock: of two intents for one view the later one counts

    def to_json(self) -> JsonValue:
        """The JSON form."""
        return {
            "step": self.step_id,
            "view": self.view,
            "commitment": self.commitment,
            "sequences": self.sequences,
            "upload": self.upload,
            "made_at": self.made_at,
        }

    @classmethod
    def from_json(cls, value: JsonValue) -> Intent:
        """Parse the JSON form. Raises ValueError that names the faulty field."""
        fields = exact_object(value, {"step", "view", "commitment", "sequences", "upload", "made_at"}, "an intent")
        return cls(
            hash_field(fields["step"], "step"),
            whole_field(fields["view"], 0, MAX_VIEW, "view"),
            hash_field(fields["commitment"], "commitment"),
            whole_field(fields["sequences"], 0, LARGEST, "sequences"),
            whole_field(fields["upload"], 0, LARGEST, "upload"),
            whole_field(fields["made_at"], 0, LARGEST, "made_at"),
        )


@dataclass(frozen=True)
class NewView:
    """The author has given up the views before this one; `missing` lists the members whose data did not arrive."""

    kind: ClassVar[str] = "round/new-view"
    step_id: str
    view: int
    missing: tuple[NodeId, ...]

    def to_json(self) -> JsonValue:
        """The JSON form."""
        return {"step": self.step_id, "view": self.view, "missing": list(self.missing)}

    @classmethod
    def from_json(cls, value: JsonValue) -> NewView:
        """Parse the JSON form. Raises ValueError that names the faulty field."""
        fields = exact_object(value, {"step", "view", "missing"}, "a new view")
        return cls(
            hash_field(fields["step"], "step"),
            whole_field(fields["view"], 1, MAX_VIEW, "view"),
            tuple(_node(one) for one in list_field(fields["missing"], MAX_MEMBERS, "missing")),
        )


@dataclass(frozen=True)
class RoundProposal:
    """The members of this view's round, by their attached intents; or a prepared value to vote on again."""

    kind: ClassVar[str] = "round/proposal"
    step_id: str
    view: int
    round_id: str  # hex; see `round_id_of`
    value: str | None  # hex digest of the prepared value, None for a new round

    def to_json(self) -> JsonValue:
        """The JSON form."""
        return {"step": self.step_id, "view": self.view, "round": self.round_id, "value": self.value}

    @classmethod
    def from_json(cls, value: JsonValue) -> RoundProposal:
        """Parse the JSON form. Raises ValueError that names the faulty field."""
        fields = exact_object(value, {"step", "view", "round", "value"}, "a proposal")
        again = fields["value"]
        return cls(
            hash_field(fields["step"], "step"),
            whole_field(fields["view"], 0, MAX_VIEW, "view"),
            hash_field(fields["round"], "round"),
            None if again is None else hash_field(again, "value"),
        )


@dataclass(frozen=True)
class _OfSlices:
    """Digests of some slices of a round."""

    round_id: str
    digests: tuple[tuple[int, str], ...]  # slice number and hex digest

    def to_json(self) -> JsonValue:
        """The JSON form."""
        return {"round": self.round_id, "slices": [[index, digest] for index, digest in self.digests]}


@dataclass(frozen=True)
class StatisticsDigests(_OfSlices):
    """The author has all members' parts of these slices; these are the digests of its statistics of them."""

    kind: ClassVar[str] = "round/statement"

    @classmethod
    def from_json(cls, value: JsonValue) -> StatisticsDigests:
        """Parse the JSON form. Raises ValueError that names the faulty field."""
        return cls(*_of_slices(value))


@dataclass(frozen=True)
class ResultDigests(_OfSlices):
    """Digests of the slices of the aggregate that the author has computed."""

    kind: ClassVar[str] = "round/result"

    @classmethod
    def from_json(cls, value: JsonValue) -> ResultDigests:
        """Parse the JSON form. Raises ValueError that names the faulty field."""
        return cls(*_of_slices(value))


@dataclass(frozen=True)
class Vote:
    """A vote on a value, in one of the two phases of a view."""

    kind: ClassVar[str] = "round/vote"
    step_id: str
    view: int
    phase: Phase
    value: str  # hex digest

    def to_json(self) -> JsonValue:
        """The JSON form."""
        return {"step": self.step_id, "view": self.view, "phase": self.phase.value, "value": self.value}

    @classmethod
    def from_json(cls, value: JsonValue) -> Vote:
        """Parse the JSON form. Raises ValueError that names the faulty field."""
        fields = exact_object(value, {"step", "view", "phase", "value"}, "a vote")
        return cls(
            hash_field(fields["step"], "step"),
            whole_field(fields["view"], 0, MAX_VIEW, "view"),
            Phase(line_field(fields["phase"], 16, "phase")),
            hash_field(fields["value"], "value"),
        )


Body: TypeAlias = Intent | NewView | RoundProposal | StatisticsDigests | ResultDigests | Vote


@dataclass(frozen=True)
class Value:
    """The subject of a vote: one aggregate, its contributors, and the state that it leads to."""

    step_id: str
    root: str  # hex, of the state from which the members started
    round_id: str
    aggregate: tuple[str, ...]  # hex digests of the encoded slices
    members: tuple[GroupMember, ...]  # the contributors, who are the voters of the next step
    accepted: tuple[NodeId, ...]
    refused: tuple[tuple[NodeId, str], ...]  # with the reasons
    next_root: str  # hex
    sequences: int  # trained per member since the step before: the median of the accepted members' claims

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of all fields."""
        return hash_parts("neuroshard/value", canonical_json(self.to_json())).hex()

    def next_roster(self) -> Roster:
        """The voters of the step after this one."""
        return Roster(self.members)

    def to_json(self) -> JsonValue:
        """The JSON form."""
        return {
            "step": self.step_id,
            "root": self.root,
            "round": self.round_id,
            "aggregate": list(self.aggregate),
            "members": [[member.node_id, member.wallet_id] for member in self.members],
            "accepted": list(self.accepted),
            "refused": [[node, reason] for node, reason in self.refused],
            "next_root": self.next_root,
            "sequences": self.sequences,
        }

    @classmethod
    def from_json(cls, value: JsonValue) -> Value:
        """Parse the JSON form. Raises ValueError that names the faulty field."""
        names = {"step", "root", "round", "aggregate", "members", "accepted", "refused", "next_root", "sequences"}
        fields = exact_object(value, names, "a value")
        refused = [list_field(one, 2, "refused") for one in list_field(fields["refused"], MAX_MEMBERS, "refused")]
        members = [list_field(one, 2, "members") for one in list_field(fields["members"], MAX_MEMBERS, "members")]
        if not members or any(len(pair) != 2 for pair in (*refused, *members)):
            raise ValueError("members and refused must be pairs, and there are members")
        return cls(
            step_id=hash_field(fields["step"], "step"),
            root=hash_field(fields["root"], "root"),
            round_id=hash_field(fields["round"], "round"),
            aggregate=tuple(
                hash_field(one, "aggregate") for one in list_field(fields["aggregate"], MAX_SLICES, "aggregate")
            ),
            members=Roster(tuple(GroupMember(_node(node), _wallet(wallet)) for node, wallet in members)).members,
            accepted=tuple(_node(one) for one in list_field(fields["accepted"], MAX_MEMBERS, "accepted")),
            refused=tuple((_node(node), line_field(reason, 200, "refused")) for node, reason in refused),
            next_root=hash_field(fields["next_root"], "next_root"),
            sequences=whole_field(fields["sequences"], 0, LARGEST, "sequences"),
        )


def commitment_of(slice_digests: tuple[bytes, ...]) -> str:
    """Hex hash of the digests of all encoded slices. With it, any slice can be checked that comes with the list."""
    return hash_parts("neuroshard/contribution", *slice_digests).hex()


def _of_slices(value: JsonValue) -> tuple[str, tuple[tuple[int, str], ...]]:
    fields = exact_object(value, {"round", "slices"}, "digests of slices")
    pairs = [list_field(one, 2, "slices") for one in list_field(fields["slices"], MAX_SLICES, "slices")]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("slices must be pairs of number and digest")
    digests = tuple((whole_field(index, 0, MAX_SLICES - 1, "slice"), hash_field(one, "digest")) for index, one in pairs)
    if len({index for index, _ in digests}) != len(digests):
        raise ValueError("a slice is named twice")
    return hash_field(fields["round"], "round"), digests


def _node(value: JsonValue) -> NodeId:
    return NodeId(line_field(value, MAX_NODE_ID_CHARACTERS, "node"))


def _wallet(value: JsonValue) -> WalletId:
    return WalletId(line_field(value, 16, "wallet"))


AnyBody_co = TypeVar("AnyBody_co", bound=Body, covariant=True)


@dataclass(frozen=True)
class Signed(Generic[AnyBody_co]):
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
    votes: tuple[Signed[Vote], ...]

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

    signed: Signed[Intent]


@dataclass(frozen=True)
class NewViewSaid:
    """A new view with its author's lock, sent to all participants."""

    signed: Signed[NewView]
    lock: Quorum | None = None


@dataclass(frozen=True)
class ProposalSaid:
    """The proposer's proposal, sent to all participants."""

    signed: Signed[RoundProposal]
    intents: tuple[Signed[Intent], ...]
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

    signed: Signed[StatisticsDigests]
    statistics: Mapping[int, Encoded] = field(repr=False)


@dataclass(frozen=True)
class ResultSaid:
    """A reducer's signed result digests with the results that it has to send, sent to all participants."""

    signed: Signed[ResultDigests]
    slices: Mapping[int, Encoded] = field(repr=False)


@dataclass(frozen=True)
class VoteSaid:
    """A vote, sent to all participants."""

    signed: Signed[Vote]


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


def round_id_of(step: Step, view: int, intents: Sequence[Signed[Intent]]) -> str:
    """Hex id of a round: the agreement of its members before any exchange, without signatures."""
    parts = [
        f"{one.member.node_id} {one.member.wallet_id} {one.body.commitment} {one.body.sequences} {one.body.upload}"
        for one in sorted(intents, key=lambda one: one.member.node_id)
    ]
    return hash_parts("neuroshard/certified-round", step.id, view, *parts).hex()


def members_of(intents: Collection[Signed[Intent]]) -> tuple[GroupMember, ...]:
    """Contributors of a round, in row order."""
    return tuple(sorted(one.member for one in intents))


def author_of(message: Message) -> NodeId | None:
    """The author of a message, who must send it itself; None if any node may forward it."""
    match message:
        case ContributionSent() | CertificateSaid() | AggregateWanted() | AggregateSent():
            return None
        case _:
            return message.signed.member.node_id
