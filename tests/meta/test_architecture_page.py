"""The table of questions in docs/ARCHITECTURE.md: each file exists and has the name that answers the question."""

from __future__ import annotations

import re

from source_files import ROOT

ROW = re.compile(r"^\| (.+\?) \| `([\w/]+\.py)` \| `(\w+)` \|$", re.MULTILINE)
FEWEST_QUESTIONS = 22


def test_the_answers_to_the_questions_are_where_the_page_says() -> None:
    rows = ROW.findall((ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    assert len(rows) >= FEWEST_QUESTIONS
    missing = [(file, name) for _, file, name in rows if not has_name(file, name)]
    assert missing == []


def has_name(file: str, name: str) -> bool:
    """Whether a file of the package defines this function, class, method or value."""
    path = ROOT / "neuroshard" / file
    definition = rf"^ *(?:class |def |async def )?{name}\b *[(:=]"
    return path.exists() and re.search(definition, path.read_text(encoding="utf-8"), re.MULTILINE) is not None
