"""Messages of a round as frames. Parsing a frame verifies every signature in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from neuroshard.consensus.roster import DIGEST_BYTES, MAX_SLICES, Encoded, GroupMember, Roster
from neuroshard.consensus.round_messages import (
    MAX_MEMBERS,
    AggregateSent,
    AggregateWanted,
    Body,
    CertificateSaid,
    ContributionSent,
    DigestsOfSlices,
    Intent,
    IntentSaid,
    Message,
    NewView,
    NewViewSaid,
    Phase,
    ProposalSaid,
    Quorum,
    ResultDigests,
    ResultSaid,
    RoundProposal,
    StatementSaid,
    StatisticsDigests,
    Value,
    VerifiedBody,
    View,
    Vote,
    VoteSaid,
)
from neuroshard.decoders import analysed
from neuroshard.errors import DataError
from neuroshard.identity import NodeIdentity, read_claim, sign_claim, verify_claim
from neuroshard.identity.strict_json import exact_object, hash_field, line_field, list_field, whole_field
from neuroshard.messages import Frame, FrameLimits, MalformedFrameError, TensorPart, TensorSpec
from neuroshard.types import JsonValue, NodeId

KIND = "round/message"
OTHER_BYTES = 2 << 20  # per message, apart from slices: claims, statistics
MAX_ROUND_CLAIM_BYTES = 16 * 1024  # three times the longest body: many claims are kept
_Body = TypeVar("_Body", bound=Body)


class MalformedMessageError(DataError):
    """A message of a round that cannot be parsed, or whose signature is invalid."""


def limits_for(slices_bytes: int) -> FrameLimits:
    """Frame limits when all slices of a contribution have `slices_bytes`."""
    return FrameLimits(max_body_bytes=slices_bytes + OTHER_BYTES)


def signed_by(identity: NodeIdentity, body: _Body, now: float) -> VerifiedBody[_Body]:
    """The body with this node's signature. `now` is in seconds since the epoch."""
    claim = sign_claim(identity, body.kind, body, now)
    return VerifiedBody(GroupMember(identity.node_id, identity.wallet_id), body, claim.encode())


def read_signed(data: bytes, body: type[_Body]) -> VerifiedBody[_Body]:
    """The body of a claim, after its signature and delegation were verified. Raises MalformedMessageError.

    A vote stays valid however old it is, so the delegation must have been valid when the vote was signed.
    """
    try:
        claim = read_claim(data, body, MAX_ROUND_CLAIM_BYTES)
        said = verify_claim(claim, body.kind, claim.issued_at)
    except DataError as error:
        raise MalformedMessageError(f"A {body.kind} cannot be read: {error}") from None
    if isinstance(said.payload, DigestsOfSlices) and not said.payload.has_each_slice_once():
        raise MalformedMessageError(f"A {body.kind} names a slice twice.")
    return VerifiedBody(GroupMember(said.node_id, said.wallet_id), said.payload, data)


class _QuorumFields(Struct, frozen=True, forbid_unknown_fields=True):
    """A quorum without its votes."""

    value: Value
    view: View
    phase: Phase


def quorum_to_json(quorum: Quorum) -> JsonValue:
    """The JSON form of a quorum without its votes, whose claims are stored next to it."""
    fields: JsonValue = msgspec.to_builtins(_QuorumFields(quorum.value, quorum.view, quorum.phase))
    return fields


def quorum_from(fields: JsonValue, votes: Sequence[bytes]) -> Quorum:
    """The quorum with these claims, not checked for sufficient votes. Raises MalformedMessageError, ValueError."""
    read = msgspec.convert(fields, analysed(_QuorumFields))
    value = replace(read.value, members=Roster(read.value.members).members)  # a roster names each member once
    return Quorum(value, read.view, read.phase, tuple(read_signed(vote, Vote) for vote in votes))


@dataclass(frozen=True)
class _Content:
    """The common form of all messages: a few fields, and named byte strings."""

    fields: Mapping[str, JsonValue]
    claims: Sequence[bytes] = ()  # the author's own claim is first
    votes: Sequence[bytes] = ()
    slices: Mapping[int, Encoded] | None = None
    digests: bytes = b""


def to_frame(message: Message) -> Frame:
    """The message as a frame."""
    content = _content(message)
    parts = [
        *((f"claim {number}", one) for number, one in enumerate(content.claims)),
        *((f"vote {number}", one) for number, one in enumerate(content.votes)),
        *((f"slice {index}", one) for index, one in sorted((content.slices or {}).items())),
        *([("digests", content.digests)] if content.digests else []),
    ]
    tensors = tuple(TensorPart(TensorSpec(name, "uint8", (len(data),)), data) for name, data in parts)
    return Frame(KIND, {"type": type(message).__name__, "fields": dict(content.fields)}, tensors)


def from_frame(frame: Frame) -> Message:
    """Parse a frame made by `to_frame`. Raises MalformedMessageError."""
    try:
        header = exact_object(cast("JsonValue", frame.header), {"type", "fields"}, "a message")
        reader = _READERS.get(line_field(header["type"], 32, "type"), _unknown)
        return reader(_Read(header["fields"], frame.tensors))
    except (ValueError, MalformedFrameError) as error:
        raise MalformedMessageError(f"A message of a round cannot be read: {error}.") from None


def _content(message: Message) -> _Content:  # noqa: PLR0911 - one case a type
    match message:
        case IntentSaid(signed) | VoteSaid(signed):
            return _Content({}, [signed.claim])
        case NewViewSaid(signed, lock):
            return _Content({"lock": _lock(lock)}, [signed.claim], _votes(lock))
        case ProposalSaid(signed, intents, lock):
            claims = [signed.claim, *(intent.claim for intent in intents)]
            return _Content({"lock": _lock(lock)}, claims, _votes(lock))
        case ContributionSent(round_id, author, digests, slices):
            return _Content({"round": round_id, "author": author}, slices=slices, digests=b"".join(digests))
        case StatementSaid(signed, slices) | ResultSaid(signed, slices):
            return _Content({}, [signed.claim], slices=slices)
        case CertificateSaid(certificate):
            return _Content({"certificate": quorum_to_json(certificate)}, votes=_votes(certificate))
        case AggregateWanted(step_id, value, wanted):
            return _Content({"step": step_id, "value": value, "slices": list(wanted)})
        case AggregateSent(value, slices):
            return _Content({"value": value}, slices=slices)


def _lock(lock: Quorum | None) -> JsonValue:
    return None if lock is None else quorum_to_json(lock)


def _votes(quorum: Quorum | None) -> Sequence[bytes]:
    return () if quorum is None else [vote.claim for vote in quorum.votes]


class _Read:
    """Fields and byte strings of a message, each number checked against its range."""

    def __init__(self, fields: JsonValue, tensors: Sequence[TensorPart]) -> None:
        self._fields = fields
        self.claims = list[bytes]()
        self.votes = list[bytes]()
        self.slices = dict[int, Encoded]()
        self._digests = b""
        for tensor in tensors:
            name = tensor.spec.name
            what, _, number = name.partition(" ")
            match what:
                case "claim" if name == f"claim {len(self.claims)}" and len(self.claims) <= MAX_MEMBERS:
                    self.claims.append(bytes(tensor.data))
                case "vote" if name == f"vote {len(self.votes)}" and len(self.votes) <= MAX_MEMBERS:
                    self.votes.append(bytes(tensor.data))
                case "digests" if name == "digests" and not self._digests:
                    self._digests = bytes(tensor.data)
                case "slice":
                    index = whole_field(int(number), 0, MAX_SLICES - 1, "slice")
                    if name != f"slice {index}" or index in self.slices:  # int() reads "+1" and "1_0" as well
                        raise ValueError(f"it has the part {name[:32]!r}, which is not a number or comes twice")
                    self.slices[index] = tensor.data
                case _:
                    raise ValueError(f"it has a part {name[:32]!r}")

    def fields(self, *names: str) -> Mapping[str, JsonValue]:
        return exact_object(self._fields, set(names), "a message")

    def own(self, body: type[_Body]) -> VerifiedBody[_Body]:
        if not self.claims:
            raise ValueError("it has no claim")
        return read_signed(self.claims[0], body)

    def alone(self, body: type[_Body]) -> VerifiedBody[_Body]:
        """The author's claim of a message without any other content."""
        self.fields()
        return self.own(body)

    def content(self, claims: int) -> Mapping[int, Encoded]:
        """The slices of a message with this number of claims and no votes.

        The slices keep the whole message in memory.
        """
        if len(self.claims) != claims or self.votes:
            raise ValueError("it has more than its claims and slices")
        return self.slices

    def lock(self) -> Quorum | None:
        lock = self.fields("lock")["lock"]
        return None if lock is None else quorum_from(lock, self.votes)

    def digests(self) -> tuple[bytes, ...]:
        whole = self._digests
        if len(whole) > DIGEST_BYTES * MAX_SLICES or len(whole) % DIGEST_BYTES:
            raise ValueError("its digests have the wrong length")
        return tuple(whole[start : start + DIGEST_BYTES] for start in range(0, len(whole), DIGEST_BYTES))


def _unknown(_read: _Read) -> Message:
    raise ValueError("there is no message of that type")


def _contribution(read: _Read) -> ContributionSent:
    fields = read.fields("round", "author")
    author = NodeId(line_field(fields["author"], 64, "author"))
    return ContributionSent(hash_field(fields["round"], "round"), author, read.digests(), read.content(claims=0))


def _wanted(read: _Read) -> AggregateWanted:
    fields = read.fields("step", "value", "slices")
    slices = [
        whole_field(one, 0, MAX_SLICES - 1, "slice") for one in list_field(fields["slices"], MAX_SLICES, "slices")
    ]
    if len(set(slices)) != len(slices):
        raise ValueError("it names a slice twice")
    return AggregateWanted(hash_field(fields["step"], "step"), hash_field(fields["value"], "value"), tuple(slices))


def _proposal(read: _Read) -> ProposalSaid:
    intents = tuple(read_signed(claim, Intent) for claim in read.claims[1:])
    return ProposalSaid(read.own(RoundProposal), intents, read.lock())


_READERS: Mapping[str, Callable[[_Read], Message]] = {
    "IntentSaid": lambda read: IntentSaid(read.alone(Intent)),
    "NewViewSaid": lambda read: NewViewSaid(read.own(NewView), read.lock()),
    "ProposalSaid": _proposal,
    "ContributionSent": _contribution,
    "StatementSaid": lambda read: StatementSaid(read.alone(StatisticsDigests), read.content(claims=1)),
    "ResultSaid": lambda read: ResultSaid(read.alone(ResultDigests), read.content(claims=1)),
    "VoteSaid": lambda read: VoteSaid(read.alone(Vote)),
    "CertificateSaid": lambda read: CertificateSaid(quorum_from(read.fields("certificate")["certificate"], read.votes)),
    "AggregateWanted": _wanted,
    "AggregateSent": lambda read: AggregateSent(
        hash_field(read.fields("value")["value"], "value"), read.content(claims=0)
    ),
}
