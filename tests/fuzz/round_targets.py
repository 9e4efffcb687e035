"""Readers of what the members of a round send each other: the messages of a round, and the requests around it."""

from __future__ import annotations

import msgspec

from neuroshard.consensus.message_queue import PART, PART_LIMITS, MessagePart
from neuroshard.consensus.roster import GroupMember
from neuroshard.consensus.round_messages import (
    AggregateSent,
    AggregateWanted,
    CertificateSaid,
    ContributionSent,
    Intent,
    IntentSaid,
    MalformedMessageError,
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
    encode_round_message,
    read_round_message,
    signed_by,
)
from neuroshard.consensus.round_requests import (
    CALL,
    CALL_LIMITS,
    CERTIFICATE,
    REQUEST_LIMITS,
    Call,
    CallStep,
    CertificateRequest,
)
from neuroshard.state.transfer_messages import StageName
from neuroshard.types import LayerRange, RunId
from tests.fuzz.message_targets import head, read_frame, written
from tests.fuzz.target import Target
from tests.worlds.claims import identity_of

NOW = 1_700_000_000.0
HASH = "ab" * 32
NODES = [identity_of(number) for number in range(2)]
MEMBERS = tuple(sorted(GroupMember(one.node_id, one.wallet_id) for one in NODES))
STAGE = StageName(RunId("1" * 64), LayerRange(0, 2))


def check_round_message(data: bytes) -> None:
    """A message that is read has no other encoding, and its claims were verified."""
    try:
        message = read_round_message([data[:1], memoryview(data)[1:]] if len(data) % 2 else [data])
    except MalformedMessageError:
        return
    assert b"".join(encode_round_message(message)) == data
    if isinstance(message, IntentSaid | NewViewSaid | ProposalSaid | StatementSaid | ResultSaid | VoteSaid):
        assert message.signed.member in MEMBERS
        assert isinstance(message.signed.body, message.form)


def round_message_seeds() -> tuple[bytes, ...]:
    """One message of each kind."""
    value = Value(HASH, HASH, HASH, (HASH,), MEMBERS, (MEMBERS[0].node_id,), ((MEMBERS[1].node_id, "no"),), HASH, 7)
    slices = {0: b"zero", 5: b"", 63: bytes(300)}

    def votes(phase: Phase) -> Quorum:
        vote = Vote(HASH, 2, phase, value.digest)
        return Quorum(value, 2, phase, tuple(signed_by(one, vote, NOW) for one in NODES))

    intent = signed_by(NODES[0], Intent(HASH, 0, HASH, 100, 1000, 5), NOW)
    messages: tuple[Message, ...] = (
        IntentSaid(intent),
        NewViewSaid(signed_by(NODES[0], NewView(HASH, 1, (MEMBERS[1].node_id,)), NOW), votes(Phase.PREPARE)),
        ProposalSaid(signed_by(NODES[0], RoundProposal(HASH, 4, HASH, None), NOW), (intent,)),
        ContributionSent(HASH, MEMBERS[0].node_id, (bytes(32), b"x" * 32), slices),
        StatementSaid(signed_by(NODES[0], StatisticsDigests(HASH, ((0, HASH), (5, HASH))), NOW), slices),
        ResultSaid(signed_by(NODES[0], ResultDigests(HASH, ((0, HASH),)), NOW), slices),
        VoteSaid(signed_by(NODES[0], Vote(HASH, 0, Phase.COMMIT, HASH), NOW)),
        CertificateSaid(votes(Phase.COMMIT)),
        AggregateWanted(HASH, HASH, (0, 3)),
        AggregateSent(HASH, slices),
    )
    return tuple(b"".join(encode_round_message(message)) for message in messages)


def check_round_request(data: bytes) -> None:
    """The head of a part, a call and a request for a certificate: what is read can be sent again."""
    for kind, limits in ((PART, PART_LIMITS), (CALL, CALL_LIMITS), (CERTIFICATE, REQUEST_LIMITS)):
        frame = read_frame(kind, data, limits)
        if frame is not None:
            assert written(frame, limits) == frame
            if isinstance(frame.message, Call):
                assert 0 < len(frame.message.voters.nodes) <= 80


def round_request_seeds() -> tuple[bytes, ...]:
    """Good ones and wrong ones."""
    call = Call(STAGE, 3, HASH, MEMBERS, None, CallStep.ASK)
    requests: tuple[msgspec.Struct, ...] = (
        MessagePart(STAGE, 2**40, 0, 2**22),
        call,
        msgspec.structs.replace(call, roster=MEMBERS, step=CallStep.BEGIN),
        CertificateRequest(STAGE, HASH),
    )
    wrong = {**msgspec.to_builtins(call), "roster": []}
    return tuple(map(head, (*requests, wrong)))


TARGETS = (
    Target("round-message", check_round_message, round_message_seeds, short_inputs=1_000),
    Target("round-request", check_round_request, round_request_seeds, short_inputs=1_000),
)
