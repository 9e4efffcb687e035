"""Views of this node: pure functions from the snapshot to the answers on status, data, network and contribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import isnan
from typing import Final

from neuroshard.api.bodies.node import (
    ArchitectureBody,
    CheckpointsBody,
    DataAnswer,
    DataBody,
    DilocoBody,
    HealthBody,
    MemoryBody,
    ModelBody,
    NetworkBody,
    OwnerPolicyBody,
    PathsBody,
    PeerBody,
    PeerRating,
    PeersBody,
    ResourcesBody,
    RunBody,
    SamplesBody,
    SpanName,
    StartupStepBody,
    StatusBody,
    SwarmBody,
    TrainingBody,
    VerificationBody,
    WorkBody,
    WorkHistoryBody,
)
from neuroshard.api.rendering import Layers, View, encodable
from neuroshard.api.views.training import pipeline_summary
from neuroshard.status.history import WorkSpan
from neuroshard.status.snapshot import NodeStatus, PeerStatus

BANNED_BELOW = -100.0
BAD_BELOW = -50.0
ROUNDING = 1.0  # a score this close to 0 says nothing


def peers_view(status: NodeStatus) -> PeersBody:
    """GET /api/peers."""
    return PeersBody(
        count=len(status.peers),
        network=network_body(status),
        swarm=swarm_body(status),
        peers=[peer_body(peer) for peer in status.peers],
    )


def network_body(status: NodeStatus) -> NetworkBody:
    """This node's connections."""
    network = status.network
    return NetworkBody.model_validate(
        {**vars(network), "peers": len(status.peers), "refused": refusals(network.refused)}
    )


def swarm_body(status: NodeStatus) -> SwarmBody | None:
    """All nodes together, once the node has looked around."""
    return SwarmBody.model_validate(status.swarm) if status.swarm else None


def peer_body(peer: PeerStatus) -> PeerBody:
    """One other node."""
    return PeerBody.model_validate({**vars(peer), "role": "+".join(peer.roles), "standing": standing(peer.score)})


def standing(score: float) -> PeerRating:
    """A score in a word; a number that says nothing is neutral."""
    if isnan(score) or abs(score) < ROUNDING:
        return PeerRating.NEUTRAL
    if score > 0:
        return PeerRating.GOOD
    if score < BANNED_BELOW:
        return PeerRating.BANNED
    return PeerRating.BAD if score < BAD_BELOW else PeerRating.DOUBTFUL


def refusals(refused: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """How often something was refused, by reason."""
    counts: Counter[str] = Counter()
    for reason, count in refused:
        counts[encodable(reason)] += count
    return dict(counts)


STALE_SECONDS = 30.0  # the node publishes several times a second; this long without one means that it hangs
PEERS_IN_STATUS = 32  # the status is sent to every dashboard several times a second


def status_view(status: NodeStatus) -> StatusBody:
    """GET /api/status."""
    model = status.model
    return StatusBody(
        version=status.version,
        started_at=status.started_at,
        time=status.time,
        uptime_seconds=status.uptime_seconds,
        state=status.state,
        state_reason=status.state_reason,
        is_standing_by=status.is_standing_by,
        startup=[StartupStepBody.model_validate(stage) for stage in status.startup],
        node_id=status.node_id,
        wallet_id=status.wallet_id,
        data_dir=status.data_dir,
        paths=PathsBody.model_validate(status.paths),
        is_demo=status.is_demo,
        paused_until=status.paused_until,
        kindness=OwnerPolicyBody.model_validate(status.kindness),
        warnings=list(status.warnings),
        roles=list(model.roles) if model else [],
        layers=Layers.model_validate(model.layers) if model and model.layers else None,
        device=status.resources.device,
        architecture=ArchitectureBody.model_validate(model.architecture) if model else None,
        model=ModelBody.model_validate(model) if model else None,
        memory=MemoryBody.model_validate(status.memory) if status.memory else None,
        run=RunBody.model_validate(status.run) if status.run else None,
        training=TrainingBody.model_validate(status.training),
        verification=VerificationBody.model_validate(status.verification),
        diloco=DilocoBody.model_validate(status.diloco),
        data=DataBody.model_validate(status.data) if status.data else None,
        checkpoints=checkpoints_view(status),
        resources=ResourcesBody.model_validate(status.resources),
        network=network_body(status),
        pipeline=pipeline_summary(status),
        swarm=swarm_body(status),
        contribution=WorkBody.model_validate(total) if (total := status.contribution.total) else None,
        peers=[peer_body(peer) for peer in status.peers[:PEERS_IN_STATUS]],
    )


def data_view(status: NodeStatus) -> DataAnswer:
    """GET /api/data."""
    return DataAnswer(data=DataBody.model_validate(status.data) if status.data else None)


def checkpoints_view(status: NodeStatus) -> CheckpointsBody:
    """GET /api/checkpoints."""
    return CheckpointsBody.model_validate(status.checkpoints)


def health_view(status: NodeStatus, age_seconds: float) -> HealthBody:
    """GET /health when the newest snapshot is so old."""
    return HealthBody(
        status="ok" if age_seconds <= STALE_SECONDS else "stale",
        state=status.state,
        version=status.version,
        snapshot_age_seconds=age_seconds,
    )


def day_view(status: NodeStatus) -> WorkHistoryBody:
    """GET /api/contribution?span=day."""
    return _body(status, "day", status.contribution.day)


def week_view(status: NodeStatus) -> WorkHistoryBody:
    """GET /api/contribution?span=week."""
    return _body(status, "week", status.contribution.week)


def all_view(status: NodeStatus) -> WorkHistoryBody:
    """GET /api/contribution?span=all."""
    return _body(status, "all", status.contribution.all)


def samples_view(status: NodeStatus) -> SamplesBody:
    """GET /api/samples."""
    return SamplesBody.model_validate(status.samples)


VIEW_OF_SPAN: Final[Mapping[SpanName, View]] = {"day": day_view, "week": week_view, "all": all_view}


def _body(status: NodeStatus, name: SpanName, span: WorkSpan) -> WorkHistoryBody:
    total = status.contribution.total
    return WorkHistoryBody(
        span=name,
        width_seconds=span.width_seconds,
        points=[WorkBody.model_validate(point) for point in span.points],
        total=None if total is None else WorkBody.model_validate(total),
    )
