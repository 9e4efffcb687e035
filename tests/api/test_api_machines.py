"""The machines of the owner's wallet: listed for the owner only, and paused and resumed together or one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neuroshard.api.access import SessionKeys
from neuroshard.errors import UsageError
from neuroshard.status.board import OrderMachines
from neuroshard.status.snapshot import NodeState
from tests.worlds.api import SECRET, Api
from tests.worlds.run_commands import ATTIC
from tests.worlds.statuses import among


@pytest.fixture(autouse=True)
def _connected(api: Api) -> None:
    api.node.board.publish(among(2))


def test_the_owner_sees_each_machine_with_its_last_status(api: Api) -> None:
    here, attic, absent = api.get("/api/machines").json()["machines"]
    assert (here["is_here"], attic["is_here"], absent["is_reachable"]) == (True, False, False)
    assert here["status"] == {
        "name": "laptop",
        "version": "0.0.1",
        "state": "training",
        "reason": "Training.",
        "run_id": "ab" * 32,
        "parameters": 123_456,
        "tokens_per_second": 900.0,
        "tokens_in_a_day": 0,
    }
    assert absent["seen_at"] == here["seen_at"] - 3600
    assert api.node.taken == []


def test_without_the_owners_key_there_is_no_list(api: Api) -> None:
    token = {"Authorization": f"Bearer {SessionKeys(SECRET, 8000).read_token}"}
    assert api.call("GET", "/api/status", headers=token).status_code == 200
    for headers in ({}, token):
        for method, path in (("GET", ""), ("HEAD", ""), ("POST", "/pause"), ("POST", "/resume")):
            assert api.call(method, f"/api/machines{path}", headers=headers).status_code == 401
    assert api.node.taken == []


def test_all_machines_or_one_are_paused_and_resumed(api: Api) -> None:
    for body in (None, {}):
        response = api.command("POST", "/api/machines/pause", body)
        assert response.status_code == 202
        assert [one["has_obeyed"] for one in response.json()["machines"]] == [True, True, False]
        assert response.json()["machines"][2]["message"] == "It did not answer."
    assert api.command("POST", "/api/machines/resume", {"node_id": ATTIC}).json()["message"] == "1 of 1 did it."
    assert api.node.taken == [OrderMachines("pause"), OrderMachines("pause"), OrderMachines("resume", ATTIC)]


@pytest.mark.parametrize(
    "content",
    [b'{"node_id": 5}', b'{"node_id": ""}', b'{"node_id": "a/b"}', b'{"duration_seconds": 5}', b"[]", b"{"],
)
def test_a_body_that_says_something_else_is_refused(api: Api, content: bytes) -> None:
    headers = {**api.secret, "Content-Type": "application/json"}
    assert api.call("POST", "/api/machines/pause", headers=headers, content=content).status_code in (400, 422)
    assert api.node.taken == []


def test_an_unknown_machine_is_refused_in_the_nodes_words(api: Api) -> None:
    api.node.refuse = UsageError("No machine of your wallet has this node id.")
    response = api.command("POST", "/api/machines/pause", {"node_id": "unknown"})
    assert response.status_code == 422
    assert "No machine of your wallet" in response.json()["detail"]


def test_the_others_are_reached_also_while_this_machine_starts(api: Api) -> None:
    api.node.board.publish(replace(among(2), state=NodeState.STARTING, state_reason="Reading."))
    assert api.get("/api/machines").status_code == 200
    assert api.command("POST", "/api/machines/pause").status_code == 202
