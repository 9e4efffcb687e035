"""A page of another origin, open in the browser that has the dashboard open: it reads nothing and commands nothing."""

from __future__ import annotations

import pytest
from dashboard_session import StartNode
from hostile_page import hostile_page
from playwright.sync_api import Browser, Response, expect

from neuroshard.status.snapshot import NodeState

pytestmark = pytest.mark.browser
# what a page gets told of requests whose answers it cannot read
BLIND = {"blind": "", "form": "sent", "text form": "sent", "beacon": "true"}


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])  # another port of the same site, and another site
def test_a_malicious_page_reads_and_commands_nothing(name: str, chromium: Browser, start_node: StartNode) -> None:
    node = start_node()
    context = chromium.new_context()
    try:
        dashboard = context.new_page()
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
        assert node.received == []
        assert node.board.current().state is NodeState.TRAINING
        dashboard.get_by_role("button", name="Pause").click()
        expect(dashboard.get_by_role("button", name="Resume")).to_be_visible()
    finally:
        context.close()
