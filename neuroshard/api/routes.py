"""Routes that read the snapshot, the log and the configuration, send a command, or open a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, cast

from fastapi import APIRouter, Query, Request
from pydantic import JsonValue, TypeAdapter
from starlette.responses import Response

from neuroshard.api.access import AccessPolicy, EntryKeys, RequestFacts
from neuroshard.api.address import origin_of
from neuroshard.api.bodies.node import (
    CheckpointsBody,
    DataAnswer,
    HealthBody,
    LogRecordBody,
    LogsBody,
    PeersBody,
    SamplesBody,
    SpanName,
    StatusBody,
    WorkHistoryBody,
)
from neuroshard.api.bodies.requests import (
    CommandBody,
    ConfigChanges,
    NoMembers,
    PauseRequest,
    SessionBody,
    SessionRequest,
)
from neuroshard.api.bodies.training import GlobalBody, HistoryBody, PipelineBody, RoundsBody, VerifyBody
from neuroshard.api.context import ApiContext, carry_out, shut_down
from neuroshard.api.metrics import CONTENT_TYPE, metrics_text
from neuroshard.api.problems import MissingSecretError
from neuroshard.api.rendering import JSON, RenderedViews, finite_json
from neuroshard.api.views.node import (
    VIEW_OF_SPAN,
    checkpoints_view,
    data_view,
    health_view,
    peers_view,
    samples_view,
    status_view,
)
from neuroshard.api.views.training import global_view, history_view, pipeline_view, rounds_view, verify_view
from neuroshard.status.board import CommandResult, Pause, Resume, SaveCheckpoint, UpdateSettings

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

    @router.get("/api/contribution", response_model=WorkHistoryBody)
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


def action_routes(context: ApiContext) -> APIRouter:
    """Pause, resume, checkpoint, shutdown and configuration; each answers 202 with the resulting state."""
    router = APIRouter(tags=["actions"])

    @router.post("/api/training/pause", status_code=202)
    async def pause(body: PauseRequest | None = None) -> CommandBody:
        """Pause training, for a while or until it is resumed. Nothing is lost; accelerator memory is freed."""
        return body_of(await carry_out(context, Pause(body.duration_seconds if body else None)))

    @router.post("/api/training/resume", status_code=202)
    async def resume(body: NoMembers | None = None) -> CommandBody:
        """Go on training."""
        del body
        return body_of(await carry_out(context, Resume()))

    @router.post("/api/checkpoints", status_code=202)
    async def save_checkpoint(body: NoMembers | None = None) -> CommandBody:
        """Write a checkpoint now."""
        del body
        return body_of(await carry_out(context, SaveCheckpoint()))

    @router.post("/api/shutdown", status_code=202)
    async def shutdown(body: NoMembers | None = None) -> CommandBody:
        """Save a final checkpoint and end the node."""
        del body
        return body_of(await shut_down(context, "asked through the API"))

    @router.patch("/api/config", status_code=202)
    async def change_config(body: ConfigChanges) -> CommandBody:
        """Change settings of this node; `details` holds what was really stored."""
        return body_of(await carry_out(context, UpdateSettings(body.root)))

    return router


def body_of(result: CommandResult) -> CommandBody:
    """The result of a command as an answer."""
    details: dict[str, JsonValue] | None = None
    if result.details is not None:
        details = CommandBody.model_validate(
            {"state": "", "message": "", "details": finite_json(result.details)}
        ).details
    return CommandBody(state=result.state, message=result.message, details=details)


def session_routes(access: AccessPolicy, clock: Callable[[], float], entries: EntryKeys | None = None) -> APIRouter:
    """Opening a session; its Host and Origin were checked before. With `entries` it is the wizard's."""
    router = APIRouter(tags=["session"])

    @router.get("/api/session", response_model=SessionBody)
    async def read_session(request: Request) -> Response:
        """Open or renew the session; with --host only for one that was opened with the API secret."""
        facts = RequestFacts.of(request.method, request.url.path, request.headers.raw)
        known = access.is_authenticated(facts, clock())
        if access.secret_for_everything and not known:
            return _respond(_body(authenticated=False, csrf_token=None))
        return _open(facts)

    @router.post("/api/session", response_model=SessionBody)
    async def open_session(request: Request, body: SessionRequest) -> Response:
        """Open a session with the API secret."""
        enters = entries is not None and entries.admit(body.secret, clock())
        if not (enters or access.sessions.is_secret(body.secret)):
            raise MissingSecretError("The API secret is wrong.", "It is in the file api-secret in the data folder.")
        return _open(RequestFacts.of(request.method, request.url.path, request.headers.raw))

    def _open(facts: RequestFacts) -> Response:
        """Keep a valid cookie, so that the pages of several tabs share one, or give a new one."""
        now, origin = clock(), origin_of(facts.one("host") or "")
        known = facts.cookie(access.sessions.cookie_name)
        cookie = known if known and access.sessions.accepts(known, origin, now) else None
        value = cookie or access.sessions.new_cookie(origin, now)
        token = access.sessions.csrf_token(value)
        response = _respond(_body(authenticated=True, csrf_token=token))
        if cookie is None:
            response.set_cookie(access.sessions.cookie_name, value, path="/", httponly=True, samesite="strict")
        return response

    def _body(*, authenticated: bool, csrf_token: str | None) -> SessionBody:
        return SessionBody(
            authenticated=authenticated,
            secret_required=access.secret_for_everything,
            csrf_token=csrf_token,
            setup=entries is not None,
        )

    return router


def _respond(body: SessionBody) -> Response:
    return Response(body.model_dump_json(), media_type=JSON)
