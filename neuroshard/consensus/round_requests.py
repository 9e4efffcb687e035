"""Requests between the replicas of a stage: the call to a round, and the request for a certificate.

One replica calls a round. It asks the replicas of its line whether they will take part, then sends the list of
members to those that agreed. A call is advice: the votes of the members make the round safe. A replica that has
downloaded a state requests the certificate that led to it, because the certificate names the voters of the next
step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from neuroshard.consensus.message_frames import MalformedMessageError, from_frame, limits_for, to_frame
from neuroshard.consensus.roster import MAX_WALLET_ID_CHARACTERS, GroupMember, Roster
from neuroshard.consensus.round_messages import (
    MAX_CALLED,
    MAX_MEMBERS,
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
from neuroshard.types import MAX_NODE_ID_CHARACTERS, JsonValue, NodeId, WalletId

CALL = "round/call"
CALL_LIMITS = FrameLimits(max_header_bytes=32 * 1024)
ANSWER_LIMITS = FrameLimits(max_header_bytes=256)
LEAST_AHEAD = 1 / 16  # share of the replicas that must be ahead: any single one can claim to be


@dataclass(frozen=True)
class RoundTimes:
    """Times of matchmaking. Members are asked again and again, so every wait is bounded."""

    look_seconds: float = 10.0  # between two status queries
    near_seconds: float = 1.0  # between two status queries when a round is near
    turn_seconds: float = 10.0  # after this time without a call the next replica calls
    patience_seconds: float = 30.0  # for replicas of the line that do not answer or are not ready
    newcomer_seconds: float = 180.0  # for a node that downloads the state of a lone replica, per outer step
    promise_seconds: float = 15.0  # until the call is completed
    retry_seconds: float = 5.0  # after an abandoned round; doubles each time
    longest_retry_seconds: float = 300.0
    behind_seconds: float = 15.0  # a replica on another line than the others for this long follows them
    # without a quorum, until the remaining replicas continue on their own
    partition_seconds: float = 600.0


class CallStep(StrEnum):
    """The step of a call."""

    ASK = "ask"  # asks whether the replica will take part
    BEGIN = "begin"  # sends the final list of members
    CANCEL = "cancel"  # withdraws the call


@dataclass(frozen=True)
class Promise:
    """A promise to take part in a round whose members are not known yet."""

    caller: NodeId
    until: float  # by the event loop's clock


@dataclass(frozen=True)
class Call:
    """The content of a call."""

    outer_step: int
    root: str
    members: tuple[GroupMember, ...]  # with the caller; first all that are asked, then those that take part
    roster: tuple[GroupMember, ...] | None  # the voters; None if the members found a line, in which case all vote
    step: CallStep

    @property
    def voters(self) -> Roster:
        """The voters of the round. Raises ValueError if two of them have one wallet."""
        return Roster(self.members, is_founding=True) if self.roster is None else Roster(self.roster)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The members' node ids."""
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
    """Parse the call in a request. Raises RequestRefusedError."""
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
        _ = call.voters  # raises if there is no voter
    except ValueError as error:
        raise RequestRefusedError(f"The call cannot be read: {error}.") from None
    return stage, call


def turn_order(stage: StageName, own: ReplicaStatus, nodes: Sequence[NodeId]) -> list[NodeId]:
    """The order in which replicas call: a different one for every outer step, the same on every node."""
    return sorted(
        nodes, key=lambda node: hash_parts("neuroshard/round-call", stage.run_id, stage.layers.start, own.root, node)
    )


def ready_nodes(
    stage: StageName, self_id: NodeId, own: ReplicaStatus, others: Mapping[NodeId, ReplicaStatus]
) -> list[NodeId]:
    """The replicas that could take part now, in the order in which they call; empty if this node cannot.

    All are on this node's line, replicas with work first. A replica without work can still vote, and a certificate
    may name it.
    """
    if not own.root:
        return []
    fitting = {node: other for node, other in others.items() if other.is_live and other.line == own.line}
    here = {**fitting, self_id: own}
    return sorted(turn_order(stage, own, list(here)), key=lambda node: not here[node].sequences)


def members_of_call(
    caller: NodeId, ready: Sequence[NodeId], voters: Roster | None, most: int = MAX_MEMBERS
) -> list[NodeId]:
    """The ready replicas that are called: all voters and some others, a quarter more than `most` in total.

    So other replicas are called from round to round. A founding call has at most `most` members, because all of them
    contribute.
    """
    if voters is None:
        return list(dict.fromkeys([caller, *ready]))[:most]
    voting = [node for node in ready if node in voters.nodes]
    return list(dict.fromkeys([caller, *voting, *ready]))[: most * 5 // 4]


def is_on_the_way(own: ReplicaStatus, others: Mapping[NodeId, ReplicaStatus]) -> bool:
    """Whether a replica is between one line and the next, so that it is unknown which line the others will follow."""
    return own.in_round or any(other.is_live and other.in_round for other in others.values())


def must_follow(own: ReplicaStatus, others: Mapping[NodeId, ReplicaStatus], past: Collection[str] = ()) -> bool:
    """Whether the other replicas continue from another state, so that this replica must adopt theirs.

    A replica at an earlier state of this replica's line, by the roots in `past`, is behind and does not count.
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
    """Whether a round from this state may have ended without this replica, because replicas take turns."""
    live = [other for other in others.values() if other.is_live]
    ahead = sum(other.is_certified and other.outer_step > own.outer_step for other in live)
    return ahead > len(live) * LEAST_AHEAD


def _members(value: JsonValue, where: str) -> tuple[GroupMember, ...]:
    pairs = [list_field(one, 2, where) for one in list_field(value, MAX_CALLED, where)]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"{where} must be pairs of node and wallet")
    return tuple(
        GroupMember(
            NodeId(line_field(node, MAX_NODE_ID_CHARACTERS, where)),
            WalletId(line_field(wallet, MAX_WALLET_ID_CHARACTERS, where)),
        )
        for node, wallet in pairs
    )


CERTIFICATE = "round/certificate"
REQUEST_LIMITS = FrameLimits(max_header_bytes=1024)
ANSWER_SECONDS = 10.0
MOST_ASKED = 16


def read_certificate_request(frame: Frame) -> tuple[StageName, str]:
    """Parse the stage and the hex root whose certificate is requested. Raises RequestRefusedError."""
    stage, fields = read_request_about(frame, "root")
    try:
        return stage, hash_field(fields["root"], "root")
    except ValueError as error:
        raise RequestRefusedError(f"The request cannot be read: {error}.") from None


def certificate_answer(certificate: Quorum) -> Frame:
    """The answer with the certificate."""
    return to_frame(CertificateSaid(certificate))


async def certificate_of(asking: ReplicaClient, stage: StageName, root: str, peers: Sequence[NodeId]) -> Quorum | None:
    """The certificate that led to this root, as reported by more than half of the nodes that have one.

    Its signatures are verified, but its voters follow from the certificate before it. So, like the state itself, it
    is trusted because most of its holders report it.
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
    """Raises LyingDonorError for anything except a certificate that led to this root."""
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
