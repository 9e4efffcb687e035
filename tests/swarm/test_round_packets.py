"""Messages of rounds as bytes: what is written is read, and no lie is."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
from msgspec import structs

from neuroshard.consensus.message_frames import (
    MAX_ROUND_CLAIM_BYTES,
    MalformedMessageError,
    from_frame,
    limits_for,
    read_signed,
    signed_by,
    to_frame,
)
from neuroshard.consensus.roster import MAX_SLICES, GroupMember, Roster, Step
from neuroshard.consensus.round_messages import (
    MAX_MEMBERS,
    MAX_VIEW,
    AggregateSent,
    AggregateWanted,
    Body,
    CertificateSaid,
    ContributionSent,
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
    Vote,
    VoteSaid,
)
from neuroshard.messages import Frame, TensorPart, TensorSpec, WireError, decode, encode
from neuroshard.types import MAX_NODE_ID_CHARACTERS, NodeId, RunId, WalletId
from tests.worlds.identities import identity_of

NOW = 1_700_000_000.0
HASH, OTHER = "ab" * 32, "cd" * 32


NODES = [identity_of(number) for number in range(3)]
MEMBERS = tuple(sorted(GroupMember(one.node_id, one.wallet_id) for one in NODES))
STEP = Step(RunId("1" * 64), 0, 3, HASH, "int8", Roster(MEMBERS))
VALUE = Value(
    STEP.id, HASH, OTHER, (HASH, OTHER), MEMBERS, (MEMBERS[0].node_id,), ((MEMBERS[1].node_id, "no"),), OTHER, 7
)
INTENT = Intent(STEP.id, 0, HASH, 100, 1000, 5)
SLICES = {0: b"zero", 5: b"", 63: bytes(range(256))}


def votes(phase: Phase, count: int = 3, value: Value = VALUE) -> Quorum:
    said = [signed_by(one, Vote(STEP.id, 2, phase, value.digest), NOW) for one in NODES[:count]]
    return Quorum(value, 2, phase, tuple(said))


MESSAGES: list[Message] = [
    IntentSaid(signed_by(NODES[0], INTENT, NOW)),
    NewViewSaid(signed_by(NODES[0], NewView(STEP.id, 1, (NODES[1].node_id,)), NOW)),
    NewViewSaid(signed_by(NODES[0], NewView(STEP.id, 1, ()), NOW), votes(Phase.PREPARE)),
    ProposalSaid(
        signed_by(NODES[0], RoundProposal(STEP.id, 4, HASH, None), NOW),
        tuple(signed_by(one, INTENT, NOW) for one in NODES),
    ),
    ProposalSaid(signed_by(NODES[0], RoundProposal(STEP.id, 4, HASH, VALUE.digest), NOW), (), votes(Phase.PREPARE)),
    ContributionSent(HASH, NODES[0].node_id, (sha256(b"1").digest(), sha256(b"2").digest()), SLICES),
    StatementSaid(signed_by(NODES[0], StatisticsDigests(HASH, ((0, HASH), (5, OTHER))), NOW), SLICES),
    ResultSaid(signed_by(NODES[0], ResultDigests(HASH, ((0, HASH),)), NOW), SLICES),
    VoteSaid(signed_by(NODES[0], Vote(STEP.id, 0, Phase.COMMIT, HASH), NOW)),
    CertificateSaid(votes(Phase.COMMIT)),
    AggregateWanted(STEP.id, HASH, (0, 3)),
    AggregateSent(HASH, SLICES),
]


def through_bytes(message: Message) -> Message:
    frame = encode(to_frame(message))
    data = b"".join((frame.head, *frame.body))
    return from_frame(decode(data, lambda _: limits_for(1000)))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_written_is_read(message: Message) -> None:
    assert through_bytes(message) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_that_is_cut_or_has_more_is_refused(message: Message) -> None:
    frame = to_frame(message)
    spoilt = [
        replace(frame, message={}),
        replace(frame, message={**frame.header, "type": "Pickle"}),
        replace(frame, message={**frame.header, "fields": {"x": 1}}),
        replace(frame, tensors=(*frame.tensors, TensorPart(TensorSpec("slice 64", "uint8", (1,)), b"x"))),
        replace(frame, tensors=(*frame.tensors, TensorPart(TensorSpec("slice x", "uint8", (1,)), b"x"))),
        replace(frame, tensors=(*frame.tensors, TensorPart(TensorSpec("other", "uint8", (1,)), b"x"))),
    ]
    if frame.tensors and frame.tensors[0].spec.name == "claim 0":
        spoilt.append(replace(frame, tensors=frame.tensors[1:] if len(frame.tensors) == 1 else ()))
    if isinstance(message, ContributionSent | StatementSaid | ResultSaid | AggregateSent):
        # what comes with slices stays in memory as long as they do
        spoilt += [
            replace(frame, tensors=(*frame.tensors, TensorPart(TensorSpec(name, "uint8", (9,)), b"x" * 9)))
            for name in ("claim 1", "vote 0")
        ]
    for one in spoilt:
        with pytest.raises((MalformedMessageError, WireError)):
            from_frame(one)


@pytest.mark.parametrize(
    "names",
    [
        ["slice +1"],
        ["slice 1_0"],
        ["slice 01"],
        ["slice \u0661"],
        ["slice  1"],
        ["slice 1", "slice 1"],
        ["slice 1", "digests", "digests"],
        ["slice 1", "digests 1"],
        ["slice 1", "digests "],
    ],
    ids=ascii,
)
def test_a_part_with_another_name_than_it_is_sent_with_is_refused(names: list[str]) -> None:
    frame = to_frame(ContributionSent(HASH, NODES[0].node_id, (bytes(32),), {1: b"x" * 32}))
    assert [tensor.spec.name for tensor in frame.tensors] == ["slice 1", "digests"]
    parts = tuple(TensorPart(TensorSpec(name, "uint8", (32,)), b"x" * 32) for name in names)
    with pytest.raises(MalformedMessageError):
        from_frame(replace(frame, tensors=parts))


@pytest.mark.parametrize("name", ["claim 1", "claim 00", "claim", "claim x"])
def test_a_claim_of_another_number_is_refused(name: str) -> None:
    frame = to_frame(VoteSaid(signed_by(NODES[0], Vote(STEP.id, 0, Phase.COMMIT, HASH), NOW)))
    (part,) = frame.tensors
    with pytest.raises(MalformedMessageError):
        from_frame(replace(frame, tensors=(replace(part, spec=replace(part.spec, name=name)),)))


def test_a_slice_wanted_twice_is_refused() -> None:
    with pytest.raises(MalformedMessageError, match="names a slice twice"):
        from_frame(to_frame(AggregateWanted(STEP.id, HASH, (1, 2, 1))))


BODIES: list[Body] = [
    INTENT,
    NewView(STEP.id, 1, ()),
    RoundProposal(STEP.id, 4, HASH, None),
    StatisticsDigests(HASH, ((0, HASH),)),
    ResultDigests(HASH, ((0, HASH),)),
    Vote(STEP.id, 0, Phase.COMMIT, HASH),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_a_body_with_a_flipped_byte_or_of_another_kind_is_refused(body: Body) -> None:
    claim = signed_by(NODES[0], body, NOW).claim
    assert read_signed(claim, type(body)).body == body
    for place in range(0, len(claim), 7):
        damaged = claim[:place] + bytes([claim[place] ^ 1]) + claim[place + 1 :]
        with pytest.raises(MalformedMessageError):
            read_signed(damaged, type(body))
    others = [other for other in BODIES if type(other) is not type(body)]
    for other in others:
        with pytest.raises(MalformedMessageError):
            read_signed(claim, type(other))


def test_a_slice_named_twice_is_refused() -> None:
    for body in (StatisticsDigests(HASH, ((3, HASH), (3, OTHER))), ResultDigests(HASH, ((0, HASH), (0, HASH)))):
        with pytest.raises(MalformedMessageError, match="names a slice twice"):
            read_signed(signed_by(NODES[0], body, NOW).claim, type(body))


def test_a_refusal_names_the_field() -> None:
    for body, path in (
        (Vote(STEP.id, -1, Phase.COMMIT, HASH), "view"),
        (Vote(STEP.id, 0, Phase.COMMIT, "AB" * 32), "value"),
        (Intent(STEP.id, 0, HASH, 10**16, 1000, 5), "sequences"),
        (NewView(STEP.id, 0, ()), "view"),
        (NewView(STEP.id, 1, (NodeId("a\n"),)), r"missing\[0\]"),
        (StatisticsDigests(HASH, ((MAX_SLICES, HASH),)), r"digests\[0\]\[0\]"),
    ):
        with pytest.raises(MalformedMessageError, match=rf"at `\$\.{path}`"):
            read_signed(signed_by(NODES[0], body, NOW).claim, type(body))


def test_the_longest_claims_are_read_and_padded_ones_are_not() -> None:
    everybody = tuple(NodeId(f"{number:0>{MAX_NODE_ID_CHARACTERS}}") for number in range(MAX_MEMBERS))
    digests = tuple((index, HASH) for index in range(MAX_SLICES))
    longest: list[Body] = [
        NewView(STEP.id, MAX_VIEW, everybody),
        StatisticsDigests(HASH, digests),
        ResultDigests(HASH, digests),
    ]
    for body in longest:
        claim = signed_by(NODES[0], body, NOW).claim
        assert read_signed(claim, type(body)).body == body
        with pytest.raises(MalformedMessageError, match="bytes"):
            read_signed(claim + b" " * MAX_ROUND_CLAIM_BYTES, type(body))


def test_a_quorum_counts_each_voter_once_and_nobody_else() -> None:
    assert votes(Phase.COMMIT, 2).is_valid_for(STEP)
    assert not votes(Phase.COMMIT, 1).is_valid_for(STEP)
    twice = votes(Phase.COMMIT, 1)
    assert not replace(twice, votes=twice.votes * 3).is_valid_for(STEP)
    assert not replace(votes(Phase.COMMIT), phase=Phase.PREPARE).is_valid_for(STEP)
    assert not replace(votes(Phase.COMMIT), view=3).is_valid_for(STEP)
    assert not replace(votes(Phase.COMMIT), value=structs.replace(VALUE, next_root=HASH)).is_valid_for(STEP)
    others = replace(STEP, roster=Roster(tuple(GroupMember(NodeId(f"n{i}"), MEMBERS[0].wallet_id) for i in range(3))))
    assert not votes(Phase.COMMIT).is_valid_for(others)
    foreign = tuple(
        replace(vote, member=structs.replace(vote.member, wallet_id=MEMBERS[0].wallet_id)) for vote in twice.votes
    )
    assert not replace(twice, votes=(*foreign, *twice.votes)).is_valid_for(STEP)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"members": []}, "at least one member"),
        ({"members": [["a", "b"], ["a", "c"]]}, "each once"),
        ({"members": [["a", "b", "c"]]}, r"`\$\.value\.members\[0\]`"),
        ({"members": [["a", "b" * 17]]}, r"`\$\.value\.members\[0\]\[1\]`"),
        ({"accepted": ["a\n"]}, r"`\$\.value\.accepted\[0\]`"),
        ({"refused": [["a"]]}, r"`\$\.value\.refused\[0\]`"),
        ({"aggregate": [HASH] * (MAX_SLICES + 1)}, r"`\$\.value\.aggregate`"),
        ({"sequences": -1}, r"`\$\.value\.sequences`"),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_a_malformed_value_names_the_field(change: dict[str, object], path: str) -> None:
    frame = to_frame(CertificateSaid(votes(Phase.COMMIT)))
    certificate: Any = frame.header["fields"]["certificate"]  # type: ignore[index,call-overload]
    spoilt = {**certificate, "value": {**certificate["value"], **change}}
    with pytest.raises(MalformedMessageError, match=path):
        from_frame(replace(frame, message={**frame.header, "fields": {"certificate": spoilt}}))


def test_golden_digests() -> None:
    """Other versions of the program have to come to the same."""
    assert isinstance(to_frame(MESSAGES[0]), Frame)
    step = Step(RunId("1" * 64), 0, 3, HASH, "int8", Roster((GroupMember(NodeId("a"), WalletId("0123456789abcdef")),)))
    value = structs.replace(
        VALUE, members=(GroupMember(NodeId("a"), WalletId("0123456789abcdef")),), accepted=(), refused=()
    )
    assert (step.id[:16], structs.replace(value, step_id=HASH).digest[:16]) == ("814235c2ce183338", "d31e9911ba446e6d")
