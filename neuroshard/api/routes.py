"""Routes that read the snapshot, the log and the configuration, send a command, or open a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, cast, get_args

from fastapi import APIRouter, Query, Request
from pydantic import JsonValue, TypeAdapter
from pydantic.json_schema import JsonSchemaMode
from starlette.responses import Response

from neuroshard.api.access import HOW_TO_ENTER, SESSION_SECONDS, AccessPolicy, EntryKeys, RequestFacts
from neuroshard.api.address import origin_of
from neuroshard.api.context import ApiContext, carry_out, shut_down
from neuroshard.api.metrics import CONTENT_TYPE, metrics_text
from neuroshard.api.problems import MissingSecretError
from neuroshard.api.rendering import JSON, RenderedViews, Summary, as_json, finite_json, whole_status
from neuroshard.api.requests import (
    CommandBody,
    ConfigChanges,
    NoMembers,
    PauseRequest,
    SessionBody,
    SessionRequest,
)
from neuroshard.api.settings_view import settings_view
from neuroshard.status.board import CommandResult, Pause, Restart, Resume, SaveCheckpoint, UpdateSettings
from neuroshard.status.freshness import fresh, is_old
from neuroshard.status.history import SamplesStatus
from neuroshard.status.snapshot import CheckpointStatus, NodeState, NodeStatus
from neuroshard.status.summaries import (
    DataSummary,
    FeedSummary,
    LearningSummary,
    LossHistory,
    PeersSummary,
    PipelineSummary,
    PublicRunSummary,
    RoundsSummary,
    RunSummary,
    SpanName,
    WorkSummary,
    data_summary,
    feed_summary,
    learning_summary,
    loss_history,
    peers_summary,
    pipeline_summary,
    public_run_summary,
    rounds_summary,
    run_summary,
    work_summary,
)
from neuroshard.status.values import Number, about
from neuroshard.telemetry.logs import LogLine

CONFIG_ADAPTER: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)
LAST_SEQUENCE = 2**63 - 1


def samples(status: NodeStatus) -> SamplesStatus:
    """Texts that the model in training wrote for the same prompts at steps 0, 10, 100, 1,000 and each double."""
    return status.samples


def checkpoints(status: NodeStatus) -> CheckpointStatus:
    """Checkpoints on disk, and the work that a kill at this moment would lose."""
    return status.checkpoints


# path, type of the response, function that makes it from the snapshot (its docstring describes the route)
SNAPSHOT_ROUTES: Final[tuple[tuple[str, type, Summary], ...]] = (
    ("/api/training/verify", LearningSummary, learning_summary),
    ("/api/training/global", RunSummary, run_summary),
    ("/api/training/history", LossHistory, loss_history),
    ("/api/samples", SamplesStatus, samples),
    ("/api/status", NodeStatus, whole_status),
    ("/api/pipeline", PipelineSummary, pipeline_summary),
    ("/api/rounds", RoundsSummary, rounds_summary),
    ("/api/peers", PeersSummary, peers_summary),
    ("/api/data", DataSummary, data_summary),
    ("/api/feed", FeedSummary, feed_summary),
    ("/api/checkpoints", CheckpointStatus, checkpoints),
)
PUBLIC_SUMMARIES: Final[dict[str, Summary]] = {"/api/training/global": public_run_summary}  # without a key
WORK_OF_SPAN: Final[dict[SpanName, Summary]] = {span: partial(work_summary, name=span) for span in get_args(SpanName)}


def snapshot_routes(views: RenderedViews) -> APIRouter:
    """Make the routes that return a summary of the snapshot, with an entity tag. It is rendered once per version."""
    router = APIRouter(tags=["status"])

    def add(path: str, summary: Summary) -> None:
        public = PUBLIC_SUMMARIES.get(path, summary)

        async def answer(request: Request) -> Response:
            return views.respond(request, summary if request.state.has_key else public)

        name = path.removeprefix("/api/").replace("/", "_")
        router.add_api_route(path, answer, name=name, description=summary.__doc__)

    for path, _, summary in SNAPSHOT_ROUTES:
        add(path, summary)

    @router.get("/api/contribution")
    async def contribution(request: Request, span: SpanName = "day") -> Response:
        """Work of this computer for training over the last day, the last week or all time."""
        return views.respond(request, WORK_OF_SPAN[span])

    return router


def describe_snapshot_routes(schema: dict[str, Any]) -> None:
    """Add the bodies of the snapshot routes to an OpenAPI document.

    FastAPI would analyse these large types at every start of a node, although few readers ask for the document.
    """
    kinds: dict[str, Any] = {path: kind for path, kind, _ in SNAPSHOT_ROUTES}
    kinds |= {"/api/contribution": WorkSummary, "/api/training/global": RunSummary | PublicRunSummary}
    inputs: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]]
    inputs = [(path, "serialization", TypeAdapter[Any](kind)) for path, kind in kinds.items()]
    bodies, definitions = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    schema["components"]["schemas"] |= definitions["$defs"]
    for (path, _), body in bodies.items():
        schema["paths"][path]["get"]["responses"]["200"]["content"][JSON]["schema"] = body


@dataclass(frozen=True)
class LogLines:
    """GET /api/logs: lines after a sequence number, oldest first."""

    records: tuple[LogLine, ...]
    last_sequence: Annotated[int, about("give it as `after` in the next call")]


@dataclass(frozen=True)
class Health:
    """GET /health: the process answers, and the age of its newest snapshot."""

    status: Annotated[str, about('"ok", or "stale" when the node has published nothing for 30 s')]
    state: NodeState
    version: str
    snapshot_age_seconds: Annotated[Number, about(unit="s")]


def health_of(status: NodeStatus, age_seconds: float) -> Health:
    """Health of a node whose newest snapshot has this age in seconds."""
    word = "stale" if is_old(age_seconds) else "ok"
    return Health(word, status.state, status.version, age_seconds)


def live_routes(context: ApiContext) -> APIRouter:
    """Make the routes whose response changes without a new snapshot: settings, log, health and metrics."""
    router = APIRouter(tags=["status"])

    @router.get("/api/config", response_model=dict[str, JsonValue])
    async def config() -> Response:
        """Settings of this node: value, source, value in use, words, control and range."""
        value = finite_json(settings_view(context.config_view(), context.board.current()))
        return Response(CONFIG_ADAPTER.dump_json(cast("JsonValue", value)), media_type=JSON)

    @router.get("/api/logs", response_model=LogLines)
    async def logs(
        after: Annotated[int, Query(ge=0, le=LAST_SEQUENCE)] = 0,
        limit: Annotated[int, Query(ge=1, le=2_000)] = 500,
    ) -> Response:
        """The newest `limit` log lines with a sequence number above `after`, oldest first."""
        lines = [line for line in context.log_ring.newest(limit) if line.sequence > after]
        body = LogLines(tuple(lines), lines[-1].sequence if lines else after)
        return Response(as_json(body), media_type=JSON)

    @router.get("/health", response_model=Health)
    async def health() -> Response:
        """Check that the process answers; `status` shows whether the node still publishes snapshots."""
        body = health_of(context.board.current(), context.board.age())
        return Response(as_json(body), media_type=JSON)

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        age = context.board.age()
        text = metrics_text(fresh(context.board.current(), age), context.counters.snapshot(), age)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    return router


def action_routes(context: ApiContext) -> APIRouter:
    """Make the routes that send a command to the node. Each answers 202 with the resulting state."""
    router = APIRouter(tags=["actions"])

    @router.post("/api/training/pause", status_code=202)
    async def pause(body: PauseRequest | None = None) -> CommandBody:
        """Pause training for some seconds or until it is resumed, and free the accelerator.

        Finished steps are kept. A pause of more than ten seconds repeats at most one unfinished step.
        """
        return body_of(await carry_out(context, Pause(body.duration_seconds if body else None)))

    @router.post("/api/training/resume", status_code=202)
    async def resume(body: NoMembers | None = None) -> CommandBody:
        """Resume training after a pause."""
        del body
        return body_of(await carry_out(context, Resume()))

    @router.post("/api/checkpoints", status_code=202)
    async def save_checkpoint(body: NoMembers | None = None) -> CommandBody:
        """Write a checkpoint now."""
        del body
        return body_of(await carry_out(context, SaveCheckpoint()))

    @router.post("/api/shutdown", status_code=202)
    async def shutdown(body: NoMembers | None = None) -> CommandBody:
        """Save a final checkpoint and stop the node."""
        del body
        return body_of(await shut_down(context, "asked through the API"))

    @router.post("/api/restart", status_code=202)
    async def restart(body: NoMembers | None = None) -> CommandBody:
        """Save a checkpoint and start again in the same process, with the stored settings."""
        del body
        return body_of(await carry_out(context, Restart()))

    @router.patch("/api/config", status_code=202)
    async def change_config(body: ConfigChanges) -> CommandBody:
        """Change settings of this node; `details` contains the values that were stored."""
        return body_of(await carry_out(context, UpdateSettings(body.root)))

    return router


def body_of(result: CommandResult) -> CommandBody:
    """Convert the result of a command to a response body."""
    details: dict[str, JsonValue] | None = None
    if result.details is not None:
        details = CommandBody.model_validate(
            {"state": "", "message": "", "details": finite_json(result.details)}
        ).details
    return CommandBody(state=result.state, message=result.message, details=details)


def session_routes(access: AccessPolicy, clock: Callable[[], float]) -> APIRouter:
    """Make the routes that open a session; `Guard` has checked Host, Origin and, for GET, the key before."""
    router = APIRouter(tags=["session"])
    entries = EntryKeys(access.sessions)

    @router.get("/api/session", response_model=SessionBody)
    async def read_session(request: Request) -> Response:
        """Renew the session of a page that was reloaded. It needs the session's cookie or the API secret."""
        return _open(RequestFacts.of(request.scope))

    @router.post("/api/session", response_model=SessionBody)
    async def open_session(request: Request, body: SessionRequest) -> Response:
        """Open a session with a key that works once, or with the API secret."""
        if not (entries.admit(body.secret, clock()) or access.sessions.is_secret(body.secret)):
            raise MissingSecretError("The key is wrong, expired or was used before.", HOW_TO_ENTER)
        return _open(RequestFacts.of(request.scope))

    def _open(facts: RequestFacts) -> Response:
        """Keep a valid cookie, so that several tabs share one session; otherwise set a new cookie."""
        now, origin, name = clock(), origin_of(facts.one("host") or ""), access.sessions.cookie_name
        known = facts.cookie(name)
        cookie = known if known and access.sessions.accepts(known, origin, now) else None
        value = cookie or access.sessions.new_cookie(origin, now)
        body = SessionBody(csrf_token=access.sessions.csrf_token(value), setup=access.is_setup)
        response = Response(body.model_dump_json(), media_type=JSON)
        if cookie is None:
            response.set_cookie(name, value, max_age=SESSION_SECONDS, path="/", httponly=True, samesite="strict")
        return response

    return router
