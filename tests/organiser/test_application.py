"""The organiser's routes: statuses, problem documents, limits, and no word of a stranger that is more than text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from neuroshard.identity.admissions import ADMISSION_SECONDS, JOIN, LEAVE, MAX_JOIN_BYTES, REFRESH
from neuroshard.organiser.application import OrganiserContext, create_organiser_app
from neuroshard.organiser.desk import RunPlan
from neuroshard.runs.offer import checked_offer
from tests.organiser.desks import OFFER, RUN, Desk


class Site:
    """The application of a desk, asked by clients of several networks."""

    def __init__(self) -> None:
        self.desk = Desk()
        context = OrganiserContext(
            RunPlan(OFFER, self.desk.places), self.desk.desk, lambda: self.desk.now, lambda: self.desk.now
        )
        self.app = create_organiser_app(context)

    def client(self, host: str = "192.0.2.1") -> TestClient:
        return TestClient(self.app, "http://organiser", raise_server_exceptions=False, client=(host, 4000))


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.desk.database.close()


def problem(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert (document["code"], document["status"]) == (code, status)
    assert document["action"]
    assert document["detail"]
    return document


def test_a_node_joins_waits_is_admitted_refreshes_and_leaves(site: Site) -> None:
    client, desk = site.client(), site.desk
    left_at = desk.now + ADMISSION_SECONDS
    for number in range(3):
        if number:
            desk.now = left_at - 10  # the first one's admission ends soon
        answer = client.put("/api/join", content=desk.claim(number))
        assert (answer.status_code, answer.json()["status"]) == (200, "admitted")
        assert answer.headers["cache-control"] == "no-store"
    waiting = client.put("/api/join", content=desk.claim(3))
    assert waiting.status_code == 202
    facts = waiting.json()
    assert (facts["status"], facts["position"], facts["next_poll_seconds"]) == ("queued", 1, 10)
    assert client.post("/api/leave", content=desk.claim(0, LEAVE)).status_code == 204
    question = {"request_id": facts["request_id"], "session_token": facts["session_token"], "download_finished": True}
    assert client.put("/api/authorization_status", json=question).status_code == 202
    desk.now = left_at + 1
    polled = client.put("/api/authorization_status", json=question)
    assert (polled.status_code, polled.json()["stage"]) == (200, "head-0")
    assert client.put("/api/authorization_status", json=question).json() == polled.json()
    refreshed = client.post("/api/refresh", content=desk.claim(3, REFRESH))
    assert refreshed.json() == polled.json()


def test_refusals_are_problem_documents_with_the_time_of_the_server(site: Site) -> None:
    client, desk = site.client("127.0.0.1"), site.desk
    claim = desk.claim(1)
    client.put("/api/join", content=claim)
    assert problem(client.put("/api/join", content=claim), 401, "replayed")["server_time"] == desk.now
    problem(client.put("/api/join", content=desk.claim(1, at=desk.now - 999)), 401, "expired")
    problem(client.put("/api/join", content=b"no claim"), 400, "bad_request")
    problem(client.put("/api/join", content=bytes(MAX_JOIN_BYTES + 1)), 413, "too_large")
    problem(client.post("/api/refresh", content=desk.claim(2, REFRESH)), 404, "no_place")
    problem(client.post("/api/refresh", content=desk.claim(2, JOIN)), 400, "bad_request")
    problem(client.get("/api/join"), 405, "no_route")
    problem(client.get("/nowhere"), 404, "no_route")
    question = {"request_id": "unknown", "session_token": "0" * 64}
    problem(client.put("/api/authorization_status", json=question), 401, "bad_session")
    problem(client.put("/api/authorization_status", json={**question, "extra": 1}), 400, "bad_request")
    problem(client.put("/api/authorization_status", content=b"{" * 1000), 400, "bad_request")
    problem(client.put("/api/authorization_status", content=b" " * 1025), 413, "too_large")


def test_a_network_may_join_ten_times_a_minute(site: Site) -> None:
    desk = site.desk
    for number in range(10):
        assert site.client(f"192.0.2.{number}").put("/api/join", content=desk.claim(number)).status_code in {200, 202}
    refused = site.client("192.0.2.99").put("/api/join", content=desk.claim(11))
    problem(refused, 429, "too_many_joins")
    assert refused.headers["retry-after"] == "60"
    assert site.client("192.0.3.1").put("/api/join", content=desk.claim(11)).status_code == 202
    assert site.client("2001:db8::1").put("/api/join", content=desk.claim(12)).status_code == 202
    desk.now += 60
    assert site.client("192.0.2.99").put("/api/join", content=desk.claim(13)).status_code == 202


@pytest.mark.parametrize(("form", "most"), [("2001:db8:7:{:x}::1", 40), ("198.51.{}.1", 40)])
def test_many_networks_of_one_line_share_a_limit(site: Site, form: str, most: int) -> None:
    desk = site.desk
    statuses = [
        site.client(form.format(number)).put("/api/join", content=desk.claim(number % 50)).status_code
        for number in range(most + 2)
    ]
    assert [status == 429 for status in statuses] == [False] * most + [True] * 2
    assert site.client("2001:db8:8::1").put("/api/join", content=desk.claim(60)).status_code == 202


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "Via", "X-Real-IP"])
def test_a_proxy_that_hides_its_clients_is_not_this_computer(site: Site, header: str) -> None:
    def join(number: int, **headers: str) -> int:
        claim = site.desk.claim(number)
        return site.client("127.0.0.1").put("/api/join", content=claim, headers=headers).status_code

    assert 429 not in [join(number) for number in range(12)]
    assert [join(number, **{header: "127.0.0.1"}) == 429 for number in range(11)] == [False] * 10 + [True]


def test_a_database_that_fails_is_503_and_the_next_request_works(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlite3

    def broken(_: bytes) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    client = site.client()
    with monkeypatch.context() as patched:
        patched.setattr(site.desk.desk, "join", broken)
        failed = client.put("/api/join", content=site.desk.claim(1))
    problem(failed, 503, "no_database")
    assert failed.headers["retry-after"] == "30"
    assert client.put("/api/join", content=site.desk.claim(1)).status_code == 200


def test_the_public_reads_the_run_and_its_parameters(site: Site) -> None:
    client = site.client()
    client.put("/api/join", content=site.desk.claim(1, name="<b>Ada</b>"))
    answer = client.get("/api/run")
    facts = answer.json()
    assert (facts["run_id"], facts["name"], facts["queue"], facts["trouble"]) == (RUN, "organised", 0, "")
    assert [stage["free"] for stage in facts["stages"]] == [0, 1, 1, 10]
    assert "Ada" not in answer.text
    assert answer.headers["cache-control"] == "public, max-age=5"
    assert "set-cookie" not in answer.headers
    assert checked_offer(RUN, client.get("/api/parameters").content) == OFFER
    assert client.get("/health").json() == {"status": "ok"}


def test_every_route_is_documented(site: Site) -> None:
    routes = {(path, verb) for path, verbs in site.app.openapi()["paths"].items() for verb in verbs}
    assert routes == {
        ("/api/join", "put"),
        ("/api/authorization_status", "put"),
        ("/api/refresh", "post"),
        ("/api/leave", "post"),
        ("/api/run", "get"),
        ("/api/leaderboard", "get"),
        ("/api/parameters", "get"),
        ("/metrics", "get"),
        ("/health", "get"),
    }
    assert json.dumps(site.app.openapi())
