"""Commands reach the node as typed values, are answered with its state, and bodies are read strictly."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from neuroshard.api.context import answer_within
from neuroshard.api.problems import CommandTimeoutError
from neuroshard.errors import NotReadyError
from neuroshard.status.board import CommandChannel, Pause, Restart, Resume, SaveCheckpoint, Shutdown, UpdateSettings
from neuroshard.status.snapshot import NodeState
from tests.worlds.api import Api, FakeNode, make_api
from tests.worlds.statuses import training_status


def test_pause_for_a_while_and_for_good(api: Api) -> None:
    for body, expected in ((None, Pause()), ({}, Pause()), ({"duration_seconds": 90}, Pause(90.0))):
        response = api.command("POST", "/api/training/pause", body)
        assert (response.status_code, response.json()["state"]) == (202, "paused")
        assert api.node.taken[-1] == expected
    assert api.get("/api/status").json()["state"] == "paused"


def test_resume_save_and_stop(api: Api) -> None:
    assert api.command("POST", "/api/training/resume", {}).json()["state"] == "training"
    saved = api.command("POST", "/api/checkpoints").json()
    assert saved["message"] == "Saved step 20."
    assert saved["details"] == {"step": 20, "seconds": None}
    assert api.command("POST", "/api/restart").json()["state"] == "stopping"
    assert api.command("POST", "/api/shutdown").json()["state"] == "stopping"
    assert api.command("POST", "/api/shutdown").status_code == 202  # twice is fine
    assert [type(command) for command in api.node.taken] == [Resume, SaveCheckpoint, Restart, Shutdown]


def test_changed_settings_are_reported_as_stored(api: Api) -> None:
    response = api.command("PATCH", "/api/config", {"memory": 900, "peer": ["a", "b"]})
    assert response.status_code == 202
    assert response.json()["details"] == {"stored": {"memory": 900, "peer": ["a", "b"]}}
    assert api.node.taken == [UpdateSettings({"memory": 900, "peer": ["a", "b"]})]


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("POST", "/api/training/pause", b'{"duration_seconds": 0}'),
        ("POST", "/api/training/pause", b'{"duration_seconds": -5}'),
        ("POST", "/api/training/pause", b'{"duration_seconds": 1e9}'),
        ("POST", "/api/training/pause", b'{"duration_seconds": NaN}'),
        ("POST", "/api/training/pause", b'{"duration_seconds": "5"}'),
        ("POST", "/api/training/pause", b'{"duration_seconds": true}'),
        ("POST", "/api/training/pause", b'{"duration": 5}'),
        ("POST", "/api/training/resume", b'{"force": true}'),
        ("POST", "/api/shutdown", b"[]"),
        ("POST", "/api/shutdown", b"{"),
        ("PATCH", "/api/config", b"{}"),
        ("PATCH", "/api/config", b""),
        ("PATCH", "/api/config", b'{"Bad Name": 1}'),
        ("PATCH", "/api/config", b'{"\\ud800": 1}'),
        ("PATCH", "/api/config", b"\xff\xfe"),
        ("POST", "/api/shutdown", b"[" * 100_000),
        ("POST", "/api/training/pause", b'{"duration_seconds": ' + b"9" * 10_000 + b"}"),
    ],
)
def test_a_body_that_says_something_else_is_refused(api: Api, method: str, path: str, content: bytes) -> None:
    headers = {**api.secret, "Content-Type": "application/json"}
    response = api.call(method, path, headers=headers, content=content)
    assert response.status_code in (400, 422), response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert api.node.taken == []


@pytest.mark.parametrize(
    ("member", "value", "words"),
    [
        ("label", "x" * 41, "Use at most 40 characters."),
        ("uses", 0, "Use at least 1."),
        ("uses", 10_001, "Use at most 10000."),
        ("uses", 1.5, "Use a whole number."),
        ("uses", None, "Use a whole number."),
        ("days", "soon", "Use a number."),
        ("days", 0, "Use at least 0.01."),
    ],
)
def test_a_wrong_member_is_explained_in_words(api: Api, member: str, value: object, words: str) -> None:
    problem = api.command("POST", "/api/invitations", {member: value}).json()
    assert problem["errors"] == [{"location": f"body.{member}", "message": words}]
    assert problem["detail"] == f"body.{member}: {words}"
    assert api.node.taken == []


@pytest.mark.parametrize("state", [NodeState.STARTING, NodeState.STOPPING, NodeState.FAILED])
def test_a_node_that_is_not_ready_says_so(api: Api, state: NodeState) -> None:
    api.node.board.publish(replace(training_status(), state=state, state_reason="Reading the manifest."))
    for path in ("/api/training/pause", "/api/training/resume", "/api/checkpoints"):
        response = api.command("POST", path)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
    assert api.command("POST", "/v1/completions", {"prompt": "a"}).status_code == 503
    assert api.command("POST", "/api/shutdown").status_code == 202
    assert [command for command in api.node.taken if not isinstance(command, Shutdown)] == []


def test_too_many_waiting_commands_are_refused() -> None:
    node = FakeNode()  # nobody takes the commands
    api = make_api(node)
    for _ in range(64):
        node.commands.send(Resume())
    assert api.command("POST", "/api/training/pause").status_code == 503


def test_a_command_has_a_deadline_and_may_be_answered_later() -> None:
    channel = CommandChannel()

    async def ask() -> None:
        future = channel.send(Resume())
        with pytest.raises(CommandTimeoutError):
            await answer_within(future, 0.02)

    anyio.run(ask)
    taken = channel.take()
    assert taken is not None
    taken[1].set_exception(NotReadyError("late"))  # the loop is closed by now: no error may come of it
    assert taken[1].exception() is not None
