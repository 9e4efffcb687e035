"""Snapshots of nodes that agree with others in rounds: all well, refusals, rounds in vain, two stages."""

from __future__ import annotations

import time
from dataclasses import replace
from hashlib import sha256

import snapshots
from swarm_snapshots import among, peer_id

from neuroshard.consensus.round_status import with_round
from neuroshard.status.rounds import (
    AbandonReason,
    CertificateStatus,
    MemberPart,
    PhaseSeconds,
    RoundContribution,
    RoundStatus,
    StageRoundsStatus,
)
from neuroshard.status.snapshot import NodeStatus
from neuroshard.types import LayerRange, NodeId, WalletId

ME = snapshots.training().node_id or NodeId("")
ROOT = "5a" * 32
BAD, GONE, SLOW = peer_id(2), peer_id(1), peer_id(3)
BROKEN_OFF = 11  # the round that came to nothing


def contribution(
    node: NodeId, part: MemberPart = MemberPart.ACCEPTED, refusal: str = "", reason: str = ""
) -> RoundContribution:
    return RoundContribution(node, WalletId(sha256(node.encode()).hexdigest()[:16]), part, refusal, reason)


def completed(number: int, *contributions: RoundContribution) -> RoundStatus:
    """The round of an outer step; a higher number is more recent."""
    return RoundStatus(
        outer_step=number,
        ended_at=time.time() - 60.0 * (12 - number) - 5,
        phases=PhaseSeconds(0.25, 1.5 + number % 3, 0.5),
        members=contributions or (contribution(ME), contribution(GONE), contribution(BAD)),
        bytes_sent=18_900_000,
        bytes_received=17_400_000,
        strategy="streaming",
        part=f"quarter {number % 4 + 1} of 4",
        codec="int8",
        aggregator="trimmed_mean(0.2)",
        certificate=CertificateStatus(sha256(b"%d" % number).hexdigest()[:16], 3, 3),
    )


def abandoned(number: int, kind: AbandonReason = AbandonReason.NO_ANSWER) -> RoundStatus:
    """A round in vain, told with all who were called."""
    called = tuple(contribution(node, MemberPart.UNJUDGED) for node in (ME, GONE, BAD))
    return replace(
        completed(number, *called),
        phases=PhaseSeconds(40.0, 0.0, 0.0),
        certificate=None,
        abandoned_for=kind,
        reason="too few members answered in time",
    )


def with_rounds(*records: RoundStatus, stages: int = 1) -> NodeStatus:
    """A node among three others whose stages all had these rounds."""
    told: list[StageRoundsStatus] = []
    for index in range(stages):
        rounds = StageRoundsStatus(index, LayerRange(3 * index, 3 * index + 3) if stages > 1 else LayerRange(0, 6))
        for record in records:
            rounds = with_round(rounds, replace(record, ended_at=record.ended_at + index))
        told.append(rounds)
    status = among(3)
    diloco = replace(
        status.diloco,
        members=3,
        outer_steps=len(records),
        strategy="streaming",
        part=f"quarter {len(records) % 4 + 1} of 4",
        codec="int8",
        explanation="The last round had 3 members.",
        state_root=ROOT,
        certified_root=ROOT,
        rounds=tuple(told),
    )
    return replace(status, diloco=diloco)


def agreeing() -> NodeStatus:
    """Two rounds in which everybody's work counted."""
    return with_rounds(completed(10), completed(11))


def eventful() -> NodeStatus:
    """One member was refused, one had done too little, one sent nothing, one round was in vain, one ended late."""
    far = "its norm is far from the median norm"
    refused = completed(
        10,
        contribution(ME),
        contribution(GONE, MemberPart.ABSENT),
        contribution(BAD, MemberPart.REFUSED, "norm", far),
        contribution(SLOW, MemberPart.ABSTAINED),
    )
    late = replace(completed(12), is_late=True, views=2)
    return with_rounds(*(completed(number) for number in range(10)), refused, abandoned(BROKEN_OFF), late)


def in_vain() -> NodeStatus:
    """Every round so far was abandoned, each for another reason."""
    return with_rounds(*(abandoned(number + 9, kind) for number, kind in enumerate(AbandonReason)))


def in_two_stages() -> NodeStatus:
    """This node holds two stages, which agree by themselves."""
    return with_rounds(completed(10), completed(11), stages=2)


def crowded() -> NodeStatus:
    """A round of 64 of whom most sent nothing."""
    parts = [contribution(peer_id(number), MemberPart.ABSENT) for number in range(40)]
    parts += [contribution(peer_id(number)) for number in range(40, 63)]
    return with_rounds(*(completed(number, contribution(ME), *parts) for number in range(12)))
