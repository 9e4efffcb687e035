"""Tokens for programs on the page Talk: made once, listed, removed; with a keyboard, on a phone, in both themes."""

from __future__ import annotations

import httpx
import pytest
import snapshots
from dashboard_session import OpenPage, StartNode
from playwright.sync_api import ViewportSize, expect
from wizard_session import check_page, press

from tests.worlds.api import SECRET

pytestmark = pytest.mark.browser
PHONE = ViewportSize(width=390, height=844)


def test_a_token_is_shown_once_opens_the_model_and_is_removed(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(snapshots.training())
    page = open_page(f"{node.url}#talk", viewport=PHONE, still=True, excused="Failed to load resource")
    card = page.get_by_role("region", name="Use it from other programs")
    card.get_by_label("Name of the program").fill("llm")
    page.keyboard.press("Enter")
    token = card.get_by_label("Token of llm", exact=True)
    expect(token).to_be_visible()
    key = {"Authorization": f"Bearer {token.inner_text().strip()}"}
    assert httpx.get(f"{node.url}v1/models", headers=key).status_code == 200
    assert httpx.get(f"{node.url}api/status", headers=key).status_code == 401
    check_page(page)
    card.get_by_label("Name of the program").fill("llm")
    press(page, "Make a token")
    expect(card.get_by_role("alert")).to_contain_text("There is a token with the name llm")
    page.reload()
    expect(card.get_by_role("listitem")).to_contain_text("llm")
    expect(token).to_have_count(0)
    press(page, "Remove: llm")
    expect(card.get_by_role("listitem")).to_have_count(0)
    assert httpx.get(f"{node.url}v1/models", headers=key).status_code == 401
    assert httpx.get(f"{node.url}v1/models", headers={"Authorization": f"Bearer {SECRET}"}).status_code == 200
