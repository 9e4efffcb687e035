"""The public page of an organised run, read by people: wide and narrow, dark and light, with hostile names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from dashboard_session import DESKTOP, OpenPage, violations
from playwright.sync_api import Page, ViewportSize, expect
from uvicorn import Config, Server

from neuroshard.types import WalletId
from tests.organiser.desks import START, node
from tests.organiser.watched import ADA, BOB, STAGES, Watched

pytestmark = pytest.mark.browser
PHONE = ViewportSize(width=390, height=844)
HOSTILE = '<img src=x onerror="window.x=1">'
MINUTES = 240


class ServedRun:
    """The organiser's application on loopback."""

    def __init__(self, folder: Path) -> None:
        self.watched = Watched(folder)
        config = Config(self.watched.app, port=0, log_config=None, access_log=False, ws="none", lifespan="off")
        self._server = Server(config)
        self._thread = Thread(target=self._server.run, daemon=True)

    def start(self) -> str:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}/"

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def fill(self) -> None:
        """Four hours of training, a member with a hostile name, and others."""
        watched = self.watched
        watched.desk.join(1, name=HOSTILE)
        place = watched.desk.database.place_of(node(1))
        assert place is not None
        watched.start_observer()
        for minute in range(MINUTES):
            watched.desk.now = START + 60 * minute
            falling = 2.2 + 6 * math.exp(-minute / 60)
            watched.sight(loss=falling + 0.1 * math.sin(minute), held_out_loss=falling, new_tokens=9000)
            for stage in range(STAGES):
                accepted = (place.wallet, ADA, BOB)[: 2 + minute % 2]
                watched.value(minute + 1, stage, accepted=accepted, members=3, sequences=400 + minute)
        watched.desk.now += 60


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedRun]:
    made = ServedRun(tmp_path)
    yield made
    made.stop()
    made.watched.close()


OTHERS = (("dark", DESKTOP), ("light", PHONE))  # both themes and both sizes are in the shorter ones


def has_no_sideways_scroll(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


@pytest.mark.parametrize(
    ("theme", "viewport"),
    [("light", DESKTOP), ("dark", PHONE), *(pytest.param(*each, marks=pytest.mark.long) for each in OTHERS)],
)
def test_the_page_shows_the_run_and_is_clean(
    theme: str, viewport: ViewportSize, served: ServedRun, open_page: OpenPage
) -> None:
    served.fill()
    page = open_page(served.start(), secret="", theme=theme, viewport=viewport)
    expect(page.get_by_role("heading", level=1)).to_have_text("organised")
    expect(page.locator("dl > div", has_text="Outer steps").locator("dd")).to_contain_text(str(MINUTES))
    curve = page.get_by_role("img", name="Held-out loss: from 8.20")
    expect(curve).to_have_count(1)
    expect(page.locator("#stages tbody tr")).to_have_count(STAGES + 1)
    assert has_no_sideways_scroll(page)
    assert violations(page) == []


def test_a_hostile_name_stays_text(served: ServedRun, open_page: OpenPage) -> None:
    served.fill()
    page = open_page(served.start(), secret="")
    expect(page.locator("#board tbody tr")).to_have_count(3)
    expect(page.locator("#board")).to_contain_text(HOSTILE)
    expect(page.locator("img")).to_have_count(0)
    assert page.evaluate("window.x") is None


def test_an_empty_run_says_what_is_missing(served: ServedRun, open_page: OpenPage) -> None:
    page = open_page(served.start(), secret="", viewport=PHONE)
    expect(page.get_by_role("status")).to_have_text("The monitor has not reported yet.")
    expect(page.locator("#loss")).to_contain_text("There is no curve yet")
    expect(page.locator("#board")).to_contain_text("No certificate names the work of a member yet.")
    assert has_no_sideways_scroll(page)
    assert violations(page) == []


def test_the_page_is_small_and_asks_no_other_host(served: ServedRun, open_page: OpenPage) -> None:
    served.fill()
    for height in range(MINUTES + 1, MINUTES + 9):  # more members than the leaderboard has
        wallets = tuple(WalletId(f"{64 * height + number:032x}") for number in range(64))
        served.watched.value(height, accepted=wallets, members=64)
    url, sizes = served.start(), list[int]()
    page = open_page("about:blank", secret="")
    page.on("response", lambda answer: sizes.append(len(answer.body())))
    page.goto(url)
    expect(page.locator("#board tbody tr")).to_have_count(100)
    page.wait_for_load_state("networkidle")
    assert len(sizes) == 5  # the page, its style, its script, and the two answers of the organiser
    assert sum(sizes) < 150_000


def test_a_page_whose_organiser_is_gone_says_so(served: ServedRun, open_page: OpenPage) -> None:
    served.fill()
    page = open_page("about:blank", secret="", excused="Failed to load resource")
    page.clock.install()
    page.goto(served.start())
    expect(page.locator("#board tbody tr")).to_have_count(3)
    served.stop()
    page.clock.run_for(200_000)
    expect(page.get_by_role("status")).to_contain_text("The organiser does not answer. The run continues without it.")
    expect(page.locator("#board tbody tr")).to_have_count(3)
