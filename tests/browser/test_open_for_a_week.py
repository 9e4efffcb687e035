"""A page that was open for a week: as many events as come in days leave no more behind than those of an hour."""

from __future__ import annotations

from typing import Any

import pytest
import snapshots
import swarm_snapshots
from dashboard_session import StartNode, sign_in
from playwright.sync_api import Browser, CDPSession, Page, expect

from neuroshard.api.rendering import as_python

pytestmark = pytest.mark.browser
HOUR = 3_200  # rounds of events: more than the log keeps
MORE = 5_000
SPARE_BYTES = 3_000_000

# Instead of the network's: as many events as wanted, at once.
FAKE_STREAM = """
  window.EventSource = class extends EventTarget {
    constructor() { super(); window.stream = this; setTimeout(() => this.onopen?.(), 0); }
    close() {}
  };
  window.step = 764;
  window.flood = async (rounds, status) => {
    const tell = (name, data) => window.stream.dispatchEvent(new MessageEvent(name, { data: JSON.stringify(data) }));
    const views = ["home", "contribution", "files", "network", "talk", "model", "settings"];
    for (let round = 0; round < rounds; round++) {
      const step = ++window.step;
      tell("status", { ...status, time: status.time + step, training: { ...status.training, steps: step } });
      const message = `line ${step} `.repeat(8);
      tell("log", { sequence: step, time: step, level: "INFO", logger: "neuroshard", message });
      if (round % 100 === 0) {
        location.hash = views[(round / 100) % views.length];
        await new Promise((resolve) => setTimeout(resolve, 0));
        await new Promise(requestAnimationFrame);
      }
    }
    location.hash = "home";
    await new Promise((resolve) => setTimeout(resolve, 100));
  };
"""


def heap_bytes(session: CDPSession) -> int:
    """What the page keeps, after everything else was collected."""
    session.send("HeapProfiler.collectGarbage")
    used: dict[str, Any] = session.send("Runtime.getHeapUsage")
    return int(used["usedSize"])


def elements(page: Page) -> int:
    count: int = page.evaluate("document.querySelectorAll('*').length")
    return count


@pytest.mark.long
def test_memory_stays_bounded(chromium: Browser, start_node: StartNode) -> None:
    node = start_node(swarm_snapshots.among(20))
    status = as_python(snapshots.with_a_past())
    context = chromium.new_context(reduced_motion="reduce")
    try:
        page = context.new_page()
        page.add_init_script(FAKE_STREAM)
        sign_in(context, node.url)
        page.goto(node.url)
        expect(page.get_by_role("button", name="Pause")).to_be_enabled()
        session = context.new_cdp_session(page)
        flood = "([rounds, status]) => window.flood(rounds, status)"
        page.evaluate(flood, [HOUR, status])
        before, drawn = heap_bytes(session), elements(page)
        page.evaluate(flood, [MORE, status])
        after = heap_bytes(session)
        assert page.evaluate("window.step") == 764 + HOUR + MORE
        assert after < 1.2 * before + SPARE_BYTES, (before, after)
        assert elements(page) <= drawn + 20
        expect(page.get_by_role("heading", level=1)).to_contain_text("Your computer is teaching")
    finally:
        context.close()
