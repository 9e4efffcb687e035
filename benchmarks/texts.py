"""The texts that benchmarks learn from: real books in a shared folder, or Python's own documentation."""

from __future__ import annotations

import os
from pathlib import Path
from pydoc_data import topics

from benchmarks.record import NotHereError
from benchmarks.sizes import IS_TINY

TEXTS = Path(os.environ.get("BENCHMARK_TEXTS", Path(__file__).parents[2] / "shared" / "data"))
TOPICS = 60  # of Python's own documentation: a small data set


def real_texts() -> list[bytes]:
    """Return the texts in UTF-8; Python's own documentation at the tiny size. Raises NotHereError without any."""
    if IS_TINY:
        return [topics.topics[name].encode() for name in sorted(topics.topics)]
    return [path.read_bytes() for path in sorted(real_text_folder().rglob("*.txt"))]


def real_text_folder() -> Path:
    """Return the folder with the texts. Raises NotHereError without any."""
    if not any(TEXTS.rglob("*.txt")):
        raise NotHereError(f"there are no texts in {TEXTS}: name a folder in BENCHMARK_TEXTS")
    return TEXTS


def write_topics(folder: Path) -> Path:
    """Write the first topics of Python's documentation to a new folder, one file each, and return it."""
    folder.mkdir(parents=True)
    for name in sorted(topics.topics)[:TOPICS]:
        (folder / f"{name}.txt").write_text(topics.topics[name], encoding="utf-8")
    return folder
