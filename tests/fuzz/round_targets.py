"""Readers of what the members of a round send each other: the messages of a round, and the requests around it."""

from __future__ import annotations

from contextlib import suppress

import msgspec
from msgspec import structs

from neuroshard.consensus.chain import ChainProof, Step
from neuroshard.consensus.committee import Admit, Bar, GroupMember, Leave
from neuroshard.consensus.foundation import Foundation, Foundations, SignedFoundation, StageStart
from neuroshard.consensus.message_queue import PART, PART_LIMITS, MessagePart
from neuroshard.consensus.round_messages import (
    AggregateSent,
    AggregateWanted,
    CertificateSaid,
    ChoicesSaid,
    ContributionSent,
    Departure,
    EntryEvidence,
    EvidenceSaid,
    Intent,
    IntentSaid,
    MalformedMessageError,
    Message,
    NewView,
    NewViewSaid,
    OuterChoice,
    Phase,
    ProposalSaid,
    Quorum,
    ReducerFaults,
    ResultDigests,
    ResultSaid,
    RoundProposal,
    StatementSaid,
    StatisticsDigests,
    Vote,
    VoteSaid,
    encode_round_message,
    read_round_message,
    signed_by,
)
from neuroshard.consensus.stage_chain import CHAIN, CHAIN_LIMITS, ChainRequest
from neuroshard.decoders import msgpack_decoder
from neuroshard.errors import DataError
from neuroshard.identity.claims import sign_message
from neuroshard.state.transfer_messages import StageName
from neuroshard.types import LayerRange, RunId
from tests.fuzz.message_targets import head, read_frame, written
from tests.fuzz.target import Target
from tests.worlds.claims import identity_of
from tests.worlds.rounds import chain_of, value_of

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
    value = value_of(
        aggregate=(HASH,),
        members=MEMBERS,
        accepted=(MEMBERS[0].node_id,),
        refused=((MEMBERS[1].node_id, "no"),),
        choices=((MEMBERS[0].node_id, 2),),
        entries=(Leave(MEMBERS[0].wallet_id), Admit(MEMBERS[1].wallet_id, MEMBERS[1].node_id), Bar(MEMBERS[1].node_id)),
    )
    slices = {0: b"zero", 5: b"", 63: bytes(300)}

    def votes(phase: Phase) -> Quorum:
        vote = Vote(HASH, 2, phase, value.digest)
        return Quorum(value, 2, phase, tuple(signed_by(one, vote, NOW) for one in NODES))

    intent = signed_by(NODES[0], Intent(HASH, 0, HASH, 100, 1000, 60, 5), NOW)
    messages: tuple[Message, ...] = (
        IntentSaid(intent),
        NewViewSaid(signed_by(NODES[0], NewView(HASH, 1, (MEMBERS[1].node_id,)), NOW), votes(Phase.PREPARE)),
        ProposalSaid(signed_by(NODES[0], RoundProposal(HASH, 4, HASH, None), NOW), (intent,)),
        ContributionSent(HASH, MEMBERS[0].node_id, (bytes(32), b"x" * 32), slices),
        StatementSaid(signed_by(NODES[0], StatisticsDigests(HASH, ((0, HASH), (5, HASH))), NOW), slices),
        ResultSaid(signed_by(NODES[0], ResultDigests(HASH, ((0, HASH),), HASH), NOW), slices),
        EvidenceSaid(
            EntryEvidence(
                (signed_by(NODES[0], Departure(HASH), NOW),),
                faults=(signed_by(NODES[0], ReducerFaults(HASH, (MEMBERS[1].node_id,)), NOW),),
            )
        ),
        ChoicesSaid(tuple(signed_by(one, OuterChoice(HASH, 1), NOW) for one in NODES)),
        VoteSaid(signed_by(NODES[0], Vote(HASH, 0, Phase.COMMIT, HASH), NOW)),
        CertificateSaid(votes(Phase.COMMIT)),
        AggregateWanted(HASH, HASH, (0, 3)),
        AggregateSent(HASH, slices),
    )
    return tuple(b"".join(encode_round_message(message)) for message in messages)


def check_round_request(data: bytes) -> None:
    """The head of a part and a request for a chain: what is read can be sent again."""
    for kind, limits in ((PART, PART_LIMITS), (CHAIN, CHAIN_LIMITS)):
        frame = read_frame(kind, data, limits)
        if frame is not None:
            assert written(frame, limits) == frame


def round_request_seeds() -> tuple[bytes, ...]:
    """Good ones and wrong ones."""
    requests: tuple[msgspec.Struct, ...] = (MessagePart(STAGE, 2**40, 0, 2**22), ChainRequest(STAGE, HASH))
    wrong = {"stage": msgspec.to_builtins(STAGE), "statement": "near"}
    return tuple(map(head, (*requests, wrong)))


def check_chain(data: bytes) -> None:
    """A proof or a foundation that is read has verified votes; it is believed only from its foundation on."""
    for form in (ChainProof, SignedFoundation):
        try:
            read = msgpack_decoder(form).decode(data)
        except (ValueError, RecursionError):
            continue
        if isinstance(read, ChainProof):
            with suppress(DataError):
                assert chain_of(MEMBERS).proven(read).standing.height <= 1
        else:
            try:
                Foundations("1" * 64, bytes(32)).with_statements([read])
            except DataError:
                continue
            raise AssertionError("a foundation of another owner was accepted")


def chain_seeds() -> tuple[bytes, ...]:
    """A proof of one value, and a foundation."""
    chain = chain_of(MEMBERS)
    start = StageStart(0, chain.ledger.committee)
    foundation = Foundation("1" * 64, 0, (start,))
    signed = SignedFoundation(sign_message(NODES[0].key, "foundation", foundation), NODES[0].key.public_key)
    step = Step(RunId("1" * 64), 0, 0, HASH, "terms", chain.standing, chain.ledger, chain.owner)
    value = step.completed(structs.replace(step.first_value(), outer_step=1, next_root=HASH))
    vote = Vote(value.step_id, 0, Phase.COMMIT, value.digest)
    certificate = Quorum(value, 0, Phase.COMMIT, tuple(signed_by(one, vote, NOW) for one in NODES))
    return tuple(msgspec.msgpack.encode(one) for one in (chain.extended(certificate).proof(), chain.proof(), signed))


TARGETS = (
    Target("round-message", check_round_message, round_message_seeds, short_inputs=1_000),
    Target("round-request", check_round_request, round_request_seeds, short_inputs=1_000),
    Target("chain", check_chain, chain_seeds, short_inputs=1_000),
)
