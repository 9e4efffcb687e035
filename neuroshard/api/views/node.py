"""Snapshot to answers about this node."""

from __future__ import annotations

from neuroshard.api.bodies.base import Layers
from neuroshard.api.bodies.node import (
    ArchitectureBody,
    CheckpointsBody,
    DataAnswer,
    DataBody,
    DilocoBody,
    HealthBody,
    MemoryBody,
    ModelBody,
    PipelineBody,
    ResourcesBody,
    RunBody,
    StageBody,
    StartupStageBody,
    StatusBody,
    TrainingBody,
    VerificationBody,
)
from neuroshard.api.views.network import network_body, peer_body, swarm_body
from neuroshard.status.snapshot import ModelStatus, NodeStatus
from neuroshard.types import LayerRange

STALE_SECONDS = 30.0  # the node publishes several times a second; this long without one means that it hangs
PEERS_IN_STATUS = 32  # the status is sent to every dashboard several times a second


def status_view(status: NodeStatus) -> StatusBody:
    """GET /api/status."""
    model = status.model
    return StatusBody(
        version=status.version,
        started_at=status.started_at,
        time=status.time,
        uptime_seconds=max(0.0, status.time - status.started_at),
        state=status.state,
        state_reason=status.state_reason,
        startup=[StartupStageBody.model_validate(stage) for stage in status.startup],
        node_id=status.node_id,
        wallet_id=status.wallet_id,
        data_dir=status.data_dir,
        is_demo=status.is_demo,
        paused_until=status.paused_until,
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
        swarm=swarm_body(status),
        peers=[peer_body(peer) for peer in status.peers[:PEERS_IN_STATUS]],
    )


def pipeline_view(status: NodeStatus) -> PipelineBody:
    """GET /api/pipeline: the distinct layer ranges that nodes hold are its stages."""
    if status.model is None:
        return PipelineBody(stages=[], layer_count=0, layers_covered=0, coverage=0.0, complete=False)
    layer_count = status.model.architecture.layer_count
    holders = _holders(status, status.model)
    stages = [
        StageBody(
            stage=index,
            layers=Layers.model_validate(layers),
            roles=list(layers.roles(layer_count)),
            holders=holders[layers],
        )
        for index, layers in enumerate(sorted(holders))
    ]
    covered = len({layer for layers in holders for layer in range(layers.start, min(layers.stop, layer_count))})
    return PipelineBody(
        stages=stages,
        layer_count=layer_count,
        layers_covered=covered,
        coverage=covered / layer_count if layer_count else 0.0,
        complete=covered == layer_count,
    )


def _holders(status: NodeStatus, model: ModelStatus) -> dict[LayerRange, list[str]]:
    """Node ids by the layers they hold, this node first."""
    holders: dict[LayerRange, list[str]] = {}
    if model.layers is not None:
        holders[model.layers] = [status.node_id or "this node"]
    for peer in status.peers:
        if peer.layers is not None:
            holders.setdefault(peer.layers, []).append(peer.node_id)
    return holders


def data_view(status: NodeStatus) -> DataAnswer:
    """GET /api/data."""
    return DataAnswer(data=DataBody.model_validate(status.data) if status.data else None)


def checkpoints_view(status: NodeStatus) -> CheckpointsBody:
    """GET /api/checkpoints."""
    return CheckpointsBody.model_validate(status.checkpoints)


def health_view(status: NodeStatus, now: float) -> HealthBody:
    """GET /health at the time `now`, seconds since the epoch."""
    age = max(0.0, now - status.time)
    return HealthBody(
        status="ok" if age <= STALE_SECONDS else "stale",
        state=status.state,
        version=status.version,
        snapshot_age_seconds=age,
    )
