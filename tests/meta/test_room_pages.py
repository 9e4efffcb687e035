"""Each room has a page next to its code that lists the room's files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from source_files import ROOT

ROOMS = sorted(path.parent for path in (ROOT / "neuroshard").glob("*/__init__.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_the_page_of_a_room_lists_its_files(room: Path) -> None:
    pages = [path for path in room.rglob("README.md") if "static" not in path.parts]
    listed = {
        str((page.parent / name).relative_to(room))
        for page in pages
        for name in re.findall(r"^\| `([\w/]+\.py)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    files = {str(path.relative_to(room)) for path in room.rglob("*.py") if path.name not in {"__init__.py"}}
    assert listed == files
