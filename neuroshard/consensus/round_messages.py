"""Messages of a round: the bodies that members sign, strict reading of them, and the slices they carry. Pure."""

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

MAX_MEMBERS = 64  # of a round; more replicas than that take turns
MAX_CALLED = MAX_MEMBERS * 5 // 4  # of whom those are drawn
MAX_NODE_ID_CHARACTERS = 64
LARGEST = 10**15
MAX_VIEW = 10_000


class Phase(StrEnum):
    """The two votes of a round."""

    PREPARE = "prepare"  # I hold the whole aggregate and find this value right
    COMMIT = "commit"  # I know that a quorum has prepared this value, and have written that down


@dataclass(frozen=True)
class Intent:
    """I will send exactly this contribution in rounds of this step, from this view on."""

    kind: ClassVar[str] = "round/intent"
    step_id: str
    view: int
    commitment: str  # hex; see `commitment_of`
    sequences: int  # trained on since the last round
    upload: int  # bytes a second, for the share of reducing
    made_at: int  # milliseconds since 1970 by its author's clock: of two for one view the later one counts

    def to_json(self) -> JsonValue:
        """What `from_json` reads."""
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
        """Raises ValueError that names what is wrong."""
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
    """I have given up on the views before this one; of these members something did not come."""

    kind: ClassVar[str] = "round/new-view"
    step_id: str
    view: int
    missing: tuple[NodeId, ...]

    def to_json(self) -> JsonValue:
        """What `from_json` reads."""
        return {"step": self.step_id, "view": self.view, "missing": list(self.missing)}

    @classmethod
    def from_json(cls, value: JsonValue) -> NewView:
        """Raises ValueError that names what is wrong."""
        fields = exact_object(value, {"step", "view", "missing"}, "a new view")
        return cls(
            hash_field(fields["step"], "step"),
            whole_field(fields["view"], 1, MAX_VIEW, "view"),
            tuple(_node(one) for one in list_field(fields["missing"], MAX_MEMBERS, "missing")),
        )


@dataclass(frozen=True)
class RoundProposal:
    """The round of this view has the members whose intents come with it, or votes again on a prepared value."""

    kind: ClassVar[str] = "round/proposal"
    step_id: str
    view: int
    round_id: str  # hex; see `round_id_of`
    value: str | None  # hex digest of the prepared value that is voted on again

    def to_json(self) -> JsonValue:
        """What `from_json` reads."""
        return {"step": self.step_id, "view": self.view, "round": self.round_id, "value": self.value}

    @classmethod
    def from_json(cls, value: JsonValue) -> RoundProposal:
        """Raises ValueError that names what is wrong."""
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
    """Digests of something about some slices of a round."""

    round_id: str
    digests: tuple[tuple[int, str], ...]  # by slice, hex

    def to_json(self) -> JsonValue:
        """What `from_json` reads."""
        return {"round": self.round_id, "slices": [[index, digest] for index, digest in self.digests]}


@dataclass(frozen=True)
class StatisticsDigests(_OfSlices):
    """Of these slices I have everybody's part, and these are the digests of the statistics that I made of them."""

    kind: ClassVar[str] = "round/statement"

    @classmethod
    def from_json(cls, value: JsonValue) -> StatisticsDigests:
        """Raises ValueError that names what is wrong."""
        return cls(*_of_slices(value))


@dataclass(frozen=True)
class ResultDigests(_OfSlices):
    """These are the digests of the slices of the aggregate that I have made."""

    kind: ClassVar[str] = "round/result"

    @classmethod
    def from_json(cls, value: JsonValue) -> ResultDigests:
        """Raises ValueError that names what is wrong."""
        return cls(*_of_slices(value))


@dataclass(frozen=True)
class Vote:
    """My vote on a value, in one of the two phases of a view."""

    kind: ClassVar[str] = "round/vote"
    step_id: str
    view: int
    phase: Phase
    value: str  # hex digest

    def to_json(self) -> JsonValue:
        """What `from_json` reads."""
        return {"step": self.step_id, "view": self.view, "phase": self.phase.value, "value": self.value}

    @classmethod
    def from_json(cls, value: JsonValue) -> Vote:
        """Raises ValueError that names what is wrong."""
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
    """What is voted on: one aggregate, who made it, and the state that it leads to."""

    step_id: str
    root: str  # hex, of the state that the members started from
    round_id: str
    aggregate: tuple[str, ...]  # hex digests of the encoded slices
    members: tuple[GroupMember, ...]  # who contributed: the voters of the next step
    accepted: tuple[NodeId, ...]
    refused: tuple[tuple[NodeId, str], ...]  # and why
    next_root: str  # hex
    sequences: int  # that a member has trained on since the step before: the median of the accepted ones' words

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of all fields."""
        return hash_parts("neuroshard/value", canonical_json(self.to_json())).hex()

    def next_roster(self) -> Roster:
        """The voters of the step after this one."""
        return Roster(self.members)

    def to_json(self) -> JsonValue:
        """What `from_json` reads."""
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
        """Raises ValueError that names what is wrong."""
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
    """Hex hash of the digests of all encoded slices: whoever has it can check any slice that comes with the list."""
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
    """A body whose signature was checked, with the claim that proves it to others."""

    member: GroupMember
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

    signed: Signed[RoundProposal]
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

    signed: Signed[StatisticsDigests]
    statistics: Mapping[int, Encoded] = field(repr=False)


@dataclass(frozen=True)
class ResultSaid:
    """To everybody; with those of the slices that its author is to send."""

    signed: Signed[ResultDigests]
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


def members_of(intents: Collection[Signed[Intent]]) -> tuple[GroupMember, ...]:
    """Contributors of a round, in the order of their rows."""
    return tuple(sorted(one.member for one in intents))


def author_of(message: Message) -> NodeId | None:
    """Who signed a message and so has to send it itself; None: anybody may hand it on."""
    match message:
        case ContributionSent() | CertificateSaid() | AggregateWanted() | AggregateSent():
            return None
        case _:
            return message.signed.member.node_id
