"""The dashboard in front of a real node: it starts, trains, is killed, and comes back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from dashboard_session import OpenPage
from playwright.sync_api import expect

from benchmarks.node_process import free_port, running_node

pytestmark = [pytest.mark.browser, pytest.mark.process]
FIRST_START_MS = 90_000
SLOW_MS = 90_000
TRAINS = re.compile("Your computer is (training|teaching)")
STEPS = re.compile(r"made [\d,]+ learning steps?")
FIRST_SAMPLE = re.compile("Before its first step|Steps 0 to ")  # a busy computer learns on while it writes


def test_a_demo_starts_dies_and_comes_back_before_the_readers_eyes(open_page: OpenPage, tmp_path: Path) -> None:
    port = free_port()
    with running_node(tmp_path, [], demo=True, port=port) as node:
        node.first_answer_seconds()
        secret = (node.data_dir / "api-secret").read_text().strip()
        page = open_page(node.url, secret=secret, excused="Failed to load resource")
        headline = page.get_by_role("heading", level=1)
        expect(headline).to_have_text("Your computer is getting ready to train.")
        # it comes once PyTorch is loaded, which the page says meanwhile
        expect(page.get_by_role("heading", name="Getting ready", exact=True)).to_be_visible(timeout=60_000)
        expect(page.get_by_text("Building the demo data", exact=True)).to_be_visible()
        expect(headline).to_contain_text(TRAINS, timeout=FIRST_START_MS)
        expect(page.locator("main")).to_contain_text(STEPS, use_inner_text=True, timeout=SLOW_MS)
        expect(page.get_by_text("Demo data", exact=True).first).to_be_visible()
        expect(page.get_by_role("heading", name="Getting ready", exact=True)).to_have_count(0)
        page.get_by_role("link", name="Files").click()
        page.get_by_role("button", name="Save a checkpoint now").click()
        expect(page.locator(".message")).to_contain_text("saved", timeout=SLOW_MS)
        page.get_by_role("link", name="Talk", exact=True).click()
        page.get_by_label("Max tokens").fill("8")
        page.get_by_role("button", name="Continue the text").click()
        expect(page.get_by_text("It reached the number of tokens you asked for.")).to_be_visible(timeout=SLOW_MS)
        expect(page.get_by_role("heading", name=FIRST_SAMPLE)).to_be_visible(timeout=SLOW_MS)
        page.get_by_role("link", name="Settings").click()
        page.get_by_role("button", name="Change CPU threads").click()
        page.get_by_role("textbox", name="CPU threads").fill("1")
        page.get_by_role("button", name="Save", exact=True).click()
        expect(page.get_by_text("After a restart: 1 thread.")).to_be_visible(timeout=SLOW_MS)
        node.kill()
        gone = page.get_by_role("alert")
        expect(gone).to_contain_text("The node is gone: it does not answer any more.", timeout=SLOW_MS)
    with running_node(tmp_path, [], demo=True, port=port) as node:
        expect(gone).to_have_count(0, timeout=SLOW_MS)
        expect(page.get_by_text("After a restart: 1 thread.")).to_have_count(0, timeout=SLOW_MS)
        setting = page.get_by_role("listitem").filter(has=page.get_by_role("heading", name="CPU threads"))
        expect(setting).to_contain_text("stored here", timeout=SLOW_MS)
        page.get_by_role("link", name="Home").click()
        expect(headline).to_contain_text(TRAINS, timeout=FIRST_START_MS)
        expect(page.locator("main")).to_contain_text(STEPS, use_inner_text=True, timeout=SLOW_MS)
        expect(page.get_by_role("button", name="Pause")).to_be_enabled()
        page.get_by_role("button", name="Pause").click()
        expect(headline).to_have_text("Training is paused. Finished steps are kept.")
        status = node.get("/api/status")
        assert status["state"] == "paused"
        assert status["resources"]["cpu_threads_limit"] == 1
        assert node.get("/api/samples")["samples"][0]["step"] == 0
        assert "Restored step" in status["checkpoints"]["restored"]
