"""What the dashboard shows, and to whom: colours, phones, keyboards, screen readers."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from importlib.resources import files

import pytest
import snapshots
from dashboard_session import DESKTOP, OpenPage, StartNode, sign_in
from playwright.sync_api import Page, Route, ViewportSize, expect

from neuroshard.status.snapshot import HeldOutPoint, NodeState

pytestmark = pytest.mark.browser
VIEWS = ("Home", "Talk", "Model", "Network", "Files", "Settings")
PHONE = ViewportSize(width=360, height=740)


def test_the_dashboard_is_less_than_100_kb() -> None:
    """What every page loads. The reader of QR codes comes only to pages that scan one."""
    folder = files("neuroshard.api").joinpath("static", "assets")
    if not folder.is_dir():
        pytest.skip("the dashboard is not built: run `make web`")
    sizes = {entry.name: len(gzip.compress(entry.read_bytes())) for entry in folder.iterdir()}
    later = {name: size for name, size in sizes.items() if not name.startswith("index-")}
    assert sum(sizes.values()) - sum(later.values()) < 100_000
    assert len(later) == 1
    assert sum(later.values()) < 20_000


def test_startup_is_shown_and_gives_way_to_training(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node(snapshots.starting())
    page = open_page(node.url)
    expect(page.get_by_role("heading", name="Getting ready", exact=True)).to_be_visible()
    expect(page.get_by_text("1 of 3 done")).to_be_visible()
    expect(page.get_by_text("2,048 of 4,096 tokens", exact=True)).to_be_visible()
    expect(page.get_by_text("Reading the lock")).to_have_count(0)  # of a step that is done
    bar = page.get_by_role("progressbar", name="Learning the vocabulary")
    expect(bar).to_have_attribute("aria-valuenow", "50")
    expect(page.get_by_role("button", name="Pause")).to_be_disabled()
    node.publish(lambda _: snapshots.training())
    expect(page.get_by_role("heading", name="Getting ready", exact=True)).to_have_count(0)
    expect(page.get_by_role("heading", level=1)).to_contain_text("really learning")


def test_the_verdict_answers_three_questions(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(start_node().url)
    verdict = page.get_by_role("region", name="Your computer is teaching a language model")
    for question in ("Is it working?", "Did my computer help?", "Is the model getting better?"):
        expect(verdict.get_by_role("heading", name=question)).to_contain_text("Yes")
    expect(verdict).to_contain_text("It made 764 learning steps.", use_inner_text=True)
    expect(page.get_by_text("Demo data", exact=True)).to_be_visible()
    page.get_by_role("link", name="Files").click()
    expect(
        page.get_by_text("A kill now could lose the last 14 steps (13 seconds of work).", exact=True)
    ).to_be_visible()


def test_the_speed_of_the_computer_is_shown_while_it_trains(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url)
    page.get_by_role("link", name="Files").click()
    card = page.get_by_role("region", name="This computer", exact=True)
    expect(card).to_contain_text("65.6 GFLOP/s, 55 % of the peak measured here (MFU)")
    node.publish(lambda status: replace(status, state=NodeState.PAUSED))
    expect(card).not_to_contain_text("FLOP/s")


def test_the_curve_has_words_and_a_table_and_grows(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url)
    curve = page.get_by_role("img", name="Loss curve. Training loss went from")
    expect(curve.locator("canvas")).to_be_visible()
    expect(curve).to_have_accessible_name(
        "Loss curve. Training loss went from 8.276 at step 1 to about 3.607 at step 764. "
        "Held-out loss went from 8.400 to 3.745."
    )
    node.take_step(3.6)
    expect(page.get_by_role("img", name="at step 765")).to_be_visible()
    page.get_by_role("link", name="Model").click()
    page.get_by_text("The curve as a table").click()
    expect(page.get_by_role("columnheader", name="Training loss, smoothed")).to_be_visible()
    expect(page.get_by_role("cell", name="765", exact=True)).to_be_visible()


def test_ten_thousand_points_are_drawn_quickly(start_node: StartNode, open_page: OpenPage) -> None:
    points = [{"step": n, "time": 0, "loss": snapshots.loss_at(n), "lr": 1e-3, "tokens": n} for n in range(1, 10_001)]

    def answer(route: Route) -> None:
        route.fulfill(body=json.dumps({"points": points, "held_out": []}), content_type="application/json")

    node = start_node(replace(snapshots.training(), history=()))
    page = open_page("about:blank")
    sign_in(page.context, node.url)
    page.route("**/api/training/history", answer)
    page.goto(node.url)
    expect(page.get_by_role("img", name="at step 10,000")).to_be_visible()
    node.take_step(3.5)
    slowest = page.evaluate("""async () => {
      let slowest = 0, last = performance.now();
      for (let frame = 0; frame < 60; frame++) {
        await new Promise(requestAnimationFrame);
        slowest = Math.max(slowest, performance.now() - last);
        last = performance.now();
      }
      return slowest;
    }""")
    assert slowest < 500


def test_the_training_view_has_its_five_values(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(f"{start_node().url}#training")
    values = {"Training nodes": "1", "Global loss": "3.605", "Total steps": "764", "Data shards": "16"}
    for name, value in {**values, "Model convergence": "Verified"}.items():
        stat = page.locator(".stat", has=page.get_by_text(name, exact=True))
        expect(stat.locator(".stat-value")).to_have_text(value)


def test_the_model_page_counts_no_sync_of_a_lone_node_and_no_improvement_of_one_test(
    start_node: StartNode, open_page: OpenPage
) -> None:
    node = start_node()
    page = open_page(f"{node.url}#training")
    teamwork, proof = (
        page.get_by_role("region", name="Teamwork"),
        page.get_by_role("region", name="Does it really learn?"),
    )
    expect(teamwork).to_contain_text(re.compile("Outer steps\\s*1"))
    expect(teamwork).to_contain_text(re.compile("With others, since this start\\s*0"))
    expect(proof).to_contain_text("Improvement")
    node.publish(
        lambda status: replace(
            status, training=replace(status.training, held_out=(HeldOutPoint(0, status.time, 7.6, 0.0, 0.0),))
        )
    )
    expect(proof).to_contain_text(re.compile("Tests so far\\s*1"))
    expect(proof).not_to_contain_text("Improvement")


def test_every_view_fits_a_phone(start_node: StartNode, open_page: OpenPage) -> None:
    url = start_node().url
    page = open_page(url, viewport=PHONE)
    for view in VIEWS:
        page.goto("about:blank")
        page.goto(f"{url}#{view.lower()}")
        expect(page.get_by_role("link", name=view, exact=True)).to_have_attribute("aria-current", "page")
        expect(page.locator(".view")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], view
        tabs = page.get_by_role("navigation", name="Views")
        assert tabs.evaluate("tabs => tabs.scrollWidth <= tabs.clientWidth"), view  # all six are seen at once


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_a_warning_with_a_long_path_stays_on_the_page(
    viewport: ViewportSize, start_node: StartNode, open_page: OpenPage
) -> None:
    path = f"/home/a/.local/share/neuroshard/checkpoints/{'0123456789abcdef' * 10}/layers-0-4/set-aside"
    page = open_page(start_node(replace(snapshots.training(), warnings=(path,))).url, viewport=viewport)
    expect(page.get_by_text(path)).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_dark_and_light_follow_the_system_until_chosen(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    assert brightness(open_page(node.url, theme="dark")) < 60
    page = open_page(node.url, theme="light")
    assert brightness(page) > 200
    page.emulate_media(color_scheme="dark")
    expect(page.get_by_role("button", name="Switch to light colours")).to_be_visible()
    page.emulate_media(color_scheme="light")
    page.get_by_role("button", name="Switch to dark colours").click()
    assert brightness(page) < 60
    page.reload()
    expect(page.get_by_role("button", name="Switch to light colours")).to_be_visible()
    assert brightness(page) < 60


def test_everything_can_be_reached_by_keyboard(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(start_node().url)
    expect(page.get_by_role("button", name="Pause")).to_be_enabled()
    expect(page.get_by_role("img", name="at step 764")).to_be_visible()
    reached = [focused_name(page) for _ in range(40)]
    wanted = [
        "Skip to the content",
        "Pause",
        "For a while…",
        "Stop",
        "Switch to dark colours",
        *VIEWS,
        "Talk to it",
        "History",
        "Invite a computer",
        "Change",
    ]
    assert [name for name in dict.fromkeys(reached) if name in wanted] == wanted  # Tab comes round again
    page.get_by_role("link", name="Model").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1, name="Model")).to_be_visible()
    expect(page).to_have_title("Model · NeuroShard")


def test_focus_is_visible(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(start_node().url)
    expect(page.get_by_role("button", name="Pause")).to_be_enabled()
    focused_name(page)
    focused_name(page)
    style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert style == "solid"


def test_landmarks_and_labels_are_there(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(start_node().url)
    for role in ("banner", "navigation", "main", "contentinfo"):
        expect(page.get_by_role(role)).to_have_count(1)
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    for view in VIEWS:
        page.get_by_role("navigation").get_by_role("link", name=view).click()
        expect(page.locator(".view")).to_be_visible()
        assert page.evaluate(UNNAMED) == []


UNNAMED = """() => [...document.querySelectorAll('button, input, select, textarea, [role=progressbar], [role=img]')]
  .filter((e) => !(e.labels?.length || e.getAttribute('aria-label') || e.textContent.trim())).map((e) => e.outerHTML)"""


def test_nothing_moves_when_motion_is_unwanted(start_node: StartNode, open_page: OpenPage) -> None:
    page = open_page(start_node(snapshots.starting()).url, still=True)
    expect(page.locator(".stage-running")).to_be_visible()
    assert page.evaluate("document.getAnimations().length") == 0


def test_the_log_grows_and_can_be_searched(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    node.ring.append(1.0, "INFO", "neuroshard", "the first line")
    page = open_page(f"{node.url}#log")
    log = page.get_by_role("log")
    expect(log).to_contain_text("the first line")
    node.ring.append(2.0, "WARNING", "neuroshard", "<b>a shard was cut off</b>")
    expect(log).to_contain_text("<b>a shard was cut off</b>")
    page.get_by_label("Contains").fill("shard")
    expect(log).not_to_contain_text("the first line")


def test_numbers_that_change_do_not_move_the_page(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url)
    expect(page.get_by_role("img", name="at step 764")).to_be_visible()
    before = tops(page)
    for number in range(20):
        node.take_step(3.5 + number / 100)
    expect(page.get_by_role("img", name="at step 784")).to_be_visible()
    assert tops(page) == before


def test_a_state_in_words_is_announced_but_numbers_are_not(start_node: StartNode, open_page: OpenPage) -> None:
    node = start_node()
    page = open_page(node.url)
    state = page.get_by_role("banner").get_by_role("status")
    expect(state).to_have_text("Training")
    node.publish(lambda status: replace(status, state=NodeState.PAUSED, state_reason="Paused."))
    expect(state).to_have_text("Paused")
    assert page.locator(".stats [role=status], .stats [aria-live]").count() == 0


def brightness(page: Page) -> float:
    """Mean of the background's red, green and blue."""
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    colour: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(int(part) for part in colour.strip("rgb()").split(",")) / 3


def focused_name(page: Page) -> str:
    """Press Tab; the name of what has the focus then."""
    page.keyboard.press("Tab")
    name: str = page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.textContent.trim()")
    return name


def tops(page: Page) -> list[float]:
    """Where the cards of the page begin."""
    cards = "[...document.querySelectorAll('.card, .stat')]"
    found: list[float] = page.evaluate(f"{cards}.map((card) => card.getBoundingClientRect().top)")
    return found
