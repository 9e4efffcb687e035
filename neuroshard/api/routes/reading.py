"""Routes that read the snapshot, the log and the configuration."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import APIRouter, Query
from pydantic import JsonValue, TypeAdapter
from starlette.responses import Response

from neuroshard.api.bodies.base import finite_json
from neuroshard.api.bodies.contribution import ContributionBody, SamplesBody, SpanName
from neuroshard.api.bodies.data import DataAnswer
from neuroshard.api.bodies.network import PeersBody
from neuroshard.api.bodies.node import (
    CheckpointsBody,
    HealthBody,
    LogRecordBody,
    LogsBody,
    StatusBody,
)
from neuroshard.api.bodies.pipeline import PipelineBody
from neuroshard.api.bodies.rounds import RoundsBody
from neuroshard.api.bodies.training import GlobalBody, HistoryBody, VerifyBody
from neuroshard.api.context import ApiContext
from neuroshard.api.metrics import CONTENT_TYPE, metrics_text
from neuroshard.api.rendering import JSON, RenderedViews
from neuroshard.api.views.contribution import VIEW_OF_SPAN, samples_view
from neuroshard.api.views.network import peers_view
from neuroshard.api.views.node import checkpoints_view, data_view, health_view, status_view
from neuroshard.api.views.pipeline import pipeline_view
from neuroshard.api.views.rounds import rounds_view
from neuroshard.api.views.training import global_view, history_view, verify_view

CONFIG_ADAPTER: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)
LAST_SEQUENCE = 2**63 - 1


def snapshot_routes(views: RenderedViews) -> APIRouter:
    """Routes whose answer is one view of the snapshot, rendered once a version."""
    router = APIRouter(tags=["status"])

    @router.get("/api/training/verify", response_model=VerifyBody)
    async def verify() -> Response:
        """Is the model really learning? The verdict rests on held-out data."""
        return views.respond(verify_view)

    @router.get("/api/training/global", response_model=GlobalBody)
    async def global_numbers() -> Response:
        """The numbers of all nodes of the run together, and this node's part."""
        return views.respond(global_view)

    @router.get("/api/training/history", response_model=HistoryBody)
    async def history() -> Response:
        """The training curve, at most 1,000 points."""
        return views.respond(history_view)

    @router.get("/api/contribution", response_model=ContributionBody)
    async def contribution(span: SpanName = "day") -> Response:
        """What this computer gave to training over the last day, the last week or all time."""
        return views.respond(VIEW_OF_SPAN[span])

    @router.get("/api/samples", response_model=SamplesBody)
    async def samples() -> Response:
        """What the model in training wrote to the same prompts at sparse steps: 0, 10, 100, 1,000 and each double."""
        return views.respond(samples_view)

    @router.get("/api/status", response_model=StatusBody)
    async def status() -> Response:
        """Everything about this node but the curve."""
        return views.respond(status_view)

    @router.get("/api/pipeline", response_model=PipelineBody)
    async def pipeline() -> Response:
        """Stages of the run's plan and who holds them; how this node's microbatches go through them."""
        return views.respond(pipeline_view)

    @router.get("/api/rounds", response_model=RoundsBody)
    async def rounds() -> Response:
        """The last rounds in which this node agreed with others on one aggregate, and who contributed."""
        return views.respond(rounds_view)

    @router.get("/api/peers", response_model=PeersBody)
    async def peers() -> Response:
        """This node's connections, addresses and join line, and every other node of the run."""
        return views.respond(peers_view)

    @router.get("/api/data", response_model=DataAnswer)
    async def data() -> Response:
        """Genesis data, cache and downloads."""
        return views.respond(data_view)

    @router.get("/api/checkpoints", response_model=CheckpointsBody)
    async def checkpoints() -> Response:
        """What is safe on disk and what a kill could lose."""
        return views.respond(checkpoints_view)

    return router


def live_routes(context: ApiContext) -> APIRouter:
    """Routes whose answer changes without a new snapshot."""
    router = APIRouter(tags=["status"])

    @router.get("/api/config", response_model=dict[str, JsonValue])
    async def config() -> Response:
        """Settings of this node and where each came from."""
        value = finite_json(context.config_view())
        return Response(CONFIG_ADAPTER.dump_json(cast("JsonValue", value)), media_type=JSON)

    @router.get("/api/logs", response_model=LogsBody)
    async def logs(
        after: Annotated[int, Query(ge=0, le=LAST_SEQUENCE)] = 0,
        limit: Annotated[int, Query(ge=1, le=2_000)] = 500,
    ) -> Response:
        """The newest `limit` log lines with a sequence number above `after`, oldest first."""
        lines = [line for line in context.log_ring.newest(limit) if line.sequence > after]
        records = [LogRecordBody.model_validate(line) for line in lines]
        body = LogsBody(records=records, last_sequence=lines[-1].sequence if lines else after)
        return Response(body.model_dump_json(), media_type=JSON)

    @router.get("/health", response_model=HealthBody)
    async def health() -> Response:
        """The process answers; `status` tells whether the node still publishes."""
        body = health_view(context.board.current(), context.board.age())
        return Response(body.model_dump_json(), media_type=JSON)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus text format."""
        text = metrics_text(context.board.current(), context.counters.snapshot(), context.board.age())
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    return router
