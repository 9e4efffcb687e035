"""The Rounds view: what computers agreed on, who was in it, what was refused and why, and what it took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from dashboard_session import FAINT, TWICE, UNNAMED, OpenPage, StartNode, show_afresh, stat
from playwright.sync_api import Locator, Page, ViewportSize, expect
from swarm_snapshots import BAD, GONE, SLOW, agreeing, alone, among, crowded, eventful, in_two_stages, in_vain, voting

from neuroshard.status.snapshot import NodeStatus

pytestmark = pytest.mark.browser
PHONE = ViewportSize(width=360, height=740)
EVERY = (agreeing, eventful, voting, in_vain, in_two_stages, crowded, alone, lambda: among(3))


def short(node_id: str) -> str:
    return f"{node_id[:8]}…{node_id[-6:]}"


def rows(page: Page) -> Locator:
    return page.get_by_role("list", name="The last rounds, the newest first").locator("> li")


def test_a_completed_round_is_told_in_one_row(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(agreeing()).url}#rounds")
    expect(page.locator("#title-rounds")).to_be_focused()
    sentence = "2 of 2 rounds completed: 3 computers agree on the same weights, bit for bit."
    expect(page.get_by_role("heading", level=2, name=sentence, exact=True)).to_be_visible()
    expect(rows(page)).to_have_count(2)
    newest = rows(page).first
    for words in (
        "completed",
        "3 computers",
        "outer step 12",
        "4.25 s (250 ms gathering, 3.50 s exchanging, 500 ms voting)",
        "19 MB",
        "quarter 4 of 4 (streaming), trimmed_mean(0.2) of int8",
        "certificate 4fc82b26aecb47d2 3 of 3 votes",
    ):
        expect(newest).to_contain_text(words)
    next_round = page.get_by_role("region", name=sentence)
    expect(next_round).to_contain_text("is about quarter 3 of 4 (streaming), encoded as int8")
    expect(stat(page, "Completed").locator(".stat-value")).to_have_text("2")
    expect(stat(page, "Refused")).to_contain_text("of 6 contributions; every contribution passed the checks")


def test_refusals_absences_and_late_ends_are_told_in_sentences(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(eventful()).url}#rounds")
    late, vain, refused = (rows(page).nth(number) for number in range(3))
    expect(late).to_contain_text("completed late")
    expect(late).to_contain_text("in 2 tries")
    expect(late).to_contain_text("what was learned meanwhile was added to the result")
    expect(vain).to_contain_text("abandoned3 computers were called")
    expect(vain).to_contain_text("Too few computers answered in time.")
    expect(vain).not_to_contain_text("certificate")
    expect(refused).to_contain_text("3 of 4 computers")
    expect(refused).to_contain_text(
        f"What {short(BAD)} sent was refused: it was far larger or smaller than the others'."
    )
    expect(refused).to_contain_text(f"{short(SLOW)} had learned too little to count; it goes into the next round.")
    expect(refused).to_contain_text(f"{short(GONE)} was called and sent nothing.")
    expect(stat(page, "Refused").locator(".stat-value")).to_have_text("1")
    expect(page.get_by_text("1. An audit compares random blocks of a result")).to_be_visible()
    expect(stat(page, "Completed")).to_contain_text("92 % of all; 1 came to nothing")
    table = page.get_by_role("region", name="Who contributed").locator("tbody tr")
    told = {row.split("\t")[0]: row.split("\t")[1:] for row in table.all_inner_texts()}
    assert told["This computer"] == ["12", "12", "0", "0"]
    assert told[short(BAD)] == ["12", "11", "1", "0"]
    assert told[short(GONE)] == ["11", "11", "0", "1"]


def test_the_voters_are_listed_with_the_absent_ones(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(voting()).url}#rounds")
    table = page.get_by_role("region", name="List of voters").locator("tbody tr")
    expect(table).to_have_count(3)
    told = [row.split("\t") for row in table.all_inner_texts()]
    assert [(node, now) for node, _, now in told] == [
        ("This computer", "online"),
        (short(SLOW), "online"),
        (short(GONE), "no answer"),
    ]
    assert [wallet.endswith("(owner)") for _, wallet, _ in told] == [True, False, False]
    page = open_page(f"{start_node(agreeing()).url}#rounds")
    expect(page.get_by_role("region", name="Who contributed")).to_be_visible()
    expect(page.get_by_role("region", name="List of voters")).to_have_count(0)


def test_rounds_in_vain_say_why_each_of_them_was(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(in_vain()).url}#rounds")
    sentence = "None of 4 rounds has completed yet. Training continues meanwhile."
    expect(page.get_by_role("heading", level=2, name=sentence, exact=True)).to_be_visible()
    for number, words in enumerate(
        (
            "This computer took no part: too few members",
            "No contribution was accepted",
            "makes the model worse",
            "Too few computers",
        )
    ):
        expect(rows(page).nth(number)).to_contain_text(words)
    expect(page.get_by_role("region", name="Who contributed")).to_have_count(0)


def test_a_lone_computer_and_one_that_waits_say_what_for(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(alone())
    page = open_page(f"{node.url}#rounds")
    expect(page.get_by_role("heading", name="No round yet: this computer is alone.", exact=True)).to_be_visible()
    expect(page.get_by_text("Until one joins, this computer trains alone.")).to_be_visible()
    expect(page.get_by_role("region", name="What a round is")).to_be_visible()
    expect(page.get_by_role("link", name="Invite another computer")).to_have_attribute("href", "#/invite")
    page = open_page(f"{start_node(among(3)).url}#rounds")
    expect(page.get_by_role("heading", name="No round yet.", exact=True)).to_be_visible()
    expect(page.get_by_text("236 steps of this computer are left until a round is due.")).to_be_visible()


def test_a_new_round_appears_by_itself(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(among(3))
    page = open_page(f"{node.url}#rounds")
    expect(page.get_by_role("heading", name="No round yet.", exact=True)).to_be_visible()
    node.publish(lambda _: agreeing())
    expect(rows(page)).to_have_count(2)


def test_different_weights_after_the_same_round_are_an_alarm(start_node: StartNode, open_page: OpenPage) -> None:
    status = agreeing()
    diloco = replace(status.diloco, state_root="bb" * 32)
    page = open_page(f"{start_node(replace(status, diloco=diloco)).url}#rounds")
    sentence = "Computers with the same layers hold different weights after the same round."
    expect(page.get_by_role("heading", level=2, name=sentence, exact=True)).to_be_visible()
    expect(page.locator(".verdict.tone-bad")).to_be_visible()


def test_the_stages_of_rounds_are_named_when_there_are_several(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(in_two_stages()).url}#rounds")
    expect(rows(page)).to_have_count(4)
    expect(rows(page).nth(0)).to_contain_text("layers 4\N{EN DASH}6")
    expect(rows(page).nth(1)).to_contain_text("layers 1\N{EN DASH}3")


def test_a_long_list_of_members_and_rounds_stays_short(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node(crowded()).url}#rounds")
    expect(rows(page)).to_have_count(10)
    expect(rows(page).first).to_contain_text("24 of 64 computers")
    expect(rows(page).first).to_contain_text("and 37 more were called and sent nothing.")
    page.get_by_role("navigation", name="Pages of the last rounds").get_by_role("button", name="Next page").click()
    expect(rows(page)).to_have_count(2)
    expect(page.get_by_role("region", name="Who contributed").locator("tbody tr")).to_have_count(12)


@pytest.mark.parametrize(("theme", "makes"), [("light", EVERY), ("dark", (eventful, in_two_stages))])
def test_the_view_is_for_everybody(
    theme: str, makes: Sequence[Callable[[], NodeStatus]], start_node: StartNode, open_page: OpenPage
) -> None:
    node = start_node()
    page = open_page(node.url, theme=theme, viewport=PHONE)
    for make in makes:
        show_afresh(node, page, make(), "rounds")
        expect(page.locator("#rounds-sentence")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], make
        cut = page.locator(".round, .round *, .stat, .facts dd").evaluate_all(
            "all => all.filter((e) => !e.matches('.parts, .hidden-visually') && e.scrollWidth > e.clientWidth + 1"
            " && getComputedStyle(e).display !== 'inline').map((e) => e.outerHTML)"
        )
        assert cut == [], make
        for script in (FAINT, UNNAMED, TWICE):
            assert page.evaluate(script) == [], make
