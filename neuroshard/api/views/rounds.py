"""Snapshot to answers about certified rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from neuroshard.api.bodies.base import Layers
from neuroshard.api.bodies.rounds import (
    CertificateBody,
    ContributorBody,
    PhasesBody,
    RoundBody,
    RoundMemberBody,
    RoundsBody,
)
from neuroshard.api.views.training import hash_agreement_rate, sync_success_rate
from neuroshard.status.rounds import Contributor, RoundStatus, StageRoundsStatus
from neuroshard.status.snapshot import NodeStatus
from neuroshard.types import NodeId

Name = TypeVar("Name", bound=str)


def rounds_view(status: NodeStatus) -> RoundsBody:
    """GET /api/rounds."""
    stages = status.diloco.rounds
    rounds = [_round_body(stage, record) for stage in stages for record in stage.recent]
    contributors = [one for stage in stages for one in stage.contributors]
    return RoundsBody(
        rounds=sorted(rounds, key=lambda one: (one.ended_at or 0.0, one.stage), reverse=True),
        completed=sum(stage.completed for stage in stages),
        abandoned=summed(stage.abandoned for stage in stages),
        accepted=sum(stage.accepted for stage in stages),
        refused=summed(stage.refused for stage in stages),
        bytes_sent=sum(stage.bytes_sent for stage in stages),
        bytes_received=sum(stage.bytes_received for stage in stages),
        hash_agreement_rate=hash_agreement_rate(status),
        sync_success_rate=sync_success_rate(status.diloco),
        contributors=_contributor_bodies(contributors, status.node_id),
    )


def summed(counts: Iterable[Iterable[tuple[Name, int]]]) -> dict[Name, int]:
    """Counts by name, of all stages together."""
    total = Counter[Name]()
    for of_stage in counts:
        total.update(dict(of_stage))
    return dict(total)


def _round_body(stage: StageRoundsStatus, record: RoundStatus) -> RoundBody:
    certificate = record.certificate
    return RoundBody(
        stage=stage.stage,
        layers=Layers.model_validate(stage.layers),
        outer_step=record.outer_step,
        result="completed" if record.abandoned_for is None else "abandoned",
        abandoned_for=record.abandoned_for,
        reason=record.reason,
        is_late=record.is_late,
        ended_at=record.ended_at,
        seconds=record.seconds.total,
        phases=PhasesBody.model_validate(record.seconds),
        members=[RoundMemberBody.model_validate(one) for one in record.contributions],
        bytes_sent=record.bytes_sent,
        bytes_received=record.bytes_received,
        strategy=record.strategy,
        part=record.part,
        codec=record.codec,
        aggregator=record.aggregator,
        views=record.views,
        certificate=CertificateBody.model_validate(certificate) if certificate else None,
    )


def _contributor_bodies(contributors: Iterable[Contributor], own: NodeId | None) -> list[ContributorBody]:
    by_node: dict[NodeId, list[Contributor]] = {}
    for one in contributors:
        by_node.setdefault(one.node_id, []).append(one)
    bodies = [
        ContributorBody(
            node_id=node,
            wallet_id=parts[0].wallet_id,
            is_here=node == own,
            rounds=sum(one.rounds for one in parts),
            accepted=sum(one.accepted for one in parts),
            refused=sum(one.refused for one in parts),
            absent=sum(one.absent for one in parts),
        )
        for node, parts in by_node.items()
    ]
    return sorted(bodies, key=lambda one: (-one.rounds, one.node_id))
