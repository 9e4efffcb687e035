"""Model tokens: they open the model and nothing else, end at once, and are not on the disk."""

from __future__ import annotations

import stat
from pathlib import Path
from threading import Thread

import pytest

from neuroshard.api.access import MODEL_PATHS
from neuroshard.api.model_tokens import MAX_TOKENS, TOKENS_FILE, ModelTokens
from neuroshard.errors import ConflictError, UsageError
from tests.api.test_owners_door import PUBLIC, ROUTES
from tests.worlds.api import BODIES, Api

FOR_THE_MODEL = {
    ("get", "/v1/models"),
    ("get", "/v1/models/neuroshard"),
    ("post", "/v1/completions"),
    ("post", "/v1/chat/completions"),
}


def made(api: Api, name: str = "program") -> dict[str, str]:
    """The headers of a program with a new token."""
    response = api.command("POST", "/api/model-tokens", {"name": name})
    assert response.status_code == 201, response.text
    return {"Authorization": f"Bearer {response.json()['token']}"}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_model_token_opens_the_model_and_nothing_else(api: Api, method: str, path: str) -> None:
    headers, before = made(api), api.node.board.versioned()
    token = headers["Authorization"].removeprefix("Bearer ")
    body = {"secret": token} if path == "/api/session" else BODIES.get((method, path))
    opens = (method, path) in FOR_THE_MODEL or (method, path) in PUBLIC
    response = api.call(method.upper(), path, headers=headers, json=body)
    assert response.status_code == (200 if opens else 401), response.text
    assert "set-cookie" not in response.headers
    assert '"nodes"' not in response.text or path != "/api/training/global"
    if (method, path) not in FOR_THE_MODEL:
        assert api.node.taken == []
    assert api.node.board.versioned() == before


def test_the_routes_of_the_model_are_known() -> None:
    below = {(method, path) for method, path in ROUTES if path.startswith("/v1/")}
    assert below == FOR_THE_MODEL
    assert {path for _, path in below} - {"/v1/models/neuroshard"} == MODEL_PATHS


@pytest.mark.parametrize("path", ["/v1/models/../../api/status", "/v1/models/%2e%2e/%2e%2e/api/status", "/v1/nothing"])
def test_no_path_leads_from_the_model_to_another_route(api: Api, path: str) -> None:
    assert api.call("GET", path, headers=made(api)).status_code in {401, 404}


def test_a_model_token_from_a_foreign_page_or_for_another_host_is_refused(api: Api) -> None:
    headers = made(api)
    for foreign in (
        {"Origin": "https://evil.example"},
        {"Host": "evil.example:8000"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        assert api.call("GET", "/v1/models", headers=headers | foreign).status_code == 403


def test_a_removed_token_opens_nothing_and_the_others_stay(api: Api) -> None:
    first, second = made(api, "first"), made(api, "second")
    assert [one["name"] for one in api.get("/api/model-tokens").json()["tokens"]] == ["openai", "first", "second"]
    assert api.command("POST", "/api/model-tokens/remove", {"name": "first"}).status_code == 202
    assert api.call("GET", "/v1/models", headers=first).status_code == 401
    assert api.call("GET", "/v1/models", headers=second).status_code == 200
    assert api.command("POST", "/api/model-tokens/remove", {"name": "first"}).status_code == 422
    assert api.command("POST", "/api/model-tokens", {"name": "second"}).status_code == 409


@pytest.mark.parametrize(("method", "path"), sorted(FOR_THE_MODEL))
def test_a_refused_call_to_the_model_says_how_to_get_a_token(api: Api, method: str, path: str) -> None:
    removed = made(api)
    api.command("POST", "/api/model-tokens/remove", {"name": "program"})
    for headers, sent in ((removed, "it is wrong, or was removed"), ({}, "needs a model token or the API secret")):
        refused = api.call(method.upper(), path, headers=headers, json={}).json()
        assert sent in refused["detail"]
        assert "`neuroshard token model NAME`" in refused["action"]
        assert refused["error"]["message"] == f"{refused['detail']} {refused['action']}"  # what client libraries show


def test_a_refused_call_to_another_route_names_no_model_token(api: Api) -> None:
    for method, path in (("GET", "/api/status"), ("POST", "/api/training/pause")):
        for headers, sent in ((made(api, path), "The key of this call is wrong, or does not"), ({}, "needs a session")):
            refused = api.call(method, path, headers=headers, json={}).json()
            assert sent in refused["detail"]
            assert "api-secret" in refused["action"]
            assert "token model" not in refused["action"]


def test_the_file_is_private_and_contains_no_token(tmp_path: Path) -> None:
    tokens = ModelTokens(tmp_path)
    token = tokens.add(" lm-eval ", 1_000.5)
    file = tmp_path / TOKENS_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token not in file.read_text()
    assert token.removeprefix("model-") not in file.read_text()
    assert [(one.name, one.made_at) for one in tokens.all()] == [("lm-eval", 1_000)]
    other = ModelTokens(tmp_path)  # the command, while the node runs
    assert other.accepts(token)
    for wrong in ("", "model-", token[:-1], token + "x", token.upper(), tokens.all()[0].digest, "model-\ud800"):
        assert not other.accepts(wrong), wrong
    other.remove("lm-eval")
    assert not tokens.accepts(token)


def test_a_damaged_file_opens_nothing_and_does_not_stop_the_node(tmp_path: Path) -> None:
    tokens = ModelTokens(tmp_path)
    token = tokens.add("program", 0)
    (tmp_path / TOKENS_FILE).write_text("{")
    assert not tokens.accepts(token)
    assert tokens.accepts(tokens.add("program", 0))


@pytest.mark.parametrize("name", ["", " ", "x" * 41, "two\nlines", "\x00"])
def test_a_wrong_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="printable"):
        ModelTokens(tmp_path).add(name, 0)
    assert not (tmp_path / TOKENS_FILE).exists()


def test_the_number_of_tokens_is_bounded_and_none_is_lost(tmp_path: Path) -> None:
    threads = [Thread(target=ModelTokens(tmp_path).add, args=(str(number), 0)) for number in range(MAX_TOKENS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ModelTokens(tmp_path).all()) == MAX_TOKENS
    with pytest.raises(ConflictError, match="Remove"):
        ModelTokens(tmp_path).add("one more", 0)
