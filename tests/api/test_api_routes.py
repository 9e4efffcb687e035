"""Every route of the OpenAPI document answers, with the contract's fields, and errors are problem documents."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from neuroshard.errors import (
    CheckpointError,
    DiskFullError,
    NeuroShardError,
    NotReadyError,
    StorageError,
    UsageError,
)
from neuroshard.status.snapshot import NodeState, NodeStatus, PeerStatus
from neuroshard.types import LayerRange, NodeId, Role, WalletId
from tests.worlds.api import BODIES, Api, FakeNode, make_api
from tests.worlds.statuses import training_status

CONTRACT = {
    ("get", "/api/training/verify"),
    ("get", "/api/training/global"),
    ("get", "/api/training/history"),
    ("get", "/api/status"),
    ("get", "/api/pipeline"),
    ("get", "/api/rounds"),
    ("get", "/api/peers"),
    ("get", "/api/data"),
    ("get", "/api/checkpoints"),
    ("get", "/api/config"),
    ("get", "/api/logs"),
    ("post", "/api/training/pause"),
    ("post", "/api/training/resume"),
    ("post", "/api/checkpoints"),
    ("post", "/api/shutdown"),
    ("patch", "/api/config"),
    ("get", "/api/events"),
    ("post", "/v1/completions"),
    ("post", "/v1/chat/completions"),
    ("get", "/v1/models"),
    ("get", "/v1/models/neuroshard"),
    ("get", "/metrics"),
    ("get", "/health"),
}


def operations(api: Api) -> set[tuple[str, str]]:
    paths = api.app.openapi()["paths"].items()
    return {(method, path.replace("{model}", "neuroshard")) for path, methods in paths for method in methods}


def test_the_contract_is_documented(api: Api) -> None:
    assert operations(api) >= CONTRACT


def test_every_route_answers(api: Api) -> None:
    last = ("post", "/api/shutdown")
    for method, path in [*sorted(operations(api) - {("get", "/api/events"), last}), last]:
        response = api.command(method.upper(), path, BODIES.get((method, path)))
        assert response.status_code in (200, 201, 202), (method, path, response.text)
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-store"


def test_every_json_answer_has_a_schema(api: Api) -> None:
    for path, methods in api.app.openapi()["paths"].items():
        for method, operation in methods.items():
            success = next(answer for status, answer in operation["responses"].items() if status < "300")
            kinds = success["content"]
            assert "application/json" not in kinds or kinds["application/json"]["schema"], (method, path)
            assert "422" in operation["responses"]
            assert "application/problem+json" in operation["responses"]["422"]["content"]


def test_the_page_of_the_routes_is_complete_and_loads_nothing(api: Api) -> None:
    response = api.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    document = api.app.openapi()
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in response.text
    places = set(re.findall(r'id="([^"]+)"', response.text))
    assert places == set(document["components"]["schemas"])
    links = re.findall(r'(?:href|src)="([^"]+)"', response.text)
    assert {link for link in links if not link.startswith("#")} == {"/", "/openapi.json"}
    assert {link[1:] for link in links if link.startswith("#")} <= places
    assert "<script" not in response.text
    assert api.call("GET", "/docs").status_code == 401


def test_verify_has_the_fields_of_the_contract(api: Api) -> None:
    body = api.get("/api/training/verify").json()
    assert body["status"] == "insufficient_data"
    assert body["training_verified"] is False
    assert body["hash_agreement_rate"] == 1.0
    assert body["sync_success_rate"] is None
    assert (body["global_loss"], body["local_loss"], body["initial_loss"], body["steps"]) == (6.9, 6.9, 6.99, 20)
    assert {"reason", "action", "loss_trend"} <= body.keys()


def test_global_has_the_fields_of_the_contract(api: Api) -> None:
    body = api.get("/api/training/global").json()
    assert {name: body[name] for name in ("training_nodes", "total_steps", "total_tokens", "data_shards")} == {
        "training_nodes": 1,
        "total_steps": 20,
        "total_tokens": 20 * 512,
        "data_shards": 16,
    }
    assert body["data_shards_covered"] == 2
    assert body["global_min_loss"] == pytest.approx(6.8)
    assert {"model_hashes", "is_converging", "successful_syncs", "failed_syncs", "sync_success_rate"} <= body.keys()
    assert {"inner_step", "inner_steps_total", "progress", "outer_steps", "last_sync"} <= body["diloco"].keys()
    assert body["local"]["tokens_per_second"] == 900
    assert body["nodes"][0]["role"] == "driver+validator"
    assert body["nodes"][0]["layers"] == {"start": 0, "stop": 4}


def test_global_loss_is_weighted_over_peers(api: Api) -> None:
    peer = PeerStatus(NodeId("b"), WalletId("w"), (Role.WORKER,), LayerRange(1, 3), 3.9, 1_800.0, 1_000.0)
    api.node.board.publish(replace(training_status(), peers=(peer,)))
    body = api.get("/api/training/global").json()
    assert body["training_nodes"] == 2
    assert body["global_loss"] == pytest.approx((6.9 + 2 * 3.9) / 3)
    assert api.get("/api/peers").json()["count"] == 1
    pipeline = api.get("/api/pipeline").json()
    assert [stage["holders"] for stage in pipeline["stages"]] == [["12D3KooWtest"], ["b"]]
    assert pipeline["complete"] is True


def test_status_tells_what_the_contract_names(api: Api) -> None:
    body = api.get("/api/status").json()
    assert body["uptime_seconds"] == 60
    assert body["roles"] == ["driver", "validator"]
    assert body["layers"] == {"start": 0, "stop": 4}
    assert body["memory"]["tier_mb"] == 1_000
    assert body["architecture"]["hidden_size"] == 64
    assert {
        "version",
        "node_id",
        "wallet_id",
        "state",
        "state_reason",
        "is_standing_by",
        "device",
        "run",
        "peers",
        "resources",
    } <= body.keys()
    assert "history" not in body


def test_a_node_that_starts_can_be_read(api: Api) -> None:
    api.node.board.publish(NodeStatus("0.0.1", 1_000.0, 1_000.0))
    for method, path in operations(api) - {("get", "/api/events"), ("get", "/v1/models/neuroshard")}:
        if method == "get":
            assert api.get(path).status_code == 200, path
    assert api.get("/v1/models/neuroshard").status_code == 404  # there is no model yet
    assert api.get("/v1/models").json()["data"] == []


def test_logs_give_the_newest_lines_after_a_number(api: Api) -> None:
    for number in range(1, 8):
        api.context.log_ring.append(1.0, "INFO", "test", f"line {number}")
    body = api.get("/api/logs?after=2&limit=3").json()
    assert [record["message"] for record in body["records"]] == ["line 5", "line 6", "line 7"]
    assert body["last_sequence"] == 7
    assert api.get("/api/logs?after=7").json() == {"records": [], "last_sequence": 7}


def test_health_notices_a_node_that_hangs(api: Api) -> None:
    assert api.get("/health").json()["status"] == "ok"
    api.node.board.publish(replace(training_status(), uptime_seconds=api.node.board.uptime() - 31))
    assert api.get("/health").json()["status"] == "stale"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/api/status/", 404),
        ("PUT", "/api/status", 405),
        ("GET", "/api/logs?after=x", 422),
        ("GET", "/api/logs?after=-1", 422),
        ("GET", "/api/logs?limit=100000", 422),
        ("POST", "/v1/nothing", 404),
    ],
)
def test_errors_are_problem_documents(api: Api, method: str, path: str, status: int) -> None:
    response = api.command(method, path)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["status"] == status
    assert {"type", "title", "detail", "instance"} <= body.keys()
    assert ("error" in body) == path.startswith("/v1/")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("no"), 422),
        (NotReadyError("no"), 503),
        (DiskFullError("no"), 507),
        (CheckpointError("no"), 500),
        (StorageError("no"), 500),
        (NeuroShardError("no", "do this"), 500),
    ],
)
def test_an_error_of_the_node_has_its_status(api: Api, error: NeuroShardError, status: int) -> None:
    api.node.refuse = error
    response = api.command("POST", "/api/checkpoints")
    assert (response.status_code, response.json()["detail"]) == (status, "no")


def test_an_unexpected_error_tells_nothing(node: FakeNode, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("the password is swordfish")

    api = make_api(node)
    api.app.get("/broken")(broken)
    response = api.get("/broken")
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/problem+json"
    assert "swordfish" not in response.text
    assert "Traceback" not in response.text
    assert "unexpected error" in caplog.text


def test_metrics_are_prometheus_text(api: Api) -> None:
    api.context.counters.declare("bytes_fetched", "Bytes fetched")
    api.context.counters.add("bytes_fetched", 3)
    response = api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    lines = response.text.splitlines()
    assert "neuroshard_steps_total 20.0" in lines
    assert 'neuroshard_state{state="training"} 1.0' in lines
    assert "neuroshard_events_bytes_fetched_total 3.0" in lines


def test_the_configuration_has_no_unspeakable_number(api: Api) -> None:
    assert api.get("/api/config").json()["settings"] == {"port": 8000, "broken": None}


def test_the_api_needs_no_torch() -> None:
    code = "import sys, neuroshard.api.app, neuroshard.api.server; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_a_failed_node_is_not_counted_as_training(api: Api) -> None:
    api.node.board.publish(replace(training_status(), state=NodeState.FAILED))
    assert api.get("/api/training/global").json()["training_nodes"] == 0
