"""Snapshots of a node that has agreed with others in rounds."""

from __future__ import annotations

from dataclasses import replace

from fake_node import STARTED
from swarm_samples import among, peer

from neuroshard.status.rounds import (
    AbandonReason,
    CertificateStatus,
    Contributor,
    MemberPart,
    PhaseSeconds,
    RoundContribution,
    RoundStatus,
    StageRoundsStatus,
)
from neuroshard.status.snapshot import DilocoStatus, NodeStatus
from neuroshard.types import LayerRange, NodeId, WalletId

ME, WALLET = NodeId("12D3KooWtest"), WalletId("0123456789abcdef")
FIRST, SECOND = peer(0), peer(1)
FAR = "its norm is far from the median norm"

COMPLETED = RoundStatus(
    outer_step=3,
    ended_at=STARTED + 50,
    phases=PhaseSeconds(gather=0.25, exchange=1.5, vote=0.25),
    members=(
        RoundContribution(FIRST.node_id, FIRST.wallet_id, MemberPart.ACCEPTED),
        RoundContribution(SECOND.node_id, SECOND.wallet_id, MemberPart.REFUSED, "norm", FAR),
        RoundContribution(ME, WALLET, MemberPart.ACCEPTED),
    ),
    bytes_sent=4_000,
    bytes_received=3_000,
    strategy="streaming",
    part="quarter 4 of 4",
    codec="int8",
    aggregator="trimmed_mean(0.2)",
    views=2,
    certificate=CertificateStatus("0123456789abcdef", 3, 3),
)
ABANDONED = replace(
    COMPLETED,
    outer_step=4,
    ended_at=STARTED + 58,
    certificate=None,
    abandoned_for=AbandonReason.NO_ANSWER,
    reason="too few members answered in time",
)
FIRST_STAGE = StageRoundsStatus(
    0,
    LayerRange(0, 4),
    (COMPLETED, ABANDONED),
    completed=4,
    abandoned=((AbandonReason.NO_ANSWER, 1),),
    accepted=8,
    refused=(("norm", 4),),
    bytes_sent=20_000,
    bytes_received=15_000,
    contributors=(
        Contributor(SECOND.node_id, SECOND.wallet_id, accepted=0, refused=4),
        Contributor(FIRST.node_id, FIRST.wallet_id, accepted=4),
        Contributor(ME, WALLET, accepted=4),
    ),
)
SECOND_STAGE = StageRoundsStatus(
    1,
    LayerRange(4, 8),
    (replace(COMPLETED, ended_at=STARTED + 55),),
    completed=1,
    abandoned=((AbandonReason.NO_ANSWER, 2), (AbandonReason.STORAGE, 1)),
    accepted=1,
    refused=(("norm", 1), ("zero", 1)),
    bytes_sent=1_000,
    bytes_received=1_000,
    contributors=(Contributor(FIRST.node_id, FIRST.wallet_id, accepted=1, absent=2),),
)


def after_rounds(*stages: StageRoundsStatus) -> NodeStatus:
    """A node among others whose stages had these rounds."""
    root = "aa" * 32
    diloco = DilocoStatus(outer_steps=2, state_root=root, certified_root=root, members=3, rounds=stages)
    return replace(among(2), diloco=diloco)
