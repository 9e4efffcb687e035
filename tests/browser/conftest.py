"""A real browser against the real API; skipped, with the reason, where there is no browser or no built dashboard."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import snapshots
from dashboard_session import PATIENCE_MS, StartNode, Visits
from playwright.sync_api import Browser, Error, expect, sync_playwright

from neuroshard.api.context import ApiLimits
from neuroshard.status.snapshot import NodeStatus
from tests.worlds.api import ServedNode
from tests.worlds.system_programs import chromium_path

QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for the tests of a module."""
    path = chromium_path()
    if path is None:
        pytest.skip("no chromium on this computer: the dashboard is not tested")
    if not files("neuroshard.api").joinpath("static", "index.html").is_file():
        pytest.skip("the dashboard is not built: run `make web`")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=QUIET)
        except Error as error:
            pytest.skip(f"{path} does not start: {error.message.splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def start_node() -> Iterator[StartNode]:
    """Starts fake nodes and stops them after the test."""
    nodes: list[ServedNode] = []

    def start(
        status: NodeStatus | None = None, port: int = 0, folder: Path | None = None, limits: ApiLimits | None = None
    ) -> ServedNode:
        node = ServedNode(status or snapshots.training(), port, folder=folder, limits=limits)
        nodes.append(node)
        node.start()
        return node

    yield start
    for node in nodes:
        node.stop()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Visits]:
    """Opens the dashboard; after the test nothing may stand on the console and no other host may have been asked."""
    visits = Visits(chromium)
    yield visits
    visits.close()
    ours = ("http://127.0.0.1:", "http://localhost:", "file:", "about:")
    assert [url for url in visits.requested if not url.startswith(ours)] == []
    assert visits.unexpected_complaints() == []
