"""The security matrix of foreign pages and sessions: who is let in, who gets 401 and who 403."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.api.access import SESSION_SECONDS, SessionKeys
from neuroshard.api.address import HostPolicy
from neuroshard.status.board import Resume
from neuroshard.types import is_loopback
from tests.worlds.api import BODIES, SECRET, Api, FakeNode, make_api

HERE = "http://127.0.0.1:8000"
RESUME = "/api/training/resume"
FOREIGN = ["http://evil.example", "null", "https://127.0.0.1:8000", "http://localhost:8000", "http://127.0.0.1:3000"]
CHANGING = sorted(
    (method.upper(), path)
    for path, methods in make_api(FakeNode()).app.openapi()["paths"].items()
    for method in methods
    if method != "get"
)


def session(api: Api, base: str = HERE) -> dict[str, str]:
    """Headers of the dashboard's own page in a session, opened as the page of `neuroshard open` does."""
    host = base.removeprefix("http://")
    key = SessionKeys(SECRET, 0).new_entry_key(api.context.clock(), 1)
    response = api.call("POST", "/api/session", headers={"Host": host, "Origin": base}, json={"secret": key})
    assert response.status_code == 200
    cookie = response.headers["set-cookie"].partition(";")[0]
    return {"Host": host, "Cookie": cookie, "Origin": base, "X-NeuroShard-CSRF": response.json()["csrf_token"]}


def resume(api: Api, headers: dict[str, str]) -> int:
    """Status of a command with these headers; a refused one never reaches the node."""
    before = len(api.node.taken)
    status = api.call("POST", RESUME, headers=headers).status_code
    assert (len(api.node.taken) > before) == (status == 202)
    return status


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:8000"])
def test_own_names_are_served(api: Api, host: str) -> None:
    assert api.get("/api/status", {"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost:8001",
        "localhost.evil.example:8000",
        "127.0.0.1.nip.io:8000",
        "192.168.1.5:8000",
        "[::2]:8000",
        "localhost:8000:8000",
        "user@localhost:8000",
        "localhost:",
        "",
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/status", "/api/logs", "/api/events", "/health", "/nothing"])
def test_a_rebound_name_is_refused_everywhere(api: Api, host: str, path: str) -> None:
    response = api.get(path, {"Host": host})
    assert response.status_code == 403
    assert response.headers["content-type"] == "application/problem+json"


def test_the_secret_is_enough(api: Api) -> None:
    assert resume(api, {"Authorization": f"Bearer {SECRET}"}) == 202
    assert resume(api, {"Authorization": f"bearer {SECRET}", "Origin": HERE}) == 202
    assert api.node.taken == [Resume(), Resume()]


def test_without_or_with_a_wrong_secret_it_is_401(api: Api) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer"}, {"Authorization": "Bearer é"}):
        response = api.call("POST", RESUME, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"].startswith("Bearer")
    assert resume(api, {"Authorization": f"Basic {SECRET}"}) == 401
    assert api.node.taken == []


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_foreign_origin_is_refused_even_with_the_secret(api: Api, origin: str) -> None:
    assert resume(api, {"Authorization": f"Bearer {SECRET}", "Origin": origin}) == 403
    assert resume(api, {**session(api), "Origin": origin}) == 403
    assert api.get("/api/status", {"Origin": origin}).status_code == 403


@pytest.mark.parametrize(("method", "path"), CHANGING)
def test_nothing_that_changes_the_node_obeys_a_foreign_page(api: Api, method: str, path: str) -> None:
    body, before = BODIES.get((method.lower(), path)), api.node.board.versioned()
    for origin in FOREIGN:
        foreign = {"Origin": origin}
        for headers in (foreign, api.secret | foreign, session(api) | foreign):
            response = api.call(method, path, headers=headers, json=body)
            assert response.status_code == 403
            assert "set-cookie" not in response.headers
            assert api.call("GET", "/api/session", headers=headers).status_code == 403
    assert api.call(method, path, headers=api.secret | {"Host": "evil.example:8000"}, json=body).status_code == 403
    assert api.node.taken == []
    assert api.node.board.versioned() == before
    assert api.call(method, path, headers=session(api), json=body).status_code in (200, 201, 202)  # the own page


def test_the_routes_that_change_something_are_known() -> None:
    commands = {"/api/training/pause", RESUME, "/api/checkpoints", "/api/shutdown", "/api/config", "/v1/completions"}
    assert {path for _, path in CHANGING} >= commands


def test_the_own_page_may_command(api: Api) -> None:
    assert resume(api, session(api)) == 202
    assert resume(api, session(api, "http://localhost:8000")) == 202


def test_the_cookie_says_what_browsers_need(api: Api) -> None:
    cookie = api.get("/api/session").headers["set-cookie"]
    assert cookie.startswith("neuroshard_session_8000=")
    assert {"HttpOnly", "SameSite=strict", "Path=/", f"Max-Age={SESSION_SECONDS}"} <= set(cookie.split("; "))
    assert SECRET not in cookie


def test_a_session_is_kept_and_shared_between_tabs(api: Api) -> None:
    first = session(api)
    again = api.call("GET", "/api/session", headers={"Cookie": first["Cookie"]})
    assert "set-cookie" not in again.headers
    assert again.json()["csrf_token"] == first["X-NeuroShard-CSRF"]


@pytest.mark.parametrize("without", ["Origin", "X-NeuroShard-CSRF"])
def test_every_part_of_a_session_is_needed(api: Api, without: str) -> None:
    headers = session(api)
    del headers[without]
    assert resume(api, headers) == 403


def test_a_session_without_its_cookie_is_401(api: Api) -> None:
    headers = session(api)
    del headers["Cookie"]
    assert resume(api, headers) == 401


def test_a_wrong_part_of_a_session_is_refused(api: Api) -> None:
    good = session(api)
    other_page = session(api, "http://localhost:8000")
    assert resume(api, {**good, "X-NeuroShard-CSRF": "0" * 64}) == 403
    assert resume(api, {**good, "X-NeuroShard-CSRF": "é"}) == 403
    for cookie in (good["Cookie"] + "0", "neuroshard_session_8000=1.2.3", 'neuroshard_session_8000="'):
        assert resume(api, {**good, "Cookie": cookie}) == 401, cookie
        assert api.call("GET", "/api/status", headers={"Cookie": cookie}).status_code == 401, cookie
    assert resume(api, {**good, "Cookie": other_page["Cookie"]}) == 401  # bound to its origin


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain"])
def test_a_plain_form_is_refused(api: Api, kind: str) -> None:
    for headers in ({"Content-Type": kind}, {**session(api), "Content-Type": kind}):
        assert api.call("POST", RESUME, headers=headers, content=b"a=b").status_code == 403
        assert api.call("POST", "/api/session", headers=headers, content=b"secret=x").status_code == 403
    assert api.node.taken == []


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_sites_may_only_follow_a_link(api: Api, site: str) -> None:
    fetched = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "empty"}
    framed = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
    followed = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert api.get("/api/status", fetched).status_code == 403
    assert api.get("/", framed).status_code == 403
    assert api.get("/", followed).status_code == 200
    assert resume(api, {**session(api), **followed}) == 403


def test_no_cross_origin_resource_sharing(api: Api) -> None:
    preflight = {"Origin": "http://evil.example", "Access-Control-Request-Method": "POST"}
    response = api.call("OPTIONS", RESUME, headers=preflight)
    assert response.status_code == 403
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_security_headers(api: Api) -> None:
    for path in ("/", "/api/status", "/nothing"):
        headers = api.get(path).headers
        assert headers["referrer-policy"] == "no-referrer"
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]


def test_from_another_computer_the_secret_opens_a_session(open_api: Api) -> None:
    here = {"Host": "192.168.1.5:8000", "Origin": "http://192.168.1.5:8000"}
    opened = open_api.call("POST", "/api/session", headers=here, json={"secret": SECRET}, sender="192.168.1.9")
    cookie = {"Cookie": opened.headers["set-cookie"].partition(";")[0]}
    read = open_api.call("GET", "/api/status", headers=here | cookie, sender="192.168.1.9")
    assert read.status_code == 200
    assert resume(open_api, here | cookie | {"X-NeuroShard-CSRF": opened.json()["csrf_token"]}) == 202


def test_sessions_end() -> None:
    keys = SessionKeys(SECRET, 8000)
    cookie = keys.new_cookie(HERE, now=1_000.0)
    assert keys.accepts(cookie, HERE, now=1_000.0 + SESSION_SECONDS - 1)
    assert not keys.accepts(cookie, HERE, now=1_000.0 + SESSION_SECONDS)
    assert not SessionKeys(SECRET + "2", 8000).accepts(cookie, HERE, now=1_001.0)
    assert not keys.accepts(re.sub(r"^\d+", "99999999999", cookie), HERE, now=1_001.0)


@given(st.text(max_size=60))
def test_no_other_text_is_a_session(text: str) -> None:
    keys = SessionKeys(SECRET, 8000)
    assert not keys.accepts(text, HERE, now=0.0)
    assert not keys.is_secret(text)


@given(st.text(max_size=60))
def test_a_host_header_is_read_without_error(text: str) -> None:
    named = HostPolicy.for_host("127.0.0.1", 8000).allows(text)
    assert not named or re.sub(r":\d*$", "", text.lower()) in {"localhost", "127.0.0.1", "[::1]"}


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.168.1.5", "example.org")] == [False] * 4
