"""The owner's door: no route answers without a key but the public ones, and what each kind of key opens."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from neuroshard.api.access import (
    ENTRY_SECONDS,
    FRAGMENT,
    OWNERS_READING,
    PUBLIC_NUMBERS,
    SESSION_SECONDS,
    SessionKeys,
    load_or_create_secret,
    new_entrance,
)
from neuroshard.api.app import create_app
from neuroshard.status.board import Resume
from tests.worlds.api import BODIES, SECRET, Api, FakeNode, make_api

HERE = "http://127.0.0.1:8000"
PUBLIC = {("get", "/health"), *(("get", path) for path in PUBLIC_NUMBERS)}
PRIVATE_NUMBERS = {"nodes", "model_hashes", "local"}
ROUTES = sorted(
    (method, path.replace("{model}", "neuroshard"))
    for app in (make_api(FakeNode()).app,)
    for path, methods in app.openapi()["paths"].items()
    for method in methods
)
KEYS = SessionKeys(SECRET, 8000)


@pytest.fixture
def late_api(node: FakeNode) -> Api:
    """The same node eight days later."""
    return make_api(node, clock=lambda: 1_061.0 + SESSION_SECONDS + 86_400)


def entry_key(now: float = 1_061.0, seconds: int = ENTRY_SECONDS) -> str:
    return KEYS.new_entry_key(now, seconds)


def opened(api: Api, key: str, headers: dict[str, str] | None = None) -> int:
    response = api.call("POST", "/api/session", headers=headers or {"Origin": HERE}, json={"secret": key})
    assert ("set-cookie" in response.headers) == (response.status_code == 200)
    return response.status_code


def without_a_key(api: Api) -> list[dict[str, str]]:
    """What a program of another user, a sandboxed one, or an old page can send."""
    cookie, expired = "neuroshard_session_8000", KEYS.new_cookie(HERE, 1_061.0 - SESSION_SECONDS)
    forged = SessionKeys("another-secret-that-is-long-enough-too", 8000).new_cookie(HERE, 1_061.0)
    csrf = {"Origin": HERE, "X-NeuroShard-CSRF": KEYS.csrf_token(expired)}
    return [
        {},
        {"Origin": HERE, "Sec-Fetch-Site": "same-origin"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {entry_key()}"},  # a key to the door opens nothing else
        {"Cookie": f"{cookie}={expired}", **csrf},
        {"Cookie": f"{cookie}={forged}", **csrf},
    ]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_but_the_public_ones_needs_a_key(api: Api, method: str, path: str) -> None:
    body, before = BODIES.get((method, path)), api.node.board.versioned()
    if (method, path) == ("post", "/api/session"):
        body = {"secret": "wrong"}  # the route at which a key is given
    for headers in without_a_key(api):
        response = api.call(method.upper(), path, headers=headers, json=body)
        assert response.status_code == (200 if (method, path) in PUBLIC else 401), headers
        assert "set-cookie" not in response.headers
    assert api.node.taken == []
    assert api.node.board.versioned() == before


def test_what_is_not_in_the_document_needs_a_key_as_well(api: Api) -> None:
    for path in ("/openapi.json", "/nothing", "/api/nothing", "/v1/nothing", "/docs"):
        assert api.call("GET", path).status_code == 401, path
    assert api.call("HEAD", "/api/status").status_code == 401
    assert api.call("OPTIONS", "/api/config").status_code == 401
    assert api.get("/openapi.json").status_code == 200
    assert api.call("GET", "/").status_code == 200  # the page that says how to open it


def test_the_public_numbers_name_no_node(api: Api) -> None:
    public = api.call("GET", "/api/training/global").json()
    whole = api.get("/api/training/global").json()
    assert {name for name in whole if name not in public} == PRIVATE_NUMBERS
    assert public == {name: value for name, value in whole.items() if name not in PRIVATE_NUMBERS}
    assert "12D3Koo" not in str(public)
    tag = api.get("/api/training/global").headers["etag"]
    again = api.call("GET", "/api/training/global", headers={"If-None-Match": tag})
    assert again.json() == public  # the tag of the whole answer is not that of the public one


def test_from_another_computer_only_the_health_is_public(open_api: Api) -> None:
    here = {"Host": "192.168.1.5:8000"}
    for method, path in ROUTES:
        if method == "get" and path != "/api/events":
            found = open_api.call("GET", path, headers=here, sender="192.168.1.9")
            assert found.status_code == (200 if path == "/health" else 401), path
            known = open_api.call("GET", path, headers=here | open_api.secret, sender="192.168.1.9")
            assert known.status_code == 200, path
    assert open_api.call("GET", "/", headers=here, sender="192.168.1.9").status_code == 200


def test_the_read_token_reads_and_does_nothing_else(api: Api) -> None:
    token = {"Authorization": f"Bearer {KEYS.read_token}"}
    for method, path in ROUTES:
        if path == "/api/events":
            continue
        is_open = method == "get" and path != "/api/session" and path not in OWNERS_READING
        expected = 200 if is_open else 401
        body = {"secret": KEYS.read_token} if path == "/api/session" else BODIES.get((method, path))
        assert api.call(method.upper(), path, headers=token, json=body).status_code == expected, (method, path)
    assert "nodes" in api.call("GET", "/api/training/global", headers=token).json()
    assert api.node.taken == []
    assert SessionKeys(SECRET + "2", 8000).read_token != KEYS.read_token


def test_a_key_opens_one_session(api: Api) -> None:
    key = entry_key()
    response = api.call("POST", "/api/session", headers={"Origin": HERE}, json={"secret": key})
    page = {"Cookie": response.headers["set-cookie"].partition(";")[0], "Origin": HERE}
    assert api.call("GET", "/api/status", headers=page).status_code == 200
    command = page | {"X-NeuroShard-CSRF": response.json()["csrf_token"]}
    assert api.call("POST", "/api/training/resume", headers=command).status_code == 202
    assert api.node.taken == [Resume()]
    assert opened(api, key) == 401  # whoever reads the page later comes too late


def test_no_other_key_opens_a_session(api: Api) -> None:
    expiry, nonce, seal = entry_key().split(".")
    expired = entry_key(now=1_061.0 - ENTRY_SECONDS)
    forged = (f"{int(expiry) + 600}.{nonce}.{seal}", f"{expiry}.x.{'0' * 64}", "..", "é.é.é", "x" * 200)
    cookie = KEYS.new_cookie(HERE, 1_061.0)
    stranger = SessionKeys("another-secret-that-is-long-enough-too", 8000).new_entry_key(1_061.0, 600)
    for key in (expired, *forged, cookie, stranger, KEYS.csrf_token(cookie)):
        assert opened(api, key) == 401, key


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:3000"])
def test_a_foreign_page_opens_no_session_even_with_a_key(api: Api, origin: str) -> None:
    assert opened(api, entry_key(), {"Origin": origin}) == 403
    assert opened(api, entry_key(), {"Origin": HERE, "Sec-Fetch-Site": "cross-site"}) == 403
    assert opened(api, entry_key(), {"Host": "evil.example:8000"}) == 403


def test_a_session_ends_after_a_week(api: Api, late_api: Api) -> None:
    response = api.call("POST", "/api/session", headers={"Origin": HERE}, json={"secret": entry_key()})
    page = {"Cookie": response.headers["set-cookie"].partition(";")[0], "Origin": HERE}
    command = page | {"X-NeuroShard-CSRF": response.json()["csrf_token"]}
    for path, method, headers in (("/api/status", "GET", page), ("/api/training/resume", "POST", command)):
        refused = late_api.call(method, path, headers=headers)
        assert (refused.status_code, "neuroshard open" in refused.json()["action"]) == (401, True)
    assert late_api.call("GET", "/api/session", headers=page).status_code == 401


def test_the_page_with_the_key_is_private_and_opens_this_node_only(tmp_path: Path, node: FakeNode, api: Api) -> None:
    folder = tmp_path / "node"
    entrance = new_entrance(folder, "http://localhost:8000", 1_061.0)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (entrance.page, folder)] == [0o600, 0o700]
    content = entrance.page.read_text(encoding="utf-8")
    assert content.count(entrance.address) == 2  # it forwards there, and has a link
    secret = load_or_create_secret(folder)
    assert secret not in content
    address, _, key = entrance.address.partition(f"#{FRAGMENT}")
    assert address == "http://localhost:8000/"
    assert opened(api, key) == 401  # a node with another data folder
    own = replace(api.context, secret=secret)
    assert opened(Api(node, own, create_app(own)), key) == 200
    second = new_entrance(folder, "http://localhost:8000", 1_061.0)
    assert (second.page, second.address == entrance.address) == (entrance.page, False)
