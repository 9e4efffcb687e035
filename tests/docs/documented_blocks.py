"""Blocks of commands in the documents, and what the comment above a block says of running it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(
    r"(?:<!-- run: (?P<how>[^>]*?) -->\n)?^```(?:sh|bash|bat|powershell|console)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """Commands that a reader types one after the other."""

    page: Path
    line: int
    text: str
    how: str  # what the comment says; empty without one

    @property
    def goes_on(self) -> bool:
        """Whether it ends with Ctrl+C only."""
        return self.how == "goes on"

    @property
    def reason(self) -> str | None:
        """Why it is not run here; None when it is."""
        return self.how.removeprefix("not here, ") if self.how.startswith("not here, ") else None


def blocks_of(page: Path) -> list[Block]:
    """In the order of the page."""
    text = page.read_text(encoding="utf-8")
    found = _BLOCK.finditer(text)
    return [Block(page, text[: match.start("text")].count("\n"), match["text"], match["how"] or "") for match in found]
