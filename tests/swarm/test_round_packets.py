"""Messages of rounds as bytes: what is written is read, and no lie is."""

from __future__ import annotations

import re
import tracemalloc
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from msgspec import structs

from neuroshard.consensus.chain import Step
from neuroshard.consensus.committee import GroupMember
from neuroshard.consensus.round_messages import (
    MAX_MEMBERS,
    MAX_ROUND_CLAIM_BYTES,
    MAX_VIEW,
    AggregateSent,
    AggregateWanted,
    BlocksSent,
    BlocksWanted,
    Body,
    CertificateSaid,
    ChoicesSaid,
    ContributionSent,
    Intent,
    IntentSaid,
    MalformedMessageError,
    Message,
    NewView,
    NewViewSaid,
    OuterChoice,
    PartsWanted,
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
    Vote,
    VoteSaid,
    encode_round_message,
    read_round_message,
    signed_by,
)
from neuroshard.consensus.slices import MAX_SLICES
from neuroshard.identity.claims import ClaimBody, sign_message
from neuroshard.types import MAX_NODE_ID_CHARACTERS, NodeId, RunId, WalletId
from tests.worlds.claims import identity_of
from tests.worlds.rounds import chain_of

NOW = 1_700_000_000.0
HASH, OTHER = "ab" * 32, "cd" * 32


NODES = [identity_of(number) for number in range(3)]
MEMBERS = tuple(sorted(GroupMember(one.node_id, one.wallet_id) for one in NODES))
CHAIN = chain_of(MEMBERS)
STEP = Step(RunId("1" * 64), 0, 3, HASH, "int8", CHAIN.standing, CHAIN.ledger, CHAIN.owner)
VALUE = structs.replace(
    STEP.first_value(),
    round_id=OTHER,
    aggregate=(HASH, OTHER),
    members=MEMBERS,
    accepted=(MEMBERS[0].node_id,),
    refused=((MEMBERS[1].node_id, "no"),),
    choices=((MEMBERS[0].node_id, 1),),
    next_root=OTHER,
    sequences=7,
)
INTENT = Intent(STEP.id, 0, HASH, 100, 1000, 60, 5)
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
    ResultSaid(signed_by(NODES[0], ResultDigests(HASH, ((0, HASH),), HASH), NOW), SLICES),
    VoteSaid(signed_by(NODES[0], Vote(STEP.id, 0, Phase.COMMIT, HASH), NOW)),
    CertificateSaid(votes(Phase.COMMIT)),
    AggregateWanted(STEP.id, HASH, (0, 3)),
    AggregateSent(HASH, SLICES),
    PartsWanted(HASH, NODES[0].node_id, (1, 5)),
    BlocksWanted(HASH, ((1, 7), (63, 0))),
    BlocksSent(HASH, b"blocks"),
    ChoicesSaid(tuple(signed_by(one, OuterChoice(HASH, 2), NOW) for one in NODES)),
]


def packed(message: Message) -> bytes:
    return b"".join(encode_round_message(message))


def content(message: Message) -> dict[str, Any]:
    """The fields of a message as they travel."""
    fields: dict[str, Any] = msgspec.msgpack.decode(packed(message))
    return fields


def refusal(value: object) -> str:
    """Why these fields, or these bytes, are not read."""
    with pytest.raises(MalformedMessageError) as caught:
        read_round_message([value if isinstance(value, bytes) else msgspec.msgpack.encode(value)])
    return str(caught.value)


every_message = pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)


@every_message
def test_what_is_written_is_read(message: Message) -> None:
    data = packed(message)
    assert read_round_message([data]) == message
    assert read_round_message([data[:7], memoryview(data)[7:]]) == message


@every_message
def test_a_message_that_is_cut_or_has_more_is_refused(message: Message) -> None:
    data, fields = packed(message), content(message)
    for end in range(0, len(data), max(1, len(data) // 50)):
        refusal(data[:end])
    for spoilt in (data + b"x", {}, {**fields, "type": "Pickle"}, {**fields, "x": 1}, [fields], b"\x91" * 10_000):
        refusal(spoilt)
    for name in fields.keys() - {"type", "lock", "evidence"}:
        assert f"required field `{name}`" in refusal({key: value for key, value in fields.items() if key != name})


@every_message
def test_there_is_one_encoding_of_a_message(message: Message) -> None:
    fields = content(message)
    # other orders and other forms of the same lengths mean the same, and would make two messages of one
    for other in (dict(reversed(fields.items())), fields | {"type": fields["type"].encode()}):
        refusal(other)
    carried = {"slices", "statistics"} & fields.keys()
    if isinstance(message, AggregateWanted | PartsWanted) or not carried:
        assert msgspec.msgpack.encode(fields) == packed(message)
        refusal(b"\xde\x00" + bytes([len(fields)]) + packed(message)[1:])
    else:
        assert "encoded" in refusal(fields)  # with the shortest forms for the slices


def test_slices_are_views_of_what_was_sent_and_received() -> None:
    (index, sent), *_ = {7: memoryview(b"x" * 1000)}.items()
    pieces = encode_round_message(AggregateSent(HASH, {index: sent}))
    assert any(piece is sent for piece in pieces)
    data = b"".join(pieces)
    message = read_round_message([data])
    assert isinstance(message, AggregateSent)
    received = message.slices[index]
    assert isinstance(received, memoryview)
    assert received.obj is data


@pytest.mark.parametrize(
    ("message", "change", "reason"),
    [
        (AggregateSent(HASH, SLICES), {"slices": {64: b"x"}}, "`$.slices`"),
        (AggregateSent(HASH, SLICES), {"slices": {-1: b"x"}}, "`$.slices`"),
        (AggregateSent(HASH, SLICES), {"slices": {"1": b"x"}}, "`$.slices`"),
        (AggregateSent(HASH, SLICES), {"slices": {1: "x"}}, "`$.slices[...]`"),
        (AggregateSent(HASH, SLICES), {"value": "AB" * 32}, "`$.value`"),
        (AggregateWanted(STEP.id, HASH, ()), {"slices": [1, 2, 1]}, "names a slice twice"),
        (AggregateWanted(STEP.id, HASH, ()), {"slices": [0] * 65}, "`$.slices`"),
        (MESSAGES[5], {"digests": [b"x" * 31]}, "`$.digests[0]`"),
        (MESSAGES[5], {"digests": [b"x" * 32] * 65}, "`$.digests`"),
        (MESSAGES[5], {"author": "a\n"}, "`$.author`"),
        (MESSAGES[3], {"intents": [[b"x"]] * 65}, "`$.intents`"),
        (MESSAGES[3], {"signed": [b"x" * (MAX_ROUND_CLAIM_BYTES + 1)]}, "`$.signed[0]`"),
        (MESSAGES[3], {"signed": [b"x"]}, "in claim 0 of `signed`"),
        (MESSAGES[3], {"intents": [content(MESSAGES[0])["signed"], content(MESSAGES[8])["signed"]]}, "claim 1 of `int"),
        (MESSAGES[0], {"signed": content(MESSAGES[8])["signed"]}, "A round/intent cannot be read"),
    ],
)
def test_a_field_beyond_its_bounds_is_named(message: Message, change: dict[str, object], reason: str) -> None:
    assert reason in refusal({**content(message), **change})


@pytest.mark.parametrize("field", ["signed", "intents", "lock", "votes", "digests", "slices", "statistics", "type"])
@pytest.mark.parametrize(
    "length", [*(bytes([kind, 0x80, 0, 0, 0]) for kind in (0xDD, 0xDF, 0xC6)), b"\x91" * 5000], ids=bytes.hex
)
def test_a_claimed_length_or_depth_takes_no_memory(field: str, length: bytes) -> None:
    for message in MESSAGES:
        fields = content(message) | {field: msgspec.Raw(length)}
        tracemalloc.start()
        try:
            refusal(fields)
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
        finally:
            tracemalloc.stop()


def test_a_signed_body_has_one_encoding() -> None:
    """An author could sign the same statement in many encodings, and each would look like another claim."""
    vote = Vote(STEP.id, 0, Phase.COMMIT, HASH)
    plain: dict[str, object] = msgspec.to_builtins(vote)

    def claim(payload: bytes, issued_at: float = NOW) -> bytes:
        body = ClaimBody(msgspec.Raw(payload), issued_at, NODES[0].delegation.signed)
        return msgspec.msgpack.encode(sign_message(NODES[0].key, Vote.kind, body))

    good = msgspec.msgpack.encode(plain)
    assert claim(good) == signed_by(NODES[0], vote, NOW).claim
    for other in (
        claim(msgspec.msgpack.encode(dict(reversed(plain.items())))),
        claim(b"\xde\x00\x04" + good[1:]),
        claim(good.replace(b"\xa4view\x00", b"\xa4view\xcc\x00")),
        claim(good, int(NOW)),
    ):
        with pytest.raises(MalformedMessageError, match="not the shortest"):
            VerifiedBody[Vote](other).verify(Vote)


BODIES: list[Body] = [
    INTENT,
    NewView(STEP.id, 1, ()),
    RoundProposal(STEP.id, 4, HASH, None),
    StatisticsDigests(HASH, ((0, HASH),)),
    ResultDigests(HASH, ((0, HASH),), HASH),
    Vote(STEP.id, 0, Phase.COMMIT, HASH),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_a_body_with_a_flipped_byte_or_of_another_kind_is_refused(body: Body) -> None:
    claim = signed_by(NODES[0], body, NOW).claim
    assert read_signed(claim, type(body)).body == body
    with pytest.raises(KeyError):
        _ = VerifiedBody[Vote](claim).body  # nothing is known of a claim before it is verified
    for place in range(0, len(claim), 7):
        damaged = claim[:place] + bytes([claim[place] ^ 1]) + claim[place + 1 :]
        with pytest.raises(MalformedMessageError):
            read_signed(damaged, type(body))
    others = [other for other in BODIES if type(other) is not type(body)]
    for other in others:
        with pytest.raises(MalformedMessageError):
            read_signed(claim, type(other))


def test_a_slice_named_twice_is_refused() -> None:
    for body in (StatisticsDigests(HASH, ((3, HASH), (3, OTHER))), ResultDigests(HASH, ((0, HASH), (0, HASH)), HASH)):
        with pytest.raises(MalformedMessageError, match="names a slice twice"):
            read_signed(signed_by(NODES[0], body, NOW).claim, type(body))


def read_signed(claim: bytes, form: type[Body]) -> VerifiedBody[Body]:
    signed = VerifiedBody[Body](claim)
    signed.verify(form)
    return signed


def test_a_refusal_names_the_field() -> None:
    for body, path in (
        (Vote(STEP.id, -1, Phase.COMMIT, HASH), "view"),
        (Vote(STEP.id, 0, Phase.COMMIT, "AB" * 32), "value"),
        (Intent(STEP.id, 0, HASH, 10**16, 1000, 60, 5), "sequences"),
        (Intent(STEP.id, 0, HASH, 100, 1000, 60, 5, 101), "exchange"),
        (Intent(STEP.id, 0, HASH, 100, 1000, 60, 5, 1, -1), "sequence"),
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
        ResultDigests(HASH, digests, HASH),
    ]
    for body in longest:
        claim = signed_by(NODES[0], body, NOW).claim
        assert read_signed(claim, type(body)).body == body
        with pytest.raises(MalformedMessageError, match="bytes"):
            read_signed(claim + b" " * MAX_ROUND_CLAIM_BYTES, type(body))


def test_a_quorum_counts_each_voter_once_and_nobody_else() -> None:
    seats = STEP.committee
    assert votes(Phase.COMMIT, 2).is_decided_by(seats)
    assert not votes(Phase.COMMIT, 1).is_decided_by(seats)
    twice = votes(Phase.COMMIT, 1)
    assert not structs.replace(twice, votes=twice.votes * 3).is_decided_by(seats)
    assert not structs.replace(votes(Phase.COMMIT), phase=Phase.PREPARE).is_decided_by(seats)
    assert not structs.replace(votes(Phase.COMMIT), view=3).is_decided_by(seats)
    assert not structs.replace(votes(Phase.COMMIT), value=structs.replace(VALUE, next_root=HASH)).is_decided_by(seats)
    others = chain_of(
        [GroupMember(NodeId(f"n{number}"), WalletId(f"w{number}")) for number in range(3)]
    ).ledger.committee
    assert not votes(Phase.COMMIT).is_decided_by(others)
    foreign = tuple(
        VerifiedBody[Vote].of(structs.replace(vote.member, wallet_id="b" * 16), vote.body, vote.claim)
        for vote in twice.votes
    )
    assert not structs.replace(twice, votes=(*foreign, *twice.votes)).is_decided_by(seats)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"members": [["a", "b"], ["a", "c"]]}, "appears twice"),
        ({"members": [["b", "a"], ["a", "a"]]}, "not in order"),
        ({"members": [["a", "b", "c"]]}, r"`\$\.certificate\.value\.members\[0\]`"),
        ({"members": [["a", "b" * 33]]}, r"`\$\.certificate\.value\.members\[0\]\[1\]`"),
        ({"accepted": ["a\n"]}, r"`\$\.certificate\.value\.accepted\[0\]`"),
        ({"refused": [["a"]]}, r"`\$\.certificate\.value\.refused\[0\]`"),
        ({"aggregate": [HASH] * (MAX_SLICES + 1)}, r"`\$\.certificate\.value\.aggregate`"),
        ({"sequences": -1}, r"`\$\.certificate\.value\.sequences`"),
        ({"choices": [["a", 3]]}, r"`\$\.certificate\.value\.choices\[0\]\[1\]`"),
        ({"choices": [["a", float("nan")]]}, r"`\$\.certificate\.value\.choices\[0\]\[1\]`"),
        ({"more": 1}, "unknown field `more`"),
    ],
)
def test_a_malformed_value_names_the_field(change: dict[str, object], path: str) -> None:
    fields = content(CertificateSaid(votes(Phase.COMMIT)))
    fields["certificate"]["value"] |= change
    assert re.search(path, refusal(fields))


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ([OuterChoice(HASH, 1), OuterChoice(HASH, 2)], "chooses twice"),
        ([OuterChoice(HASH, 3)], r"`\$\.choice`"),
        ([OuterChoice(HASH, -1)], r"`\$\.choice`"),
        ([OuterChoice(HASH, float("nan"))], r"`\$\.choice`"),  # type: ignore[arg-type]
        ([Vote(STEP.id, 0, Phase.COMMIT, HASH)], "cannot be read"),
        ([], "length >= 1"),
    ],
)
def test_choices_that_are_not_valid_are_not_read(choices: list[Body], reason: str) -> None:
    fields = content(ChoicesSaid((signed_by(NODES[0], OuterChoice(HASH, 2), NOW),)))
    assert re.search(reason, refusal({**fields, "choices": [[signed_by(NODES[0], one, NOW).claim] for one in choices]}))
    ((claim,),) = fields["choices"]
    refusal({**fields, "choices": [[claim[:-1] + bytes([claim[-1] ^ 1])]]})  # another signature
    other = signed_by(NODES[1], OuterChoice(OTHER, 1), NOW).claim
    assert "several rounds" in refusal({**fields, "choices": [[claim], [other]]})


def test_golden_digests() -> None:
    """Other versions of the program have to come to the same."""
    member = GroupMember(NodeId("a"), WalletId("0123456789abcdef"))
    chain = chain_of([member])
    step = Step(RunId("1" * 64), 0, 3, HASH, "int8", chain.standing, chain.ledger, chain.owner)
    value = structs.replace(step.first_value(), members=(member,), round_id=OTHER, aggregate=(HASH,))
    assert (step.id[:16], structs.replace(value, step_id=HASH).digest[:16]) == ("356c5281509be530", "aed82fdea148f907")
