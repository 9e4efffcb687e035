"""Invitation links that try to run something. The page shows them as text and says what is wrong."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from dashboard_session import OpenPage
from playwright.sync_api import Page, expect
from wizard_session import heading, press

from benchmarks.node_process import free_port
from neuroshard.identity.invitations import LINK
from tests.worlds.setup_api import SetupApi

pytestmark = pytest.mark.browser

SCRIPT = "<script>window.hit = 1</script>"
IMAGE = "<img src=x onerror='window.hit = 1'>"
TOO_LONG = "at most 1600 are read. Copy only the invitation."
NONE = "This text is not an invitation. Paste the whole link or the whole code of one."
DAMAGED = "The invitation is damaged. Copy all of it, from the first to the last character."
HOSTILE = {
    "a script": f"neuroshard://{SCRIPT}",
    "a script as the code": f"{LINK}{SCRIPT}",
    "a picture that fails": f"{LINK}{IMAGE}",
    "an attribute that ends": f"{LINK}\"' autofocus onfocus='window.hit = 1' x='",
    "the end of the field": f"</textarea>{SCRIPT}",
    "a template": LINK + "{{constructor.constructor('window.hit = 1')()}}${window.hit = 1}",
    "lines": f"{LINK}AAAA\r\nSet-Cookie: a=b\r\n\r\n{SCRIPT}",
    "a folder": f"{LINK}../../../../etc/passwd",
    "another scheme": "javascript:window.hit=1",
    "another scheme in disguise": "java\tscript:window.hit=1",
    "a page": f"data:text/html,{SCRIPT}",
    "a file": "file:///etc/passwd",
    "another host": "https://example.org/join#AAAA",
    "a host of ours": "neuroshard://example.org/AAAA",
    "no character to see": "\u202e\u200b\ufeff",
    "a null": f"{LINK}AAAA\0AAAA",
    "10 kB": f"{LINK}{SCRIPT}{'A' * 10_000}",
}


def check_nothing_ran(page: Page, place: str) -> None:
    """No script of a link, no request for its picture, and still the same page."""
    assert page.evaluate("window.hit") is None
    assert page.locator("main script, main img, [onfocus], [onerror]").count() == 0
    assert page.url.partition("#")[0] == place
    expect(page.get_by_role("heading", level=1)).to_have_text("Join with an invitation")


def test_a_hostile_link_is_text_and_is_refused_with_a_sentence(tmp_path: Path, open_page: OpenPage) -> None:
    wizard = SetupApi(tmp_path / "node", is_given=False, port=free_port(), now=time.time())
    with wizard.served() as address:
        page = open_page(address, excused="responded with a status of 422")
        page.on("dialog", lambda dialog: pytest.fail(f"a link opened a dialog: {dialog.message}"))
        press(page, "Join with an invitation")
        heading(page, "Join with an invitation")
        place = page.url.partition("#")[0]
        field = page.get_by_label("Invitation", exact=True)
        for name, text in HOSTILE.items():
            words = TOO_LONG if name == "10 kB" else DAMAGED if text.startswith((LINK, "https://")) else NONE
            field.fill(text)
            press(page, "Show the invitation")
            expect(page.get_by_role("alert"), name).to_contain_text(words)
            assert "window.hit" not in page.get_by_role("alert").inner_text()
            assert field.input_value() == text.replace("\r\n", "\n"), name
            check_nothing_ran(page, place)
            field.fill("")
            wizard.desk.arrival.open_link(text, wizard.now)  # as after a click on the link
            page.reload()
            expect(page.get_by_role("alert"), name).to_contain_text(words)
            check_nothing_ran(page, place)
        assert wizard.desk.arrival.invitation is None
        page.goto("about:blank")
    assert wizard.stored == []
