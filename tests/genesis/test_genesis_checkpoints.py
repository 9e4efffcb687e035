"""checkpoints.json: what a populator wrote is read again, and anything else is refused with the place of the fault."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from neuroshard.dataset.batches import Mark
from neuroshard.dataset.population_state import Checkpoints, SourceCheckpoint, parse_checkpoints
from neuroshard.errors import DataError

SOURCE = SourceCheckpoint(
    "https://example.org/a", 9, Mark({"file": "é", "row": 3}, 5, 7, 1), np.array([10, 300], np.uint32), 2, 1, "now", 40
)
MADE = Checkpoints("ab" * 32, 300, 400, 2, 9999, (b"\x07" * 32,), {"web": SOURCE}, "bin")


def changed(path: str, value: Any) -> bytes:
    """The file with one field set, or removed when the value is Ellipsis."""
    whole = json.loads(MADE.to_json())
    *outer, name = path.split(".")
    target = whole
    for key in outer:
        target = target[key]
    if value is ...:
        del target[name]
    else:
        target[name] = value
    return json.dumps(whole).encode()


def test_what_was_written_is_read_again() -> None:
    again = parse_checkpoints(MADE.to_json())
    assert again.to_json() == MADE.to_json()
    assert again.sources["web"].mark == SOURCE.mark
    assert again.sources["web"].leftover.tolist() == [10, 300]
    assert again.sources["web"].leftover.dtype == np.uint32


def test_before_the_first_shard_its_size_is_not_known() -> None:
    start = Checkpoints("ab" * 32, 300)
    assert parse_checkpoints(start.to_json()) == start


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("format_version", 3, r"`\$\.format_version`"),
        ("tokens_per_shard", None, "tokens_per_shard is missing"),
        ("tokens_per_shard", 0, r"`\$\.tokens_per_shard`"),
        ("total_shards", 0, "unpublished names more shards"),
        ("tokenizer.sha256", "AB" * 32, r"`\$\.tokenizer\.sha256`"),
        ("tokenizer.next_merge_id", 3, r"`\$\.tokenizer\.next_merge_id`"),
        ("tokenizer.more", 3, "unknown field `more`"),
        ("unpublished", ["zz" * 32], r"`\$\.unpublished\[0\]`"),
        ("more", 1, "unknown field `more`"),
        ("sources.web", 1, r"`\$\.sources"),
        ("sources.web.leftover_tokens", [1, -1], r"\.leftover_tokens\[1\]`"),
        ("sources.web.leftover_tokens", [True], r"\.leftover_tokens\[0\]`"),
        ("sources.web.position", [], r"\.position`"),
        ("sources.web.timestamp", "\x1b[31m", "not printable"),
        ("sources.web.origin", "x" * 201, r"\.origin`"),
        ("sources.web.merges", ..., "missing required field `merges`"),
    ],
)
def test_a_wrong_field_is_named(path: str, value: Any, place: str) -> None:
    with pytest.raises(DataError, match=place):
        parse_checkpoints(changed(path, value))


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 100_000, MADE.to_json()[:-1]])
def test_other_files_are_damaged(data: bytes) -> None:
    with pytest.raises(DataError, match=r"checkpoints\.json is damaged"):
        parse_checkpoints(data)
