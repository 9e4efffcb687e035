"""A desktop on which the program is started, and the steps that every walk through the wizard makes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from dashboard_session import FAINT, TWICE, UNNAMED, violations
from playwright.sync_api import Page, expect

from benchmarks import preloaded
from benchmarks.node_process import free_port

PATIENCE_SECONDS = 60.0


@dataclass
class FirstRun:
    """A desktop with a home folder of its own, on which the program is started."""

    home: Path
    port: int = field(default_factory=free_port)
    variables: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def data_dir(self) -> Path:
        """Where starts look first."""
        return self.home / ".local" / "share" / "neuroshard"

    @property
    def opened(self) -> Path:
        """The addresses that were opened, one a line."""
        return self.home / "opened"

    def environment(self) -> dict[str, str]:
        """What the process sees."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("NEUROSHARD_", "XDG_"))}
        return (
            kept
            | {
                "HOME": str(self.home),
                "DISPLAY": ":99",
                "BROWSER": str(self._browser()),
                "NEUROSHARD_P2P_HOST": "127.0.0.1",
                "NEUROSHARD_PORT": str(self.port),
            }
            | self.variables
        )

    def start(self, *arguments: object, place: Sequence[str] = (), fresh: bool = False) -> subprocess.Popen[str]:
        """Start it as a click on its icon does. `place` stands before the command, and replaces itself by it.

        It is a fork that has imported everything, unless it has a place or must be `fresh`: its process id counts.
        """
        program = [sys.executable, "-m", "neuroshard"] if place or fresh else preloaded.program()
        return subprocess.Popen(
            [*place, *program, *map(str, arguments)],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def addresses(self) -> list[str]:
        """What was opened so far."""
        return self.opened.read_text(encoding="utf-8").splitlines() if self.opened.exists() else []

    def wait_for_page(self, count: int = 1) -> str:
        """The newest address once so many were opened: always the page of the key, so that no command line has it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(self.addresses()) < count:
            assert time.monotonic() < deadline, "no page was opened"
            time.sleep(0.02)
        address = self.addresses()[-1]
        assert address.startswith("file:")
        assert "key=" not in address
        return address

    def health(self) -> str:
        """What answers at the port: `setup`, `ok`, or nothing."""
        try:
            return str(httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=30, trust_env=False).json()["status"])
        except httpx.ConnectError:
            return ""

    def _browser(self) -> Path:
        script = self.home / "browser"
        if not script.exists():
            self.home.mkdir(parents=True, exist_ok=True)
            script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$1" >> "{self.opened}"\n', encoding="utf-8")
            script.chmod(0o755)
        return script


@contextmanager
def started(
    desktop: FirstRun, *arguments: object, place: Sequence[str] = (), fresh: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A start that is gone when the block ends."""
    process = desktop.start(*arguments, place=place, fresh=fresh)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()


SLOW_MS = 30_000


def heading(page: Page, text: str) -> None:
    expect(page.get_by_role("heading", level=1)).to_have_text(text, timeout=SLOW_MS)


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name).click()


def check_page(page: Page) -> None:
    """Named, readable in both themes, and not wider than the window."""
    is_dark = bool(page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches"))
    for theme in ("light", "dark") if is_dark else ("dark", "light"):  # the last one is that of the reader
        page.emulate_media(color_scheme=theme)
        for script in (UNNAMED, TWICE, FAINT):
            found = page.evaluate(script)
            assert found == [], (theme, found)
        assert violations(page) == [], theme
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def check_dashboard(page: Page) -> None:
    """The wizard has become the dashboard, at Home."""
    expect(page.get_by_role("navigation", name="Views")).to_be_visible(timeout=SLOW_MS)
    expect(page.get_by_role("link", name="Home")).to_have_attribute("aria-current", "page")
    expect(page.get_by_text("There is no such page")).to_have_count(0)


def give_words_back(page: Page, words: list[str]) -> None:
    for place in range(1, 13):
        box = page.get_by_label(f"Word {place}", exact=True)
        if box.count():
            box.fill(words[place - 1])
