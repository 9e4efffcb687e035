"""The dashboard in a real browser: its size, its first paint, and its frames with 10,000 points and 1,000 peers."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from importlib.resources import files
from math import ceil
from statistics import median
from typing import Any

from playwright.sync_api import Browser, BrowserContext, CDPSession, Page, Route, sync_playwright

from benchmarks.node_process import NodeProcess
from benchmarks.record import NotHereError, Row
from benchmarks.sizes import size

LOADS = size(5, 1)
POINTS = size(10_000, 100)
PEERS = size(1_000, 10)
WARM_UP_SECONDS = size(2.0, 0.2)  # it has drawn everything once
SECONDS = size(10.0, 0.5)
MOST_BYTES = 150_000
FRAME_MS = 1000 / 60
LONG_FRAME_MS = 50.0
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]

# In place of the node's stream: what a large swarm sends, four statuses, four points and 100 changed peers a second.
STREAM = """(status, peers) => {
  const tell = (name, data) => window.stream.dispatchEvent(new MessageEvent(name, { data: JSON.stringify(data) }));
  let step = 10000;
  setInterval(() => {
    step += 1;
    tell("status", { ...status, time: Date.now() / 1000, training: { ...status.training, steps: step } });
    tell("loss", { points: [{ step, time: 0, loss: 3 + Math.random() / 10, lr: 1e-3, tokens: step }] });
  }, 250);
  setInterval(() => {
    const changed = peers.filter((_, at) => (at + step) % 10 === 0).map((peer) => ({ ...peer, steps: step }));
    tell("peers", { count: peers.length, changed, gone: [] });
  }, 1000);
}"""
FAKE = """window.EventSource = class extends EventTarget {
  constructor() { super(); window.stream = this; setTimeout(() => this.onopen?.(), 0); }
  close() {}
};"""
FRAMES = """async (seconds) => {
  const gaps = [];
  let last = await new Promise(requestAnimationFrame);
  const end = last + seconds * 1000;
  while (last < end) {
    const now = await new Promise(requestAnimationFrame);
    gaps.push(now - last);
    last = now;
    scrollBy(0, gaps.length % 200 < 100 ? 4 : -4);
  }
  return gaps;
}"""


def page_rows(node: NodeProcess, browser_path: str) -> tuple[Row, ...]:
    """What is measured of the page that this node serves. The browser computes on the same cores as the node."""
    size = compressed_bytes()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=QUIET)
        painted = median(_first_paint(browser, node) for _ in range(LOADS))
        seen = {view: _watched(browser, node, view) for view in ("overview", "swarm")}
        browser.close()
    return (
        Row("size of the dashboard, compressed", f"{size / 1e3:.0f} kB", "< 150 kB", size < MOST_BYTES),
        Row(f"first paint, median of {LOADS} loads", f"{painted:.0f} ms", "< 1,000 ms", painted < 1_000),
        *(row for view, (gaps, busy) in seen.items() for row in (_frames_row(view, gaps), _busy_row(view, busy))),
    )


def compressed_bytes() -> int:
    """All that a first visit loads, each file compressed by itself."""
    root = files("neuroshard.api").joinpath("static")
    served = [entry for entry in (*root.iterdir(), *root.joinpath("assets").iterdir()) if entry.is_file()]
    return sum(len(gzip.compress(entry.read_bytes())) for entry in served if not entry.name.startswith("."))


def find_browser() -> str:
    """Return the path of the browser that the tests use. Raises NotHereError where there is none."""
    command = [sys.executable, "tests/worlds/system_programs.py", "chromium"]
    found = subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip()
    if not found:
        raise NotHereError("there is no Chromium")
    return found


def _with_session(context: BrowserContext, node: NodeProcess) -> BrowserContext:
    """The context with a session at the node."""
    context.request.get(f"{node.url}/api/session", headers=node.authorised())
    return context


def _first_paint(browser: Browser, node: NodeProcess) -> float:
    """Milliseconds from the start of the navigation, with an empty cache."""
    context = _with_session(browser.new_context(), node)
    page = context.new_page()
    page.goto(node.url)
    page.get_by_role("heading", level=1).wait_for()
    painted: float = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    context.close()
    return painted


def _watched(browser: Browser, node: NodeProcess, view: str) -> tuple[list[float], float]:
    """Milliseconds between two frames while it is scrolled and everything changes; CPU time of its thread a second."""
    status, peers = node.get("/api/status"), [_peer(number) for number in range(PEERS)]
    context = _with_session(browser.new_context(viewport={"width": 1200, "height": 900}), node)
    page = context.new_page()
    page.add_init_script(FAKE)
    told = {"count": PEERS, "network": status["network"], "swarm": status["swarm"], "peers": peers}
    _answer(
        page, "**/api/training/history", {"points": [_point(step) for step in range(1, POINTS + 1)], "held_out": []}
    )
    _answer(page, "**/api/peers", told)
    page.goto(f"{node.url}#{view}")
    page.get_by_role("heading", level=1).wait_for()
    page.evaluate(f"([status, peers]) => ({STREAM})(status, peers)", [status, peers])
    page.evaluate(FRAMES, WARM_UP_SECONDS)
    session = context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = _task_seconds(session)
    gaps: list[float] = page.evaluate(FRAMES, SECONDS)
    busy = (_task_seconds(session) - before) / SECONDS
    context.close()
    return gaps, busy


def _task_seconds(session: CDPSession) -> float:
    metrics: list[dict[str, Any]] = session.send("Performance.getMetrics")["metrics"]
    return next(float(metric["value"]) for metric in metrics if metric["name"] == "TaskDuration")


def _answer(page: Page, pattern: str, body: Any) -> None:
    content = json.dumps(body)

    def fulfill(route: Route) -> None:
        route.fulfill(body=content, content_type="application/json")

    page.route(pattern, fulfill)


def _frames_row(view: str, gaps: list[float]) -> Row:
    ordered = sorted(gaps)
    p99 = ordered[ceil(0.99 * len(ordered)) - 1]
    missed = 1 - len(gaps) / (sum(gaps) / FRAME_MS)
    long = sum(gap > LONG_FRAME_MS for gap in gaps)
    found = f"{missed:.1%} missed; 99 % within {p99:.0f} ms, worst {ordered[-1]:.0f} ms"
    return Row(
        f"frames of {view} with {POINTS:,} points and {PEERS:,} peers that change, {SECONDS:.0f} s of scrolling",
        f"{found}, {long} above {LONG_FRAME_MS:.0f} ms",
        "none above 50 ms",
        long == 0,
    )


def _busy_row(view: str, busy: float) -> Row:
    return Row(f"CPU time of the page's thread, {view}", f"{busy * 1e3:.0f} ms a second", "< 200", busy < 0.2)


def _point(step: int) -> dict[str, Any]:
    return {"step": step, "time": 0, "loss": 3 + 1000 / (step + 200), "lr": 1e-3, "tokens": step}


def _peer(number: int) -> dict[str, Any]:
    return {
        "node_id": f"12D3KooW{number:044d}",
        "wallet_id": f"{number:016x}",
        "version": "0.1.0",
        "roles": ["driver", "validator"],
        "role": "driver+validator",
        "layers": {"start": 0, "stop": 6},
        "state": "training",
        "steps": number,
        "tokens": number * 2048,
        "tokens_per_second": 1_000.0 + number,
        "loss_ema": 3.5,
        "shard": number % 16,
        "outer_step": 1,
        "state_hash": "",
        "started_at": 1.0,
        "first_seen": 1.0,
        "last_seen": 2.0,
        "connection": "direct",
        "address": "/ip4/127.0.0.1/tcp/4001",
        "rtt_seconds": 0.02,
        "bytes_sent": 1,
        "bytes_received": 1,
        "score": 0.0,
        "rating": "good",
    }
