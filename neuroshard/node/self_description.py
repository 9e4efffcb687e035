"""What this node tells others about itself, made from its own status. Pure."""

from __future__ import annotations

from math import isfinite

from neuroshard.membership.announcements import Announcement
from neuroshard.membership.reports import MAX_LOSS, TrainingReport
from neuroshard.status.snapshot import NodeStatus
from neuroshard.types import RunId


def own_report(status: NodeStatus, run_id: RunId) -> TrainingReport:
    """The report for others, whose sequence and interval the reporter sets. Raises ValueError without a run."""
    if status.model is None:
        raise ValueError("a node without a run has nothing to report")
    training, diloco, data = status.training, status.diloco, status.data
    loss = training.loss_ema
    return TrainingReport(
        run_id=run_id,
        sequence=0,
        steps=training.steps,
        tokens=training.tokens,
        loss_ema=loss if loss is not None and isfinite(loss) and 0 <= loss <= MAX_LOSS else None,
        shard=data.shard if data else None,
        shards_seen=data.shards_seen if data else 0,
        roles=status.model.roles,
        layers=status.model.layers,
        outer_step=diloco.outer_steps,
        state_hash=diloco.state_root,
        successful_syncs=diloco.successful_syncs,
        failed_syncs=diloco.failed_syncs,
        tokens_per_second=training.tokens_per_second,
        state=status.state,
        started_at=status.started_at,
        interval_seconds=1.0,
        inherited_steps=training.inherited_steps,
        inherited_tokens=training.inherited_tokens,
        cached=data.shared if data else (),
    )


def own_announcement(
    status: NodeStatus, run_id: RunId, *, parameters_version: int, addresses: tuple[str, ...]
) -> Announcement:
    """The announcement for others."""
    return Announcement(
        run_id=run_id,
        parameters_version=parameters_version,
        layers=status.model.layers if status.model else None,
        addresses=addresses,
        pool=None,
        started_at=status.started_at,
        memory_tier_mb=status.memory.tier_mb if status.memory else 0,
        is_relay=False,
        version=status.version,
    )
