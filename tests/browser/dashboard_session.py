"""One visit to a dashboard: what was asked of which host, and what the browser complained about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from playwright.sync_api import Browser, ConsoleMessage, Page, ViewportSize
from pretend_node import PretendNode

StartNode: TypeAlias = Callable[..., PretendNode]
PATIENCE_MS = 15_000  # of a computer that has other work
DESKTOP = ViewportSize(width=1200, height=900)


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
        theme: str = "light",
        viewport: ViewportSize = DESKTOP,
        excused: str | None = None,
        still: bool = False,
    ) -> Page:
        """Open a page; `still` asks for reduced motion; complaints that contain `excused` are expected."""
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
