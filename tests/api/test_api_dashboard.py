"""The dashboard's files: exact paths from the package, and a page that helps when they are not built."""

from __future__ import annotations

from pathlib import Path

import anyio
import httpx
import pytest
from starlette.applications import Starlette

from neuroshard.api.dashboard import NOT_BUILT, dashboard_files, dashboard_routes
from tests.worlds.api import Api


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A dashboard as the build leaves it."""
    (tmp_path / "static" / "assets").mkdir(parents=True)
    (tmp_path / "static" / "index.html").write_text("<title>NeuroShard</title>")
    (tmp_path / "static" / "favicon.svg").write_text("<svg/>")
    (tmp_path / "static" / "assets" / "index-abc123.js").write_text("1")
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "static"


def fetch(app: Starlette, path: str) -> httpx.Response:
    async def request() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await client.get(path)

    return anyio.run(request)


def test_files_have_their_types_and_lifetimes(built: Path) -> None:
    app = Starlette(routes=dashboard_routes(dashboard_files(built)))
    page = fetch(app, "/")
    assert (page.text, page.headers["cache-control"]) == ("<title>NeuroShard</title>", "no-cache")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    script = fetch(app, "/assets/index-abc123.js")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "immutable" in script.headers["cache-control"]
    assert fetch(app, "/favicon.svg").headers["content-type"] == "image/svg+xml"


@pytest.mark.parametrize("path", ["/../secret.txt", "/%2e%2e/secret.txt", "/assets/..%2f..%2fsecret.txt", "/assets/"])
def test_no_other_file_can_be_read(built: Path, path: str) -> None:
    assert fetch(Starlette(routes=dashboard_routes(dashboard_files(built))), path).status_code == 404


def test_without_a_build_the_page_helps(tmp_path: Path) -> None:
    found = dashboard_files(tmp_path / "nothing")
    assert set(found) == {"/"}
    assert found["/"].content == NOT_BUILT


def test_the_page_is_at_the_root(api: Api) -> None:
    response = api.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    assert api.call("HEAD", "/").status_code == 200
