"""A page of another origin, open in the browser that has the dashboard open: it reads nothing and commands nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from dashboard_session import StartNode, sign_in
from playwright.sync_api import Browser, Response, expect

from neuroshard.status.snapshot import NodeState

PAGE = """<!doctype html><meta charset="utf-8"><title>Win a prize</title><body><script>
const node = "NODE";
const outcomes = {};
const attempt = async (name, work) => {
  try { outcomes[name] = String(await work()); } catch (error) { outcomes[name] = "refused"; }
};
const loaded = (element, where) => new Promise((resolve) => {
  element.onload = () => resolve("loaded"); element.onerror = () => resolve("refused");
  element.src = where; document.body.append(element);
});
const submitted = (where, type) => new Promise((resolve) => {
  const frame = document.createElement("iframe"); frame.name = `f${Math.random()}`;
  const form = document.createElement("form");
  Object.assign(form, { method: "POST", action: where, target: frame.name, enctype: type });
  const field = document.createElement("input"); field.name = '{"a":"'; field.value = '"}'; form.append(field);
  document.body.append(frame, form);
  frame.onload = () => resolve("sent"); form.submit();
});
const streamed = (where) => new Promise((resolve) => {
  const source = new EventSource(where, { withCredentials: true });
  source.addEventListener("status", () => resolve("read"));
  source.onerror = () => { source.close(); resolve("refused"); };
});
const text = async (path, init) => (await fetch(node + path, { credentials: "include", ...init })).text();
const json = { "Content-Type": "application/json" };
window.tried = (async () => {
  for (const path of ["/api/status", "/api/config", "/api/session", "/api/logs", "/openapi.json"]) {
    await attempt(`read ${path}`, () => text(path, {}));
    await attempt(`blind ${path}`, () => text(path, { mode: "no-cors" }));
  }
  const commands = ["/api/training/pause", "/api/shutdown", "/api/checkpoints", "/api/diagnostics", "/v1/completions"];
  for (const path of commands) {
    await attempt(`post ${path}`, () => text(path, { method: "POST", headers: json, body: "{}" }));
    await attempt(`blind post ${path}`, () => text(path, { method: "POST", mode: "no-cors", body: "{}" }));
    await attempt(`form ${path}`, () => submitted(node + path, "application/x-www-form-urlencoded"));
    await attempt(`text form ${path}`, () => submitted(node + path, "text/plain"));
    await attempt(`beacon ${path}`, () => navigator.sendBeacon(node + path, "{}"));
  }
  await attempt("patch", () => text("/api/config", { method: "PATCH", headers: json, body: '{"training": false}' }));
  await attempt("image", () => loaded(new Image(), `${node}/favicon.svg`));
  await attempt("script", () => loaded(document.createElement("script"), `${node}/api/status`));
  await attempt("stream", () => streamed(`${node}/api/events`));
  await attempt("frame", async () => {
    const frame = document.createElement("iframe");
    await loaded(frame, `${node}/`);
    return frame.contentDocument === null ? "refused" : frame.contentDocument.title;
  });
  return outcomes;
})();
</script></body>"""


@contextmanager
def hostile_page(node_url: str) -> Iterator[int]:
    """The port of a server whose every answer is the hostile page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = PAGE.replace("NODE", node_url.rstrip("/")).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


pytestmark = pytest.mark.browser
# what a page gets told of requests whose answers it cannot read
BLIND = {"blind": "", "form": "sent", "text form": "sent", "beacon": "true"}


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])  # another port of the same site, and another site
def test_a_malicious_page_reads_and_commands_nothing(name: str, chromium: Browser, start_node: StartNode) -> None:
    node = start_node()
    context = chromium.new_context()
    try:
        dashboard = context.new_page()
        sign_in(context, node.url)
        dashboard.goto(node.url)
        expect(dashboard.get_by_role("button", name="Pause")).to_be_enabled()
        assert any(cookie["name"].startswith("neuroshard") for cookie in context.cookies()), (
            "there is a session to abuse"
        )
        with hostile_page(node.url) as port:
            page = context.new_page()
            answers: list[Response] = []
            page.on("response", lambda answer, answers=answers: answers.append(answer))
            page.goto(f"http://{name}:{port}/")
            outcomes: dict[str, str] = page.evaluate("window.tried")
        told = {what: outcome for what, outcome in outcomes.items() if outcome != "refused"}
        assert {what: BLIND.get(what.rpartition(" ")[0]) for what in told} == told
        from_node = [answer for answer in answers if answer.url.startswith(node.url)]
        assert len(from_node) >= 10
        assert {answer.status for answer in from_node} == {403}, [a.url for a in from_node if a.status != 403]
        assert node.taken == []
        assert node.board.current().state is NodeState.TRAINING
        dashboard.get_by_role("button", name="Pause").click()
        expect(dashboard.get_by_role("button", name="Resume")).to_be_visible()
    finally:
        context.close()
