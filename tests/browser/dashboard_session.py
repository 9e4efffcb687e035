"""Visits to a dashboard: requests and complaints of the browser, checks of every view, places in the Swarm view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TypeAlias
from urllib.parse import urljoin

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, ViewportSize
from swarm_snapshots import peer_id

from neuroshard.status.snapshot import NodeStatus
from tests.worlds.api import SECRET, ServedNode

StartNode: TypeAlias = Callable[..., ServedNode]
PATIENCE_MS = 60_000  # of a computer that has other work
DESKTOP = ViewportSize(width=1200, height=900)


def sign_in(context: BrowserContext, url: str, secret: str = SECRET) -> None:
    """Give the browser a session at a node, as the page of `neuroshard open` does."""
    answer = context.request.post(urljoin(url, "/api/session"), data={"secret": secret})
    assert answer.ok, answer.text()


@dataclass
class Visits:
    """Opens pages in contexts of their own and remembers what happened in them."""

    browser: Browser
    pages: list[Page] = field(default_factory=list[Page])
    requested: list[str] = field(default_factory=list[str])
    complaints: list[str] = field(default_factory=list[str])
    excused: str | None = None

    def __call__(
        self,
        url: str,
        *,
        secret: str = SECRET,
        theme: str = "light",
        viewport: ViewportSize = DESKTOP,
        excused: str | None = None,
        still: bool = False,
    ) -> Page:
        """Open a page, with a session if the API secret is given.

        `still` asks for reduced motion; complaints that contain `excused` are expected.
        """
        context = self.browser.new_context(
            viewport=viewport,
            color_scheme="dark" if theme == "dark" else "light",
            reduced_motion="reduce" if still else "no-preference",
        )
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on("console", self._note)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))
        self.pages.append(page)
        self.excused = excused or self.excused
        if secret and url.startswith("http:"):
            sign_in(context, url, secret)
        page.goto(url)
        return page

    def close(self) -> None:
        """Close all pages."""
        for page in self.pages:
            page.context.close()

    def unexpected_complaints(self) -> list[str]:
        """Errors and warnings of the console, without those that the test itself causes."""
        return [text for text in self.complaints if self.excused is None or self.excused not in text]

    def _note(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.complaints.append(message.text)


OpenPage: TypeAlias = Visits


def show_afresh(node: ServedNode, page: Page, status: NodeStatus, view: str = "") -> None:
    """Open a view again, from its first line, in front of a node with another status."""
    node.publish(lambda _: status)
    page.goto("about:blank")
    page.goto(f"{node.url}#{view}" if view else node.url)


AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")

# Controls and landmarks without a name.
UNNAMED = """() => [...document.querySelectorAll('button, input, select, a, nav, section, [role]')]
  .filter((e) => !(e.labels?.length || e.ariaLabel || e.hasAttribute('aria-labelledby')
    || e.role === 'status' || e.textContent.trim()))
  .map((e) => e.outerHTML)"""

# Ids that are there twice.
TWICE = (
    """() => [...document.querySelectorAll('[id]')].map((e) => e.id).filter((id, at, all) => all.indexOf(id) !== at)"""
)

# Texts below 4.5 to 1 (WCAG AA). Mixed colours (color-mix, color(srgb ...)) are drawn on a canvas to be read.
FAINT = """() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (colour, under) => {
    canvas.fillStyle = under; canvas.fillRect(0, 0, 1, 1);
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = (values) => values.reduce((sum, v, at) => sum + linear(v / 255) * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (element) => {
    const chain = [];
    for (let e = element; e; e = e.parentElement) chain.unshift(getComputedStyle(e).backgroundColor);
    return chain.reduce((under, colour) => `rgb(${rgb(colour, under)})`, 'rgb(255,255,255)');
  };
  const texts = [...document.querySelectorAll('main *')].filter(
    (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())
      && e.checkVisibility() && !e.matches(':disabled'));
  return texts.map((e) => {
    const under = behind(e);
    const [a, b] = [light(rgb(getComputedStyle(e).color, under)), light(rgb(under, under))].sort((x, y) => y - x);
    return { text: e.textContent.trim().slice(0, 30), ratio: (a + 0.05) / (b + 0.05) };
  }).filter((found) => found.ratio < 4.5);
}"""


RUN_AXE = """async () => {
  const { violations } = await axe.run(document, { resultTypes: ['violations'] });
  return violations.map(({ id, nodes }) => `${id}: ${nodes.slice(0, 3).map((n) => n.html.slice(0, 150)).join(' | ')}`);
}"""


def violations(page: Page) -> list[str]:
    """What axe-core says is wrong with the page as it is."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    found: list[str] = page.evaluate(RUN_AXE)
    return found


MOST_ROWS = 26  # a page of 25, and this computer


def rows(page: Page) -> Locator:
    """Rows of the list of nodes, this computer's first."""
    return page.get_by_role("region", name="Nodes of this run").locator("tbody tr")


def shown(number: int) -> str:
    """A peer's id as the list shortens it."""
    return f"{peer_id(number)[:8]}…{peer_id(number)[-6:]}"


def stat(page: Page, name: str) -> Locator:
    """One of the large numbers."""
    return page.locator(".stat", has=page.get_by_text(name, exact=True))
