"""Summaries are pure, whole and speak only JSON, whatever numbers the node publishes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import inf, isnan, nan
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from neuroshard.api.metrics import metrics_text
from neuroshard.api.rendering import RenderedViews, as_json, as_python, finite_json, whole_status
from neuroshard.api.routes import SNAPSHOT_ROUTES, WORK_OF_SPAN, health_of
from neuroshard.status.board import Publisher, StatusBoard
from neuroshard.status.computer import PathsStatus, ResourceStatus
from neuroshard.status.data import DataStatus, DownloadStatus
from neuroshard.status.freshness import fresh
from neuroshard.status.pipeline import Bottleneck, HopTimes, MicrobatchTrace, PipelineFlow, PipelineStatus, StageLoad
from neuroshard.status.rounds import PhaseSeconds
from neuroshard.status.snapshot import (
    CheckpointStatus,
    ConnectionKind,
    DilocoStatus,
    HeldOutPoint,
    LossPoint,
    NetworkState,
    NetworkStatus,
    NodeState,
    NodeStatus,
    PeerStatus,
    StartupStep,
    SwarmStatus,
    TrainingStatus,
    VerificationStatus,
)
from neuroshard.status.summaries import pipeline_summary, run_summary, thin_out
from neuroshard.status.values import Stale
from neuroshard.types import JsonValue as SharedJson
from neuroshard.types import LayerRange, Role
from tests.worlds.statuses import COMPLETED, FIRST_STAGE, STAGES, in_a_pipeline, training_status

NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([nan, inf, -inf])
COUNTS = st.integers(0, 10**12)
TEXTS = st.text(st.characters(), max_size=20)  # half surrogate pairs included
POINTS = st.builds(LossPoint, step=COUNTS, time=NUMBERS, loss=NUMBERS, lr=NUMBERS, tokens=COUNTS)
HELD_OUT = st.builds(
    HeldOutPoint,
    step=COUNTS,
    time=NUMBERS,
    loss=NUMBERS,
    improvement=NUMBERS,
    standard_error=NUMBERS,
    measured_by=st.lists(TEXTS, max_size=2).map(tuple),
)
TRAINING = st.builds(
    TrainingStatus,
    steps=COUNTS,
    tokens=COUNTS,
    loss=st.none() | NUMBERS,
    loss_ema=st.none() | NUMBERS,
    lr=NUMBERS,
    tokens_per_second=NUMBERS,
    step_seconds=NUMBERS,
    held_out=st.lists(HELD_OUT, max_size=3).map(tuple),
    unigram_entropy=NUMBERS,
)
PEERS = st.builds(
    PeerStatus,
    node_id=st.just("peer"),
    wallet_id=st.just("wallet"),
    roles=st.just((Role.WORKER,)),
    layers=st.just(LayerRange(1, 2)),
    loss_ema=st.none() | NUMBERS,
    tokens_per_second=NUMBERS,
    last_seen=NUMBERS,
    state=TEXTS,
    started_at=st.none() | NUMBERS,
    first_seen=st.none() | NUMBERS,
    version=TEXTS,
    connection=st.none() | st.sampled_from(ConnectionKind),
    address=TEXTS,
    rtt_seconds=st.none() | NUMBERS,
    score=NUMBERS,
)
NETWORKS = st.builds(
    NetworkStatus,
    state=st.sampled_from(NetworkState),
    explanation=TEXTS,
    addresses=st.lists(TEXTS, max_size=2).map(tuple),
    upload_rate=NUMBERS,
    download_rate=NUMBERS,
    upload_limit=st.none() | NUMBERS,
    refused=st.lists(st.tuples(TEXTS, COUNTS), max_size=3).map(tuple),
    join_line=TEXTS,
)
SWARMS = st.builds(
    SwarmStatus,
    global_loss=st.none() | NUMBERS,
    min_loss=st.none() | NUMBERS,
    tokens_per_second=NUMBERS,
    model_hashes=st.lists(st.tuples(st.just("peer"), st.just("aa")), max_size=1).map(tuple),
)
HOPS = st.builds(HopTimes, node_id=st.just("peer"), compute_seconds=NUMBERS, wait_seconds=NUMBERS, wire_seconds=NUMBERS)
PASSAGES = st.builds(
    MicrobatchTrace,
    session=COUNTS,
    microbatch=COUNTS,
    ended_at=NUMBERS,
    seconds=NUMBERS,
    tokens=COUNTS,
    hops=st.lists(HOPS, max_size=2).map(tuple),
)
LOADS = st.builds(
    StageLoad, stage=COUNTS, compute_seconds=NUMBERS, wait_seconds=NUMBERS, wire_seconds=NUMBERS, nodes=COUNTS
)
FLOWS = st.builds(
    PipelineFlow,
    window_seconds=NUMBERS,
    microbatches=COUNTS,
    tokens=COUNTS,
    bubble_share=st.none() | NUMBERS,
    recompute_share=st.none() | NUMBERS,
    wire_bytes_per_token=st.none() | NUMBERS,
    loads=st.lists(LOADS, max_size=2).map(tuple),
    bottleneck=st.none() | st.builds(Bottleneck, stage=COUNTS, node_id=st.just("peer"), seconds=NUMBERS, share=NUMBERS),
    recent=st.lists(PASSAGES, max_size=2).map(tuple),
)
PIPELINES = st.builds(
    PipelineStatus,
    stages=st.sampled_from([(), STAGES, (replace(STAGES[0], ready=()), *STAGES[1:])]),
    missing=TEXTS,
    flow=st.none() | FLOWS,
)
ROUNDS = st.builds(
    lambda at, seconds, why: replace(COMPLETED, ended_at=at, phases=PhaseSeconds(seconds, seconds, 0.0), reason=why),
    NUMBERS,
    NUMBERS,
    TEXTS,
)
DILOCO = st.builds(
    DilocoStatus,
    inner_step=COUNTS,
    inner_steps_total=COUNTS,
    last_sync=NUMBERS,
    members=COUNTS,
    rounds=st.lists(ROUNDS, max_size=2).map(lambda rounds: (replace(FIRST_STAGE, recent=tuple(rounds)),)),
)
DOWNLOADS = st.builds(
    DownloadStatus,
    name=TEXTS,
    bytes_done=COUNTS,
    bytes_total=st.none() | COUNTS,
    bytes_per_second=st.none() | NUMBERS,
    attempt=COUNTS,
    retry_at=st.none() | NUMBERS,
)
DATA = st.builds(
    DataStatus,
    source=TEXTS,
    verified=st.booleans(),
    explanation=TEXTS,
    downloads=st.lists(DOWNLOADS, max_size=2).map(tuple),
)
STATUSES: st.SearchStrategy[NodeStatus] = st.builds(
    NodeStatus,
    version=st.just("1"),
    started_at=NUMBERS,
    time=NUMBERS,
    uptime_seconds=NUMBERS,
    state=st.sampled_from(NodeState),
    state_reason=TEXTS,
    is_standing_by=st.booleans(),
    startup=st.lists(st.builds(StartupStep, name=TEXTS, detail=TEXTS, fraction=NUMBERS), max_size=2).map(tuple),
    node_id=st.none() | st.just("node"),
    data_dir=TEXTS,
    paths=st.builds(PathsStatus, logs=TEXTS),
    paused_until=NUMBERS,
    warnings=st.lists(TEXTS, max_size=2).map(tuple),
    model=st.sampled_from([None, training_status().model]),
    training=TRAINING,
    verification=st.builds(VerificationStatus, reason=TEXTS, action=TEXTS),
    diloco=DILOCO,
    data=st.none() | DATA,
    checkpoints=st.builds(CheckpointStatus, folder=TEXTS, could_lose_seconds=NUMBERS, last_saved_time=NUMBERS),
    resources=st.builds(ResourceStatus, cpu_cores=NUMBERS, gpu_utilisation=NUMBERS),
    stages=st.sampled_from([(), in_a_pipeline().stages]),
    pipeline=st.none() | PIPELINES,
    peers=st.lists(PEERS, max_size=3).map(tuple),
    network=NETWORKS,
    swarm=st.none() | SWARMS,
    history=st.lists(POINTS, max_size=4).map(tuple),
)


def strict_json(text: str | bytes) -> object:
    """Parse JSON as a browser does: without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STATUSES, NUMBERS)
def test_every_summary_of_every_snapshot_is_json(status: NodeStatus, now: float) -> None:
    views = RenderedViews(StatusBoard(status))
    for summary in (*(route[2] for route in SNAPSHOT_ROUTES), *WORK_OF_SPAN.values()):
        body = views.get(summary).body
        assert b"\n" not in body  # it fits in one event
        strict_json(body)
    strict_json(as_json(health_of(status, now)))
    values = [line.rpartition(" ")[2] for line in metrics_text(status, (), now).decode().splitlines()]
    assert not {"NaN", "+Inf", "-Inf"} & set(values)


@cache
def schema_of(kind: Any) -> dict[str, Any]:
    return TypeAdapter(kind).json_schema(mode="serialization", by_alias=True)


def shown_rates(status: NodeStatus, age: float) -> dict[str, list[object]]:
    """Every value with a staleness condition, by the condition, as the routes show it."""
    shown: dict[str, list[object]] = {}
    current = fresh(status, age)
    for _, kind, summary in SNAPSHOT_ROUTES:
        schema = schema_of(kind)
        collect(as_python(summary(current)), schema, schema.get("$defs", {}), shown)
    return shown


def collect(value: Any, schema: dict[str, Any], kinds: dict[str, Any], found: dict[str, list[object]]) -> None:
    if "$ref" in schema:
        collect(value, kinds[schema["$ref"].rpartition("/")[2]], kinds, found)
    elif "stale_when" in schema:
        found.setdefault(schema["stale_when"], []).append(value)
    elif "anyOf" in schema and value is not None:
        collect(value, next(one for one in schema["anyOf"] if one != {"type": "null"}), kinds, found)
    elif isinstance(value, list):
        for item in value:
            collect(item, schema.get("items", {}), kinds, found)
    elif isinstance(value, dict):
        for name, part in schema.get("properties", {}).items():
            collect(value[name], part, kinds, found)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(STATUSES)
def test_no_finite_value_is_shown_while_its_source_is_stale(status: NodeStatus) -> None:
    old = shown_rates(status, 30.5)
    assert old.keys() >= {Stale.NOT_TRAINING, Stale.NETWORK_DOWN, Stale.OLD_SNAPSHOT}
    assert not any(shows_something(values) for values in old.values())
    now = shown_rates(status, 1.0)
    if status.state is not NodeState.TRAINING:
        assert not shows_something(now[Stale.NOT_TRAINING])
    if status.network.state in (NetworkState.OFF, NetworkState.STARTING, NetworkState.FAILED):
        assert not shows_something(now[Stale.NETWORK_DOWN])


def shows_something(values: list[object]) -> bool:
    return any(value is not None and value != [] for value in values)


def test_the_flow_of_a_paused_driver_shows_no_times_and_no_bottleneck() -> None:
    status = in_a_pipeline()
    shown = as_python(pipeline_summary(fresh(status, 1.0)))
    paused = as_python(pipeline_summary(fresh(replace(status, state=NodeState.PAUSED), 1.0)))
    assert isinstance(shown, dict)
    assert isinstance(paused, dict)
    flow, stopped = cast("dict[str, Any]", shown["flow"]), cast("dict[str, Any]", paused["flow"])
    assert (len(flow["loads"]), flow["bottleneck"]["stage"], flow["microbatches"]) == (3, 1, 30)
    hidden = {name for name in flow if flow[name] != stopped[name]}
    rates = {"bubble_share", "recompute_share", "wire_bytes_per_token", "busiest_upload_per_token", "tokens_per_second"}
    assert hidden == {"window_seconds", "microbatches", "tokens", "loads", "bottleneck"} | rates
    assert not shows_something([stopped[name] for name in hidden])
    counts = {name for name in flow if name.endswith(("takeovers", "failures", "given_up"))}
    assert {name: stopped[name] for name in counts} == {name: flow[name] for name in counts}


def test_a_value_deep_in_the_status_is_hidden_by_its_declaration() -> None:
    download = DownloadStatus("shard_1.bin", 5, 10, 7.0, attempt=1)
    status = replace(training_status(), data=DataStatus("a", verified=True, explanation="", downloads=(download,)))
    shown, old = fresh(status, 1.0).data, fresh(status, 30.5).data
    assert shown == status.data
    assert old is not None
    assert isnan(old.downloads[0].bytes_per_second or 0.0)
    assert (old.downloads[0].bytes_done, old.downloads[0].attempt) == (5, 1)


def test_rates_are_shown_while_their_source_works() -> None:
    status = replace(training_status(), network=NetworkStatus(NetworkState.CONNECTED, upload_rate=7.0))
    now = shown_rates(status, 1.0)
    assert 900.0 in now[Stale.NOT_TRAINING]
    assert 7.0 in now[Stale.NETWORK_DOWN]
    paused = shown_rates(replace(status, state=NodeState.PAUSED), 1.0)
    assert set(paused[Stale.NOT_TRAINING]) == {None}


def test_text_that_cannot_be_encoded_is_shown_with_question_marks() -> None:
    status = replace(training_status(), data_dir="/data/\udcff", warnings=("\ud800",))
    plain = as_json(training_status())
    shown = strict_json(as_json(status))
    assert isinstance(shown, dict)
    assert (shown["data_dir"], shown["warnings"]) == ("/data/?", ["?"])
    assert shown | {"data_dir": "/data", "warnings": []} == strict_json(plain)


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1_000, 1_001, 2_500])
def test_thinned_out_keeps_the_ends(count: int) -> None:
    thin = thin_out(range(count), 1_000)
    assert len(thin) == min(count, 1_000)
    assert list(thin) == sorted(set(thin))
    if count:
        assert (thin[0], thin[-1]) == (0, count - 1)


@given(
    st.recursive(
        st.none() | st.booleans() | NUMBERS | TEXTS, lambda some: st.lists(some) | st.dictionaries(TEXTS, some)
    )
)
def test_any_value_becomes_json(value: SharedJson) -> None:
    strict_json(json.dumps(finite_json(value), allow_nan=False))


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        TrainingStatus, steps=COUNTS, tokens=COUNTS, loss_ema=st.floats(0, 20), tokens_per_second=st.floats(0, 1e6)
    ),
    st.builds(
        SwarmStatus, nodes=st.just(1), global_loss=st.none() | st.floats(0, 20), min_loss=st.none() | st.floats(0, 20)
    ),
    st.sampled_from(NodeState),
)
def test_the_totals_of_a_node_without_others_are_its_own_values(
    training: TrainingStatus, older: SwarmStatus, state: NodeState
) -> None:
    """The network publishes the totals at another time than the trainer publishes the values."""
    board = StatusBoard(replace(training_status(), network=NetworkStatus(NetworkState.OFF)))
    publisher = Publisher(board)
    publisher.change(state=state, training=training)
    publisher.change(peers=(), swarm=older)
    shown = run_summary(fresh(board.current(), 1.0))
    assert (shown.global_loss, shown.training_nodes) == (training.loss_ema, int(state is NodeState.TRAINING))
    assert shown.tokens_per_second == (training.tokens_per_second if state is NodeState.TRAINING else 0.0)
    assert shown.global_min_loss is not None
    assert shown.global_min_loss <= training.loss_ema
    assert (shown.total_steps, shown.data_shards_covered) == (training.steps, 2)


def test_a_summary_is_serialised_once_per_version() -> None:
    board = StatusBoard(training_status())
    views = RenderedViews(board)
    first = [views.get(whole_status) for _ in range(50)]
    assert views.rendered == 1
    assert all(rendered is first[0] for rendered in first)
    board.publish(training_status(21))
    views.get(whole_status)
    assert views.rendered == 2
