"""Requests between the replicas of a stage: the call to a round, and the request for a certificate.

One replica calls a round. It asks the replicas of its line whether they will take part, then sends the list of members
to those that agreed. A call is advice: the votes of the members make the round safe. A replica that has downloaded a
state requests the certificate that led to it, because the certificate names the voters of the next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from neuroshard.consensus.message_frames import MalformedMessageError, from_frame, limits_for, to_frame
from neuroshard.consensus.roster import GroupMember, Roster
from neuroshard.consensus.round_messages import (
    MAX_CALLED,
    MAX_MEMBERS,
    MAX_NODE_ID_CHARACTERS,
    CertificateSaid,
    Phase,
    Quorum,
    Vote,
)
from neuroshard.identity import hash_parts
from neuroshard.identity.strict_json import flag_field, hash_field, line_field, list_field, whole_field
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import RequestRefusedError, ScoreReason
from neuroshard.state.download import ReplicaClient, ask_replicas
from neuroshard.state.replica_status import ReplicaStatus, leading_line
from neuroshard.state.transfer_messages import (
    LARGEST_NUMBER,
    LyingDonorError,
    StageName,
    read_request_about,
    request_about,
)
from neuroshard.types import JsonValue, NodeId, WalletId

CALL = "round/call"
CALL_LIMITS = FrameLimits(max_header_bytes=32 * 1024)
ANSWER_LIMITS = FrameLimits(max_header_bytes=256)
LEAST_AHEAD = 1 / 16  # of the replicas; fewer are not worth the asking, as anybody can say that it is ahead


@dataclass(frozen=True)
class RoundTimes:
    """When a round is called; members are asked again and again, so every time is bounded."""

    look_seconds: float = 10.0  # from one look at the other replicas to the next
    near_seconds: float = 1.0  # the same when a round is near
    turn_seconds: float = 10.0  # after so long without a call it is the next one's turn to call
    patience_seconds: float = 30.0  # for replicas of the line that do not answer or are not ready
    newcomer_seconds: float = 180.0  # for who takes the state of a lone replica over, at each outer step
    promise_seconds: float = 15.0  # for the call to be completed
    retry_seconds: float = 5.0  # after a round that was abandoned; doubled from one to the next
    longest_retry_seconds: float = 300.0
    behind_seconds: float = 15.0  # a replica that is of another line than the others for so long follows them
    partition_seconds: float = 600.0  # without a quorum, until those who are left go on by themselves (DESIGN 4.5)


class CallStep(StrEnum):
    """What a call wants of its members."""

    ASK = "ask"  # will you take part?
    BEGIN = "begin"  # these take part
    CANCEL = "cancel"  # nothing comes of it


@dataclass(frozen=True)
class Promise:
    """To take part in a round once it is known with whom."""

    caller: NodeId
    until: float  # by the event loop's clock


@dataclass(frozen=True)
class Call:
    """What the caller says to each member."""

    outer_step: int
    root: str
    members: tuple[GroupMember, ...]  # with the caller; those that are asked, and then those that take part
    roster: tuple[GroupMember, ...] | None  # the voters; None: the members found a line, and all vote
    step: CallStep

    @property
    def voters(self) -> Roster:
        """Who votes in the round. Raises ValueError when two of them have one wallet."""
        return Roster(self.members, is_founding=True) if self.roster is None else Roster(self.roster)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The members' ids."""
        return tuple(member.node_id for member in self.members)


def call_frame(stage: StageName, call: Call) -> Frame:
    """The call as a request."""
    return request_about(
        CALL,
        stage,
        outer_step=call.outer_step,
        root=call.root,
        members=[[one.node_id, one.wallet_id] for one in call.members],
        roster=[[one.node_id, one.wallet_id] for one in call.roster or ()],
        founds=call.roster is None,
        step=call.step.value,
    )


def read_call(frame: Frame) -> tuple[StageName, Call]:
    """The call in a request. Raises RequestRefusedError."""
    stage, fields = read_request_about(frame, "outer_step", "root", "members", "roster", "founds", "step")
    try:
        roster, founds = _members(fields["roster"], "roster"), flag_field(fields["founds"], "founds")
        call = Call(
            outer_step=whole_field(fields["outer_step"], 0, LARGEST_NUMBER, "outer_step"),
            root=hash_field(fields["root"], "root"),
            members=_members(fields["members"], "members"),
            roster=None if founds else roster,
            step=CallStep(line_field(fields["step"], 16, "step")),
        )
        _ = call.voters  # raises when nobody votes
    except ValueError as error:
        raise RequestRefusedError(f"The call cannot be read: {error}.") from None
    return stage, call


def turn_order(stage: StageName, own: ReplicaStatus, nodes: Sequence[NodeId]) -> list[NodeId]:
    """Who calls before whom: another order for every outer step, the same for everybody."""
    return sorted(
        nodes, key=lambda node: hash_parts("neuroshard/round-call", stage.run_id, stage.layers.start, own.root, node)
    )


def ready_nodes(
    stage: StageName, self_id: NodeId, own: ReplicaStatus, others: Mapping[NodeId, ReplicaStatus]
) -> list[NodeId]:
    """Those who could take part now, in the order in which they call; without this node nobody.

    They are all of one's own line, first those with work: who has none can vote, and a certificate may name it.
    """
    if not own.root:
        return []
    fitting = {node: told for node, told in others.items() if told.is_live and told.line == own.line}
    here = {**fitting, self_id: own}
    return sorted(turn_order(stage, own, list(here)), key=lambda node: not here[node].sequences)


def members_of_call(
    caller: NodeId, ready: Sequence[NodeId], voters: Roster | None, most: int = MAX_MEMBERS
) -> list[NodeId]:
    """Whom the caller calls of those who are ready: all that vote, and others, a quarter more than `most` in all.

    So other ones are called from round to round. Those who found a line are `most` at most: all of them contribute.
    """
    if voters is None:
        return list(dict.fromkeys([caller, *ready]))[:most]
    voting = [node for node in ready if node in voters.nodes]
    return list(dict.fromkeys([caller, *voting, *ready]))[: most * 5 // 4]


def is_on_the_way(own: ReplicaStatus, others: Mapping[NodeId, ReplicaStatus]) -> bool:
    """Whether somebody is between one line and the next, so that nobody can tell which one the others go on with."""
    return own.in_round or any(other.is_live and other.in_round for other in others.values())


def must_follow(own: ReplicaStatus, others: Mapping[NodeId, ReplicaStatus], past: Collection[str] = ()) -> bool:
    """Whether this replica's state is not the one that the others go on with, so that it must take theirs over.

    Who still stands at a state that certificates lead on from to the own one, by the roots in `past`, comes after.
    """
    live = [other for other in others.values() if other.is_live]
    if not own.root or any(not other.root for other in live):
        return False
    live = [replace(other, outer_step=own.outer_step, root=own.root) if other.root in past else other for other in live]
    line = leading_line([own, *live])
    if line == own.line:
        return own.steps == 0 and any(other.steps > 0 for other in live if other.line == line)
    return any(other.steps > 0 for other in live if other.line == line)


def may_have_missed(own: ReplicaStatus, others: Mapping[NodeId, ReplicaStatus]) -> bool:
    """Whether a round from the own state may have ended without this replica although most have it: they take turns."""
    live = [other for other in others.values() if other.is_live]
    ahead = sum(other.is_certified and other.outer_step > own.outer_step for other in live)
    return ahead > len(live) * LEAST_AHEAD


def _members(value: JsonValue, where: str) -> tuple[GroupMember, ...]:
    pairs = [list_field(one, 2, where) for one in list_field(value, MAX_CALLED, where)]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{where} must be pairs of node and wallet")
    return tuple(
        GroupMember(NodeId(line_field(node, MAX_NODE_ID_CHARACTERS, where)), WalletId(line_field(wallet, 16, where)))
        for node, wallet in pairs
    )


CERTIFICATE = "round/certificate"
REQUEST_LIMITS = FrameLimits(max_header_bytes=1024)
ANSWER_SECONDS = 10.0
MOST_ASKED = 16


def read_certificate_request(frame: Frame) -> tuple[StageName, str]:
    """The stage and the hex root whose certificate is wanted. Raises RequestRefusedError."""
    stage, fields = read_request_about(frame, "root")
    try:
        return stage, hash_field(fields["root"], "root")
    except ValueError as error:
        raise RequestRefusedError(f"The request cannot be read: {error}.") from None


def certificate_answer(certificate: Quorum) -> Frame:
    """The answer of who has it."""
    return to_frame(CertificateSaid(certificate))


async def certificate_of(asking: ReplicaClient, stage: StageName, root: str, peers: Sequence[NodeId]) -> Quorum | None:
    """The certificate that led to this root, by the word of more than half of those nodes that know one.

    Its signatures are checked, but who votes there follows from the certificate before it: that the state is the right
    one is what most of its holders say, and so is this.
    """

    async def ask(peer: NodeId) -> Quorum:
        with asking.blaming(peer):
            answer = await asking.ask(peer, request_about(CERTIFICATE, stage, root=root), limits_for(0), ANSWER_SECONDS)
            return await asking.offload(lambda: _read(answer, root))

    found = await ask_replicas(list(peers)[:MOST_ASKED], ask)
    counted = Counter(certificate.value.digest for certificate in found.values()).most_common(1)
    if not counted or 2 * counted[0][1] <= len(found):
        return None
    return next(one for one in found.values() if one.value.digest == counted[0][0])


def _read(answer: Frame, root: str) -> Quorum:
    """Raises LyingDonorError for anything but a certificate that led to this root."""
    try:
        message = from_frame(answer)
    except MalformedMessageError as error:
        raise LyingDonorError(error.message, ScoreReason.MALFORMED_FRAME) from None
    certificate = message.certificate if isinstance(message, CertificateSaid) else None
    if certificate is None or certificate.phase is not Phase.COMMIT or certificate.value.next_root != root:
        raise LyingDonorError("Its answer is not the certificate that was asked for.")
    value, votes = certificate.value, certificate.votes
    said = Vote(value.step_id, certificate.view, certificate.phase, value.digest)
    if not votes or any(vote.body != said for vote in votes):
        raise LyingDonorError("Its certificate has votes for something else.")
    return certificate
