"""What a reader can do in the dashboard, through the API's real security, and what happens when the node goes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import snapshots
from dashboard_session import OpenPage, StartNode
from playwright.sync_api import Page, expect

from neuroshard.api.access import SessionKeys
from neuroshard.status.board import Generate, Pause, Resume, SaveCheckpoint, Shutdown, UpdateSettings
from neuroshard.status.snapshot import NodeState
from tests.worlds.api import SECRET, ServedNode

pytestmark = pytest.mark.browser


def test_pause_and_resume(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url)
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Training is paused. Finished steps are kept.")
    expect(page.get_by_text("Training rests until you press Resume.")).to_be_visible()
    page.get_by_role("button", name="Resume").click()
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    assert node.taken == [Pause(), Resume()]


def test_stopping_asks_first(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url, excused="Failed to load resource")
    page.get_by_role("button", name="Stop").click()
    dialog = page.get_by_role("dialog", name="Stop the node?")
    expect(dialog.get_by_role("button", name="Keep it running")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    assert node.taken == []
    page.get_by_role("button", name="Stop").click()
    dialog.get_by_role("button", name="Save and stop").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("The node is saving its work and stopping.")
    assert [type(command) for command in node.taken] == [Shutdown]
    node.stop()
    expect(page.get_by_role("alert")).to_contain_text("The node has stopped.")


def test_the_model_writes_piece_by_piece(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(f"{node.url}#chat")
    page.get_by_label("Your text").fill("The function")
    page.get_by_label("Max tokens").fill("7")
    page.get_by_role("button", name="Continue the text").click()
    expect(page.get_by_test_id("reply")).to_have_text("The function list of names is returned when the")
    expect(page.get_by_text("Written by the model after 764 learning steps.")).to_be_visible()
    asked = node.taken[0]
    assert isinstance(asked, Generate)
    assert (asked.prompt, asked.max_tokens, asked.temperature) == ("The function", 7, 0.8)


def test_a_conversation_is_kept_and_sent_with_each_message(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(f"{node.url}#chat")
    page.get_by_label("Conversation: it reads").check()
    page.get_by_label("Max tokens").fill("3")
    turns = page.get_by_role("list", name="Conversation").get_by_role("listitem")
    for number, text in enumerate(("Good morning", "And then?"), start=1):
        page.get_by_label("Your message").fill(text)
        page.get_by_role("button", name="Send").click()
        expect(turns).to_have_count(2 * number)
        expect(page.get_by_label("Your message")).to_have_value("")
    expect(turns.nth(2)).to_contain_text("And then?")
    first, second = node.taken
    assert isinstance(first, Generate)
    assert isinstance(second, Generate)
    assert str(first.prompt) in str(second.prompt)
    reply = turns.nth(1).locator("p").inner_text()
    assert reply
    assert reply in str(second.prompt)
    page.get_by_label("Conversation: it reads").uncheck()
    expect(turns).to_have_count(0)


def test_writing_can_be_cancelled(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    node.endless_text = True
    page = open_page(f"{node.url}#chat")
    page.get_by_role("button", name="Continue the text").click()
    expect(page.get_by_test_id("reply")).to_contain_text("returned")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("Stopped by you.")).to_be_visible()
    asked = node.taken[0]
    assert isinstance(asked, Generate)
    assert asked.cancelled.wait(5)


def test_a_message_leaves_its_field_and_comes_back_when_nothing_answers(
    start_node: StartNode, open_page: OpenPage
) -> None:
    node = start_node()
    node.endless_text = True
    page = open_page(f"{node.url}#chat", excused="responded with a status of")
    page.get_by_label("Conversation: it reads").check()
    message, turns = page.get_by_label("Your message"), page.get_by_role("list", name="Conversation")
    message.fill("Hello")
    page.get_by_role("button", name="Send").click()
    expect(turns).to_contain_text("returned")
    expect(message).to_have_value("")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("Stopped by you.")).to_be_visible()
    expect(turns.get_by_role("listitem")).to_have_count(2)  # what it wrote stays
    node.publish(lambda status: replace(status, state=NodeState.FAILED, state_reason="The model was lost."))
    message.fill("And then?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".chat-note.text-bad")).to_contain_text("The model was lost.")
    expect(message).to_have_value("And then?")
    expect(turns.get_by_role("listitem")).to_have_count(2)


def test_a_refusal_is_shown_in_words(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url, excused="responded with a status of")
    pause = page.get_by_role("button", name="Pause")
    expect(pause).to_be_enabled()
    node.publish(lambda status: replace(status, state=NodeState.FAILED, state_reason="The model was lost."))
    pause.click()
    expect(page.get_by_text("The node has failed: The model was lost.")).to_be_visible()


def test_a_page_goes_on_in_the_session_that_another_tab_has_opened(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url, excused="responded with a status of")
    expect(page.get_by_role("button", name="Pause")).to_be_enabled()
    keys, origin = SessionKeys(SECRET, node.port), node.url.rstrip("/")
    cookie = keys.new_cookie(origin, time.time())  # the page has the token of the session before
    page.context.add_cookies([{"name": keys.cookie_name, "value": cookie, "url": origin}])
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    assert node.taken == [Pause()]


def test_checkpoint_and_settings(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(f"{node.url}#checkpoints")
    page.get_by_role("button", name="Save a checkpoint now").click()
    expect(page.locator(".message")).to_have_text("Done.")
    page.get_by_role("navigation", name="Views").get_by_role("link", name="Settings").click()
    page.get_by_role("button", name="Change Training text on disk").click()
    page.get_by_role("textbox", name="Training text on disk").fill("3000")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.get_by_role("button", name="Change Training text on disk")).to_be_focused()
    assert node.taken == [SaveCheckpoint(), UpdateSettings({"max_storage": 3000})]


def test_a_dead_node_is_named_and_its_return_noticed(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url, excused="Failed to load resource")
    expect(page.get_by_role("button", name="Pause")).to_be_enabled()
    node.stop()
    expect(page.get_by_role("alert")).to_contain_text("The node is gone: it does not answer any more.")
    expect(page.get_by_role("alert")).to_contain_text("The values below are from")
    expect(page.get_by_role("heading", level=1)).to_have_text("The node does not answer.")
    expect(page.get_by_role("button", name="Pause")).to_be_disabled()
    expect(page.locator("main")).to_contain_text("It made 764 learning steps.", use_inner_text=True)
    assert page.evaluate("getComputedStyle(document.querySelector('.view')).filter") == "grayscale(1)"
    start_node(port=node.port)
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_role("button", name="Pause")).to_be_enabled()


def test_waiting_for_data_counts_down(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(start_node(snapshots.waiting_for_data()).url)
    expect(page.get_by_text("manifest.json: connection refused. Try 5 in 2")).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_contain_text("the training text has not arrived yet")


def test_alarms_and_unverified_data_are_banners(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(start_node(snapshots.in_trouble()).url)
    expect(page.get_by_role("alert")).to_contain_text("The disk is full.")
    expect(page.get_by_text("Unverified data.")).to_be_visible()
    assert page.get_by_text("Demo data", exact=True).count() == 0


def test_many_tabs_see_the_same_pause(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    pages: list[Page] = [open_page(node.url) for _ in range(3)]
    pages[0].get_by_role("button", name="Pause").click()
    for page in pages:
        expect(page.get_by_role("button", name="Resume")).to_be_visible()


def test_going_back_to_a_checkpoint_redraws_the_curve(start_node: StartNode, open_page: OpenPage) -> None:
    node: ServedNode = start_node()
    page = open_page(node.url)
    expect(page.get_by_role("img", name="at step 764")).to_be_visible()
    kept = tuple(point for point in node.board.current().history if point.step <= 500)
    node.publish(lambda status: replace(status, training=replace(status.training, steps=500), history=kept))
    expect(page.get_by_role("img", name="at step 500")).to_be_visible()
