"""Snapshot to answers about what this computer gave to training over time, and what the model wrote meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from neuroshard.api.bodies.contribution import ContributionBody, SamplesBody, SpanName, WorkBody
from neuroshard.api.rendering import View
from neuroshard.status.contribution import WorkSpan
from neuroshard.status.snapshot import NodeStatus


def day_view(status: NodeStatus) -> ContributionBody:
    """GET /api/contribution?span=day."""
    return _body(status, "day", status.contribution.day)


def week_view(status: NodeStatus) -> ContributionBody:
    """GET /api/contribution?span=week."""
    return _body(status, "week", status.contribution.week)


def all_view(status: NodeStatus) -> ContributionBody:
    """GET /api/contribution?span=all."""
    return _body(status, "all", status.contribution.all)


def samples_view(status: NodeStatus) -> SamplesBody:
    """GET /api/samples."""
    return SamplesBody.model_validate(status.samples)


VIEW_OF_SPAN: Final[Mapping[SpanName, View]] = {"day": day_view, "week": week_view, "all": all_view}


def _body(status: NodeStatus, name: SpanName, span: WorkSpan) -> ContributionBody:
    total = status.contribution.total
    return ContributionBody(
        span=name,
        width_seconds=span.width_seconds,
        points=[WorkBody.model_validate(point) for point in span.points],
        total=None if total is None else WorkBody.model_validate(total),
    )
