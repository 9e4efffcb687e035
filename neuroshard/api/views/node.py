"""Snapshot to answers about this node."""

from __future__ import annotations

from neuroshard.api.bodies.base import Layers
from neuroshard.api.bodies.contribution import WorkBody
from neuroshard.api.bodies.data import DataAnswer, DataBody
from neuroshard.api.bodies.node import (
    ArchitectureBody,
    CheckpointsBody,
    DilocoBody,
    HealthBody,
    KindnessBody,
    MemoryBody,
    ModelBody,
    PathsBody,
    ResourcesBody,
    RunBody,
    StartupStageBody,
    StatusBody,
    TrainingBody,
    VerificationBody,
)
from neuroshard.api.views.network import network_body, peer_body, swarm_body
from neuroshard.api.views.pipeline import pipeline_summary
from neuroshard.status.snapshot import NodeStatus

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
        startup=[StartupStageBody.model_validate(stage) for stage in status.startup],
        node_id=status.node_id,
        wallet_id=status.wallet_id,
        data_dir=status.data_dir,
        paths=PathsBody.model_validate(status.paths),
        is_demo=status.is_demo,
        paused_until=status.paused_until,
        kindness=KindnessBody.model_validate(status.kindness),
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
