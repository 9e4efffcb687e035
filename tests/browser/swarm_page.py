"""Where the Swarm view has what tests look at."""

from __future__ import annotations

from playwright.sync_api import Locator, Page
from swarm_snapshots import peer_id

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
