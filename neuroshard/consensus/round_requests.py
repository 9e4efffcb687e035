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
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from neuroshard.consensus.roster import GroupMember, Roster
from neuroshard.consensus.round_messages import (
    MAX_CALLED,
    MAX_MEMBERS,
    OTHER_BYTES,
    CertificateSaid,
    MalformedMessageError,
    Phase,
    Quorum,
    Vote,
    encode_round_message,
    read_round_message,
)
from neuroshard.identity import hash_parts
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import ScoreReason
from neuroshard.state.download import ReplicaClient, ask_replicas
from neuroshard.state.replica_status import ReplicaStatus, leading_line
from neuroshard.state.transfer_messages import Count, LyingDonorError, StageName
from neuroshard.types import HexDigest, NodeId

LEAST_AHEAD = 1 / 16  # share of the replicas that must be ahead: any single one can claim to be


@dataclass(frozen=True)
class WorkToRound:
    """This replica's work towards the next round."""

    done: int  # sequences since the round before
    share: float  # sequences after which its part is done
    elapsed_seconds: float  # since the round before
    usual_seconds: float = 0.0  # per sequence, before the round; 0 if unknown

    @property
    def seconds_per_sequence(self) -> float:
        """Pace since the round before, or the usual one while nothing is done."""
        return self.elapsed_seconds / self.done if self.done else self.usual_seconds

    @property
    def seconds_left(self) -> float:
        """Expected seconds until the share is done; negative: since when it is.

        Nothing done for longer than usual will take at least as long again: the replica may be paused.
        """
        if not self.done:
            return max(self.share * self.usual_seconds - self.elapsed_seconds, self.elapsed_seconds)
        return (self.share - self.done) * self.seconds_per_sequence


@dataclass(frozen=True)
class RoundTimes:
    """Times of matchmaking. Members are asked again and again, so every wait is bounded."""

    look_seconds: float = 10.0  # between two status queries
    near_seconds: float = 1.0  # between two status queries when a round is near
    quick_seconds: float = 0.2  # the same when this replica's share of the work is done
    query_seconds: float = 0.02  # per replica: the least time between two of its status queries, for all of them
    turn_seconds: float = 10.0  # after this time without a call the next replica calls
    patience_seconds: float = 30.0  # for replicas of the line that do not answer or are not ready
    newcomer_seconds: float = 180.0  # for a node that downloads the state of a lone replica, per outer step
    promise_seconds: float = 15.0  # until the call is completed
    retry_seconds: float = 5.0  # after an abandoned round; doubles each time
    longest_retry_seconds: float = 300.0
    behind_seconds: float = 15.0  # a replica on another line than the others for this long follows them
    # without a quorum, until the remaining replicas continue on their own
    partition_seconds: float = 600.0

    def pause(self, work: WorkToRound, replicas: int) -> float:
        """Seconds until the next status query of this number of other replicas.

        A round may be due after two inner steps. So the next query comes when this replica should have done its share,
        and soon again while only others are missing.
        """
        quick = min(self.near_seconds, max(self.quick_seconds, self.query_seconds * replicas))
        left = work.seconds_left
        if left <= 0:
            return min(self.near_seconds, max(quick, -left / 10))  # the others may be much slower, or paused
        return min(self.near_seconds if 2 * work.done >= work.share else self.look_seconds, max(quick, left))


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


CalledMembers: TypeAlias = Annotated[tuple[GroupMember, ...], Meta(max_length=MAX_CALLED)]


class Call(Struct, frozen=True, forbid_unknown_fields=True):
    """A call to a round."""

    stage: StageName
    outer_step: Count
    root: HexDigest
    members: CalledMembers  # with the caller; first all that are asked, then those that take part
    roster: CalledMembers | None  # the voters; None if the members found a line, in which case all vote
    step: CallStep

    def __post_init__(self) -> None:
        _ = self.voters

    @property
    def voters(self) -> Roster:
        """The voters of the round. Raises ValueError if there are none, or one twice."""
        return Roster(self.members, is_founding=True) if self.roster is None else Roster(self.roster)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The members' node ids."""
        return tuple(member.node_id for member in self.members)


CALL = "round/call"
CALL_LIMITS = FrameLimits(max_header_bytes=32 * 1024, message=Call)


def turn_order(stage: StageName, own: ReplicaStatus, nodes: Sequence[NodeId]) -> list[NodeId]:
    """The order in which replicas call: a different one for every outer step, the same on every node."""
    return sorted(
        nodes, key=lambda node: hash_parts("neuroshard/round-call", stage.run_id, stage.layers.start, own.root, node)
    )


def ready_nodes(
    stage: StageName, self_id: NodeId, own: ReplicaStatus, others: Mapping[NodeId, ReplicaStatus]
) -> list[NodeId]:
    """The replicas that could take part now, in the order in which they call; empty if this node cannot.

    All are on this node's line; first those with more than half of the most work. A replica without work can still
    vote, and a certificate may name it.
    """
    if not own.root:
        return []
    fitting = {node: other for node, other in others.items() if other.is_live and other.line == own.line}
    here = {**fitting, self_id: own}
    most = max(each.sequences for each in here.values())
    # a replica that trains little looks rarely, so the others would wait for its call
    return sorted(turn_order(stage, own, list(here)), key=lambda node: 2 * here[node].sequences <= most)


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


class CertificateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests the certificate that led to the state with this root."""

    stage: StageName
    root: HexDigest


class CertificateAnswer(Struct, frozen=True, forbid_unknown_fields=True):
    """The certificate is the frame's tensor: its bytes as a message of a round."""


CERTIFICATE = "round/certificate"
REQUEST_LIMITS = FrameLimits(max_header_bytes=1024, message=CertificateRequest)
CERTIFICATE_LIMITS = FrameLimits(max_header_bytes=1024, max_body_bytes=OTHER_BYTES, message=CertificateAnswer)
ANSWER_SECONDS = 10.0
MOST_ASKED = 16


def certificate_answer(certificate: Quorum) -> Frame:
    """The answer with the certificate."""
    data = b"".join(encode_round_message(CertificateSaid(certificate)))
    part = TensorPart(TensorSpec("certificate", "uint8", (len(data),)), data)
    return Frame(CERTIFICATE, CertificateAnswer(), (part,))


async def certificate_of(asking: ReplicaClient, stage: StageName, root: str, peers: Sequence[NodeId]) -> Quorum | None:
    """The certificate that led to this root, as reported by more than half of the nodes that have one.

    Its signatures are verified, but its voters follow from the certificate before it. So, like the state itself, it
    is trusted because most of its holders report it.
    """

    async def ask(peer: NodeId) -> Quorum:
        with asking.blaming(peer):
            request = Frame(CERTIFICATE, CertificateRequest(stage, root))
            answer = await asking.ask(peer, request, CERTIFICATE_LIMITS, ANSWER_SECONDS)
            return await asking.offload(lambda: _read(answer, root))

    found = await ask_replicas(list(peers)[:MOST_ASKED], ask)
    counted = Counter(certificate.value.digest for certificate in found.values()).most_common(1)
    if not counted or 2 * counted[0][1] <= len(found):
        return None
    return next(one for one in found.values() if one.value.digest == counted[0][0])


def _read(answer: Frame, root: str) -> Quorum:
    """Raises LyingDonorError for anything except a certificate that led to this root."""
    try:
        message = read_round_message([part.data for part in answer.tensors])
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
