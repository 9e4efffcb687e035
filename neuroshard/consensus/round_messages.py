"""Messages of a round: the signed bodies, the messages with the slices they carry, and both as bytes. Pure.

Each is one declaration whose annotations are its bounds. A message is one msgpack document with exactly one encoding:
other bytes for the same content are refused. Reading a message verifies every signature in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from statistics import median_low
from typing import TYPE_CHECKING, Annotated, ClassVar, Generic, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from neuroshard.consensus.committee import (
    LARGEST,
    MAX_ENTRIES,
    MAX_SEATS,
    MAX_VERSION_BYTES,
    Committee,
    Entry,
    GroupMember,
    Height,
    NamedNode,
    read_change,
)
from neuroshard.consensus.foundation import HeirNaming, SignedFoundation
from neuroshard.consensus.slices import AUDITED_BLOCKS, DIGEST_BYTES, MAX_SLICES, Encoded
from neuroshard.decoders import msgpack_decoder
from neuroshard.errors import DataError
from neuroshard.identity import NodeIdentity, hash_parts, read_claim, sign_claim, verify_claim
from neuroshard.optim.outer import LONGEST_CODE, MOST_CANDIDATES, CertifiedWork
from neuroshard.types import PRINTABLE, HexDigest, NamedWallet

MAX_MEMBERS = 64  # per round; if there are more replicas, they take turns
MAX_CALLED = MAX_MEMBERS * 5 // 4  # candidates for these places
MAX_VIEW = 10_000
NO_DIGEST = "0" * 64
MAX_ROUND_CLAIM_BYTES = 16 * 1024  # three times the longest body: many claims are kept
OTHER_BYTES = 2 << 20  # per message, apart from slices of contributions and aggregates: claims, statistics
MAX_AUDIT_BYTES = 64 << 10  # AUDITED_BLOCKS blocks in fp32; 17 KiB in int8
View = Annotated[int, Meta(ge=0, le=MAX_VIEW)]
_Number = Annotated[int, Meta(ge=0, le=LARGEST)]
SliceIndex = Annotated[int, Meta(ge=0, lt=MAX_SLICES)]
ChoiceIndex = Annotated[int, Meta(ge=0, lt=MOST_CANDIDATES)]  # see `candidates_at`
DurationCode = Annotated[int, Meta(ge=0, le=LONGEST_CODE)]  # see `duration_code`
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
    seconds: _Number  # since the author adopted the last value with an aggregate
    # milliseconds since the epoch by the author's clock: of two intents for one view the later one counts
    made_at: _Number
    exchange: DurationCode | None = None  # of the author's last round
    sequence: DurationCode | None = None  # training of one sequence


class NewView(Struct, frozen=True, forbid_unknown_fields=True):
    """The author has given up the views before this one; `missing` lists the members whose data did not arrive."""

    kind: ClassVar[str] = "round/new-view"
    step_id: HexDigest
    view: Annotated[int, Meta(ge=1, le=MAX_VIEW)]
    missing: Annotated[tuple[NamedNode, ...], Meta(max_length=MAX_MEMBERS)]


class Departure(Struct, frozen=True, forbid_unknown_fields=True):
    """A seat leaves the committee, at this height only: the step names the value before it."""

    kind: ClassVar[str] = "round/departure"
    step_id: HexDigest


class Silence(Struct, frozen=True, forbid_unknown_fields=True):
    """The author agrees to remove a seat at this height: it has been silent for long, or the owner removed it."""

    kind: ClassVar[str] = "round/silence"
    step_id: HexDigest
    wallet_id: NamedWallet


class ReducerFaults(Struct, frozen=True, forbid_unknown_fields=True):
    """The author, a seat, got no results of some reducers in the round before this step, or false ones."""

    kind: ClassVar[str] = "round/reducer-faults"
    step_id: HexDigest
    silent: Annotated[tuple[NamedNode, ...], Meta(max_length=MAX_MEMBERS)] = ()
    wrong: Annotated[tuple[NamedNode, ...], Meta(max_length=MAX_MEMBERS)] = ()


class VotingKey(Struct, frozen=True, forbid_unknown_fields=True):
    """The author votes for its wallet's seat from the next height on: with another key or after the loss of its log."""

    kind: ClassVar[str] = "round/voting-key"
    step_id: HexDigest


class RoundProposal(Struct, frozen=True, forbid_unknown_fields=True):
    """The members of this view's round, by their attached intents; or a prepared value to vote on again."""

    kind: ClassVar[str] = "round/proposal"
    step_id: HexDigest
    view: View
    round_id: HexDigest  # see `round_id_of`
    value: HexDigest | None  # digest of the prepared value, None for a new round
    entries: Annotated[tuple[Entry, ...], Meta(max_length=MAX_ENTRIES)] = ()  # changes of the committee


class DigestsOfSlices(Struct, frozen=True, forbid_unknown_fields=True):
    """Digests of some slices of a round."""

    round_id: HexDigest
    # slice number and digest
    digests: Annotated[tuple[tuple[SliceIndex, HexDigest], ...], Meta(max_length=MAX_SLICES)]


class StatisticsDigests(DigestsOfSlices, frozen=True, forbid_unknown_fields=True):
    """The author has all members' parts of these slices; these are the digests of its statistics of them."""

    kind: ClassVar[str] = "round/statement"


class ResultDigests(DigestsOfSlices, frozen=True, forbid_unknown_fields=True):
    """Digests of the slices of the aggregate that the author has computed."""

    kind: ClassVar[str] = "round/result"
    basis: HexDigest  # digest of the statistics of all slices, from which the author's verdict follows


class OuterChoice(Struct, frozen=True, forbid_unknown_fields=True):
    """The author, a seat, has measured the candidates for the outer step on the aggregate of this round."""

    kind: ClassVar[str] = "round/choice"
    round_id: HexDigest
    choice: ChoiceIndex


class Vote(Struct, frozen=True, forbid_unknown_fields=True):
    """A vote on a value, in one of the two phases of a view."""

    kind: ClassVar[str] = "round/vote"
    step_id: HexDigest
    view: View
    phase: Phase
    value: HexDigest


Body: TypeAlias = (
    Intent
    | NewView
    | RoundProposal
    | StatisticsDigests
    | ResultDigests
    | OuterChoice
    | Vote
    | Departure
    | Silence
    | ReducerFaults
    | VotingKey
    | HeirNaming
)


class Value(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The subject of a vote: one height of the chain. An aggregate with its contributors, or only entries."""

    step_id: HexDigest
    statement: HexDigest  # the foundation of the epoch
    height: Height
    parent: HexDigest  # the value before this one
    committee: HexDigest  # digest of the committee that votes on it
    outer_step: Height  # completed outer steps after this value
    root: HexDigest  # of the state from which the members started
    next_root: HexDigest  # of the state to which the value leads
    round_id: HexDigest | None = None  # None without an aggregate
    # digests of the encoded slices; none for a value without an aggregate and for the step of a lone member
    aggregate: Annotated[tuple[HexDigest, ...], Meta(max_length=MAX_SLICES)] = ()
    members: Annotated[tuple[GroupMember, ...], Meta(max_length=MAX_MEMBERS)] = ()  # contributors, in row order
    accepted: Annotated[tuple[NamedNode, ...], Meta(max_length=MAX_MEMBERS)] = ()
    refused: Annotated[tuple[tuple[NamedNode, _Reason], ...], Meta(max_length=MAX_MEMBERS)] = ()
    uploads: Annotated[tuple[tuple[NamedNode, _Number], ...], Meta(max_length=MAX_MEMBERS)] = ()  # bytes per second
    # lower medians of the accepted members' claims
    sequences: _Number = 0  # trained per member since the step before
    exchange: DurationCode | None = None
    sequence: DurationCode | None = None
    seconds: _Number = 0  # since the last value with an aggregate: the lower median of the contributing seats' claims
    # of the outer step, by the seats of a quorum; none between two measurements
    choices: Annotated[tuple[tuple[NamedNode, ChoiceIndex], ...], Meta(max_length=MAX_SEATS)] = ()
    entries: Annotated[tuple[Entry, ...], Meta(max_length=MAX_ENTRIES)] = ()
    next_committee: Committee | None = None  # None: the committee does not change
    ledger: HexDigest = NO_DIGEST  # digest of the ledger after this value

    def __post_init__(self) -> None:
        nodes = set(map(attrgetter("node_id"), self.members))
        if list(self.members) != sorted(self.members) or len(nodes) != len(self.members):
            raise ValueError("the members are not in order, or one appears twice")

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of all fields."""
        return hash_parts("neuroshard/value", msgspec.msgpack.encode(self)).hex()

    @property
    def is_lone(self) -> bool:
        """Whether a member made this outer step alone, so that no aggregate leads to the state after it."""
        return self.round_id is None and self.root != self.next_root

    @property
    def work(self) -> CertifiedWork:
        """The part of the value that advances the line's progress."""
        choice = median_low(choice for _, choice in self.choices) if self.choices else None
        return CertifiedWork(self.sequences, self.exchange, self.sequence, choice)


def commitment_of(slice_digests: tuple[bytes, ...]) -> str:
    """Hex hash of the digests of all encoded slices. With it, any slice can be checked that comes with the list."""
    return hash_parts("neuroshard/contribution", *slice_digests).hex()


AnyBody = TypeVar("AnyBody", bound=Body)
AnyBody_co = TypeVar("AnyBody_co", bound=Body, covariant=True)


class MalformedMessageError(DataError):
    """A message of a round that cannot be read, or whose signature is invalid."""


class VerifiedBody(Struct, Generic[AnyBody_co], frozen=True, array_like=True, dict=True, forbid_unknown_fields=True):
    """A signed body; only the claim travels. A message calls `verify` before it exists."""

    claim: Annotated[bytes, Meta(max_length=MAX_ROUND_CLAIM_BYTES)]

    @classmethod
    def of(cls, member: GroupMember, body: Body, claim: bytes) -> VerifiedBody[AnyBody_co]:
        """A claim that needs no verification: this node's own."""
        signed = cls(claim)
        vars(signed).update(member=member, body=body)
        return signed

    @property
    def member(self) -> GroupMember:
        """The author."""
        return vars(self)["member"]

    @property
    def body(self) -> AnyBody_co:
        """The statement."""
        return vars(self)["body"]

    def verify(self, form: type[Body]) -> None:
        """Read the body and verify signature and delegation, unless that was done. Raises MalformedMessageError.

        A vote stays valid however old it is, so the delegation must have been valid when the vote was signed.
        """
        known = vars(self).get("body")
        if known is None:
            try:
                claim = read_claim(self.claim, form, MAX_ROUND_CLAIM_BYTES)
                said = verify_claim(claim, form.kind, claim.issued_at)
            except (DataError, ValueError) as error:
                raise MalformedMessageError(f"A {form.kind} cannot be read: {error}") from None
            if not claim.is_canonical:
                raise MalformedMessageError(f"A {form.kind} cannot be read: its encoding is not the shortest.")
            body = said.payload
            if isinstance(body, DigestsOfSlices) and len(dict(body.digests)) < len(body.digests):
                raise MalformedMessageError(f"A {form.kind} cannot be read: it names a slice twice.")
            vars(self).update(member=GroupMember(said.node_id, said.wallet_id), body=body)
        elif not isinstance(known, form):
            raise MalformedMessageError(f"A {known.kind} is where a {form.kind} must be.")


def signed_by(identity: NodeIdentity, body: AnyBody, now: float) -> VerifiedBody[AnyBody]:
    """The body with this node's signature. `now` is in seconds since the epoch."""
    claim = sign_claim(identity, body.kind, body, now)
    return VerifiedBody[AnyBody].of(GroupMember(identity.node_id, identity.wallet_id), body, claim.encode())


def _verify(form: type[Body], signed: Sequence[VerifiedBody[Body]], field: str) -> None:
    """Verify the claims in a field of a message. Raises ValueError, which msgspec passes on."""
    for index, one in enumerate(signed):
        try:
            one.verify(form)
        except MalformedMessageError as error:
            raise ValueError(f"{error} - in claim {index} of `{field}`") from None


def _verify_word(word: SignedFoundation) -> None:
    """Raises ValueError, which msgspec passes on."""
    try:
        word.verify()
        word.foundation  # noqa: B018 - reads it now: nobody reads a statement that cannot be read
    except DataError as error:
        raise ValueError(f"A statement of the owner cannot be read: {error} - in `word`") from None


class Quorum(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Votes of one phase and view on one value.

    PREPARE votes form a lock, COMMIT votes the certificate that ends the step.
    """

    value: Value
    view: View
    phase: Phase
    votes: Annotated[tuple[VerifiedBody[Vote], ...], Meta(max_length=MAX_SEATS)]

    def __post_init__(self) -> None:
        _verify(Vote, self.votes, "votes")

    @cached_property
    def signers(self) -> frozenset[GroupMember]:
        """The members that signed exactly this."""
        vote = Vote(self.value.step_id, self.view, self.phase, self.value.digest)
        return frozenset(signed.member for signed in self.votes if signed.body == vote)

    def is_decided_by(self, committee: Committee) -> bool:
        """Whether enough seats signed this."""
        return self.value.committee == committee.digest and committee.is_quorum(self.signers)


if TYPE_CHECKING:
    Slices: TypeAlias = Mapping[int, Encoded]
else:  # a received slice is a view of its message, not a copy
    Slices = Annotated[Mapping[SliceIndex, memoryview], Meta(max_length=MAX_SLICES)]


class AuthoredMessage(Struct, Generic[AnyBody_co], frozen=True, forbid_unknown_fields=True):
    """A message with a claim of its author, who must send it itself, except a StatementSaid.

    Any node may forward other messages.
    """

    form: ClassVar[type[Body]]
    signed: VerifiedBody[AnyBody_co]

    def __post_init__(self) -> None:
        _verify(self.form, [self.signed], "signed")


class IntentSaid(AuthoredMessage[Intent], frozen=True, tag="intent", forbid_unknown_fields=True):
    """An intent, sent to all participants."""

    form = Intent


class NewViewSaid(AuthoredMessage[NewView], frozen=True, tag="new-view", forbid_unknown_fields=True):
    """A new view with its author's lock, sent to all participants."""

    form = NewView
    lock: Quorum | None = None


class EntryEvidence(Struct, frozen=True, forbid_unknown_fields=True):
    """The signed statements that make the entries of a proposal valid."""

    leave_requests: Annotated[tuple[VerifiedBody[Departure], ...], Meta(max_length=MAX_SEATS)] = ()
    silences: Annotated[tuple[VerifiedBody[Silence], ...], Meta(max_length=MAX_SEATS * MAX_SEATS)] = ()
    keys: Annotated[tuple[VerifiedBody[VotingKey], ...], Meta(max_length=MAX_SEATS)] = ()
    double_votes: Annotated[tuple[tuple[VerifiedBody[Vote], VerifiedBody[Vote]], ...], Meta(max_length=MAX_SEATS)] = ()
    word: SignedFoundation | None = None  # the owner's newest statement: the wallets of strangers that may get seats
    faults: Annotated[tuple[VerifiedBody[ReducerFaults], ...], Meta(max_length=MAX_SEATS)] = ()
    version: Annotated[bytes, Meta(max_length=MAX_VERSION_BYTES)] | None = None  # the next one of the run's parameters

    def __post_init__(self) -> None:
        _verify(Departure, self.leave_requests, "leave_requests")
        _verify(Silence, self.silences, "silences")
        _verify(VotingKey, self.keys, "keys")
        _verify(Vote, [vote for pair in self.double_votes for vote in pair], "double_votes")
        _verify(ReducerFaults, self.faults, "faults")
        if self.word is not None:
            _verify_word(self.word)
        if self.version is not None:
            read_change(self.version)


class ProposalSaid(AuthoredMessage[RoundProposal], frozen=True, tag="proposal", forbid_unknown_fields=True):
    """The proposer's proposal, sent to all participants."""

    form = RoundProposal
    intents: Annotated[tuple[VerifiedBody[Intent], ...], Meta(max_length=MAX_MEMBERS)]
    lock: Quorum | None = None
    evidence: EntryEvidence | None = None  # of the entries

    def __post_init__(self) -> None:
        super().__post_init__()
        _verify(Intent, self.intents, "intents")


class ContributionSent(Struct, frozen=True, tag="contribution", forbid_unknown_fields=True):
    """Some slices for a reducer, and the digests of all slices; the author's intent contains their hash.

    A reducer forwards the parts of other members to those that check its slice.
    """

    round_id: HexDigest
    author: NamedNode
    digests: Annotated[
        tuple[Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)], ...],
        Meta(max_length=MAX_SLICES),
    ]
    slices: Slices


class PartsWanted(Struct, frozen=True, tag="parts-wanted", forbid_unknown_fields=True):
    """A request for parts of one contribution, by a member that computes these slices. Answered with ContributionSent.

    Their author has them, and so have the reducers.
    """

    round_id: HexDigest
    author: NamedNode
    slices: Annotated[tuple[SliceIndex, ...], Meta(max_length=MAX_SLICES)]

    def __post_init__(self) -> None:
        _check_once(self.slices)


class BlocksWanted(Struct, frozen=True, tag="blocks-wanted", forbid_unknown_fields=True):
    """A request for some blocks of the receiver's contribution, by a seat among friends. Answered with BlocksSent."""

    round_id: HexDigest
    blocks: Annotated[tuple[tuple[SliceIndex, _Number], ...], Meta(max_length=AUDITED_BLOCKS)]


class BlocksSent(Struct, frozen=True, tag="blocks", forbid_unknown_fields=True):
    """The requested blocks, one after the other. Nothing proves them: if they contradict a result, parts decide."""

    round_id: HexDigest
    content: Annotated[bytes, Meta(max_length=MAX_AUDIT_BYTES)]


class StatementSaid(AuthoredMessage[StatisticsDigests], frozen=True, tag="statement", forbid_unknown_fields=True):
    """A reducer's statistics with their signed digests, sent to all participants. Others show the digests if needed."""

    form = StatisticsDigests
    statistics: Slices


class ResultSaid(AuthoredMessage[ResultDigests], frozen=True, tag="result", forbid_unknown_fields=True):
    """A reducer's signed result digests with the results that it has to send, sent to all participants."""

    form = ResultDigests
    slices: Slices


class ChoicesSaid(Struct, frozen=True, tag="choices", forbid_unknown_fields=True):
    """A seat's choice, sent to the proposer, or those of a quorum, sent by the proposer to all participants."""

    choices: Annotated[tuple[VerifiedBody[OuterChoice], ...], Meta(min_length=1, max_length=MAX_SEATS)]

    def __post_init__(self) -> None:
        _verify(OuterChoice, self.choices, "choices")
        if len({one.body.round_id for one in self.choices}) > 1 or len({one.member for one in self.choices}) < len(
            self.choices
        ):
            raise ValueError("the choices are of several rounds, or a seat chooses twice")

    @property
    def round_id(self) -> str:
        """The round of all choices."""
        return self.choices[0].body.round_id


class EvidenceSaid(Struct, frozen=True, tag="evidence", forbid_unknown_fields=True):
    """Evidence for entries, sent to the seats: the proposer of the next view puts the entries into its proposal."""

    evidence: EntryEvidence


class VoteSaid(AuthoredMessage[Vote], frozen=True, tag="vote", forbid_unknown_fields=True):
    """A vote, sent to all participants."""

    form = Vote


class CertificateSaid(Struct, frozen=True, tag="certificate", forbid_unknown_fields=True):
    """A certificate that shows the end of the step. Any node may send it to any other."""

    certificate: Quorum


class AggregateWanted(Struct, frozen=True, tag="aggregate-wanted", forbid_unknown_fields=True):
    """A request for missing slices of an aggregate, sent to a voter for the value or a holder of its certificate."""

    step_id: HexDigest
    value: HexDigest
    slices: Annotated[tuple[SliceIndex, ...], Meta(max_length=MAX_SLICES)]

    def __post_init__(self) -> None:
        _check_once(self.slices)


class AggregateSent(Struct, frozen=True, tag="aggregate", forbid_unknown_fields=True):
    """The requested slices of an aggregate."""

    value: HexDigest
    slices: Slices


Message: TypeAlias = (
    IntentSaid
    | NewViewSaid
    | ProposalSaid
    | ContributionSent
    | PartsWanted
    | BlocksWanted
    | BlocksSent
    | StatementSaid
    | ResultSaid
    | ChoicesSaid
    | VoteSaid
    | EvidenceSaid
    | CertificateSaid
    | AggregateWanted
    | AggregateSent
)


def most_message_bytes(slices_bytes: int) -> int:
    """Size limit of a message when all slices of a contribution have `slices_bytes`."""
    return slices_bytes + OTHER_BYTES


def encode_round_message(message: Message) -> Sequence[Encoded]:
    """The bytes of a message in pieces. Its slices, which are the last field, are views: they are not copied."""
    last = message.__struct_fields__[-1]
    slices = getattr(message, last)
    if not isinstance(slices, Mapping):
        return (msgspec.msgpack.encode(message),)
    carried = sorted(cast("Mapping[int, Encoded]", slices).items())
    head = msgspec.msgpack.encode(replace(message, **{last: {}}))[:-1]  # without the empty map
    pieces: list[Encoded] = [head + b"\xde" + len(carried).to_bytes(2)]  # a map, with the length in two bytes
    for index, data in carried:
        pieces += [bytes([index, 0xC6]) + len(data).to_bytes(4), data]  # bytes, with the length in four bytes
    return pieces


def read_round_message(pieces: Sequence[Encoded]) -> Message:
    """Read what `encode_round_message` wrote, and verify every signature. Raises MalformedMessageError.

    The slices keep all bytes of the message in memory.
    """
    data = memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces))
    try:
        message: Message = msgpack_decoder(Message).decode(data)
    except (ValueError, RecursionError) as error:
        raise MalformedMessageError(f"A message of a round cannot be read: {str(error)[:200]}") from None
    if not _is_encoded_as(message, data):
        raise MalformedMessageError("A message of a round cannot be read: it is not encoded as this program does.")
    return message


def _is_encoded_as(message: Message, data: memoryview) -> bool:
    """Whether `encode_round_message` writes exactly these bytes, which the message was read from."""
    start = 0
    for piece in encode_round_message(message):
        # a slice is a view of `data`: it is at its place if everything before it is
        if isinstance(piece, bytes) and bytes(data[start : start + len(piece)]) != piece:
            return False
        start += len(piece)
    return start == len(data)


def _check_once(indices: Sequence[int]) -> None:
    if len(set(indices)) != len(indices):
        raise ValueError("it names a slice twice")


def round_id_of(step_id: str, view: int, intents: Sequence[VerifiedBody[Intent]]) -> str:
    """Hex id of a round: the agreement of its members before any exchange, without signatures."""
    parts = [
        f"{one.member.node_id} {one.member.wallet_id} {one.body.commitment} {one.body.sequences} {one.body.upload}"
        f" {one.body.exchange} {one.body.sequence}"
        for one in sorted(intents, key=attrgetter("member.node_id"))
    ]
    return hash_parts("neuroshard/certified-round", step_id, view, *parts).hex()
