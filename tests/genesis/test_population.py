from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from neuroshard.data.manifest import ManifestTrust, parse_manifest
from neuroshard.data.tokenizer import BOS, EOS, Tokenizer, TokenizerTable
from neuroshard.dataset import verify_folder
from neuroshard.dataset.destination import FolderDestination
from neuroshard.dataset.object_store import Condition, ExpectedVersion, StoredObject, Version
from neuroshard.errors import ConflictError, DataError
from tests.worlds.data_sets import (
    SHARD_TOKENS,
    TestSigner,
    configured,
    contents,
    json_source,
    made_up_texts,
    run_population,
    write_json_lines,
)


def shard_ids(folder: Path, shard: int) -> np.ndarray:
    return np.fromfile(folder / f"shard_{shard}.bin", dtype="<u2")


def decoded(folder: Path, shards: Iterator[int] | range) -> list[str]:
    """The documents in these shards of one source, the last one perhaps cut off."""
    tokenizer = Tokenizer(TokenizerTable.load((folder / "tokenizer.json").read_bytes()))
    ids = np.concatenate([shard_ids(folder, shard) for shard in shards])
    assert ids[0] == BOS
    starts = [*np.flatnonzero(ids == BOS).tolist(), len(ids)]
    return [tokenizer.decode(ids[a:b].tolist()) for a, b in pairwise(starts)]


def test_shards_hold_the_documents_of_each_source_in_order(tmp_path: Path) -> None:
    first, second = made_up_texts(400), made_up_texts(200, seed=2)
    write_json_lines(tmp_path / "a.jsonl", first)
    write_json_lines(tmp_path / "b.jsonl", second)
    sources = (json_source(tmp_path / "b.jsonl", "later", priority=2), json_source(tmp_path / "a.jsonl", "sooner"))
    report = run_population(configured(*sources), tmp_path / "g")
    manifest = parse_manifest((tmp_path / "g/manifest.json").read_bytes(), ManifestTrust(TestSigner().public_key.hex()))
    assert verify_folder(tmp_path / "g").is_sound
    assert manifest.total_shards == report.shards == sum(report.shards_by_source.values())
    assert manifest.tokens_per_shard == SHARD_TOKENS
    sooner, later = report.shards_by_source["sooner"], report.shards_by_source["later"]
    assert manifest.sources["sooner"].last_shard_id == sooner - 1
    assert manifest.sources["later"].last_shard_id == sooner + later - 1
    for texts, shards in ((first, range(sooner)), (second, range(sooner, sooner + later))):
        found = decoded(tmp_path / "g", shards)
        assert found[:-1] == texts[: len(found) - 1]
        assert texts[len(found) - 1].startswith(found[-1])
        assert len(found) > 100
    inner = np.concatenate([shard_ids(tmp_path / "g", shard) for shard in range(sooner)])
    assert (inner[np.flatnonzero(inner == EOS)[:-1] + 1] == BOS).all()


def test_the_number_of_processes_changes_nothing(tmp_path: Path) -> None:
    source = json_source(write_json_lines(tmp_path / "a.jsonl", made_up_texts(1_500)))
    run_population(configured(source), tmp_path / "one", workers=1)
    run_population(configured(source), tmp_path / "three", workers=3)
    run_population(configured(source), tmp_path / "none", workers=0)
    assert contents(tmp_path / "one") == contents(tmp_path / "three") == contents(tmp_path / "none")


def test_small_data_get_smaller_shards_and_a_shard_of_every_source(tmp_path: Path) -> None:
    sources = [
        json_source(write_json_lines(tmp_path / "a.jsonl", made_up_texts(300)), "much"),
        json_source(write_json_lines(tmp_path / "b.jsonl", made_up_texts(10, seed=2)), "little"),
    ]
    report = run_population(configured(*sources, shard_tokens=2_500_000), tmp_path / "g")
    assert report.shards >= 16
    assert report.tokens_per_shard < 2_500_000
    assert report.shards_by_source["little"] >= 1
    assert verify_folder(tmp_path / "g").is_sound


def test_too_little_text_is_told(tmp_path: Path) -> None:
    source = json_source(write_json_lines(tmp_path / "a.jsonl", made_up_texts(5)))
    with pytest.raises(DataError, match="Add more text"):
        run_population(configured(source), tmp_path / "g")
    assert not (tmp_path / "g/manifest.json").exists()


def test_targets_are_kept_and_raising_one_goes_on(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", made_up_texts(1_500))
    assert run_population(configured(json_source(path, target=17)), tmp_path / "g").shards == 17
    assert run_population(configured(json_source(path, target=17)), tmp_path / "g").shards == 17
    assert run_population(configured(json_source(path, target=30)), tmp_path / "g").shards == 30
    run_population(configured(json_source(path, target=30)), tmp_path / "once")
    grown, once = contents(tmp_path / "g"), contents(tmp_path / "once")
    assert grown == once


def test_a_source_that_grew_gives_more_shards_and_the_old_ones_stay(tmp_path: Path) -> None:
    texts = made_up_texts(1_000)
    path = write_json_lines(tmp_path / "a.jsonl", texts[:500])
    first = run_population(configured(json_source(path)), tmp_path / "g").shards
    before = contents(tmp_path / "g")
    write_json_lines(path, texts)
    second = run_population(configured(json_source(path)), tmp_path / "g").shards
    assert second > first
    after = contents(tmp_path / "g")
    assert {name: after[name] for name in before if name.startswith("shard_")} == {
        name: digest for name, digest in before.items() if name.startswith("shard_")
    }
    run_population(configured(json_source(path)), tmp_path / "once")
    once = contents(tmp_path / "once")
    assert {name: after[name] for name in once if name.startswith(("shard_", "pages/"))} == {
        name: once[name] for name in once if name.startswith(("shard_", "pages/"))
    }


class KilledError(BaseException):
    """Stands for SIGKILL: nobody handles it."""


class DyingDestination:
    """A folder whose writer dies before or right after its n-th write."""

    def __init__(self, folder: Path, writes: int, *, after: bool) -> None:
        self._folder = FolderDestination(folder)
        self._left = writes
        self._after = after

    @property
    def description(self) -> str:
        return self._folder.description

    def read(self, name: str, max_bytes: int) -> StoredObject | None:
        return self._folder.read(name, max_bytes)

    def write(self, name: str, content: bytes, *, expected: ExpectedVersion = Condition.ANY) -> Version:
        self._left -= 1
        if self._left < 0 and not self._after:
            raise KilledError
        version = self._folder.write(name, content, expected=expected)
        if self._left < 0:
            raise KilledError
        return version

    def names(self, prefix: str = "") -> Iterator[str]:
        return self._folder.names(prefix)

    def claim(self, purpose: str) -> AbstractContextManager[None]:
        return self._folder.claim(purpose)

    def close(self) -> None:
        self._folder.close()


LATER_KILLS = ((1, False), (1, True), (4, True), (7, True))  # other writes of the same builds


@pytest.mark.parametrize(
    ("writes", "after"),
    [(0, True), (7, False), *(pytest.param(*each, marks=pytest.mark.long) for each in LATER_KILLS)],
)
def test_a_kill_at_any_write_and_a_rerun_give_the_same_bytes(tmp_path: Path, writes: int, after: bool) -> None:
    sources = [
        json_source(write_json_lines(tmp_path / "a.jsonl", made_up_texts(700)), "a"),
        json_source(write_json_lines(tmp_path / "b.jsonl", made_up_texts(300, seed=2)), "b"),
    ]
    run_population(configured(*sources), tmp_path / "whole")
    killed = 0
    while killed < 30:  # each run gets a little further
        try:
            run_population(configured(*sources), DyingDestination(tmp_path / "g", writes + 3 * killed, after=after))
            break
        except KilledError:
            killed += 1
            if (tmp_path / "g/manifest.json").exists():
                assert verify_folder(tmp_path / "g").is_sound
    assert killed >= 3
    assert contents(tmp_path / "g") == contents(tmp_path / "whole")


def test_a_second_populator_is_kept_out_and_told_by_whom(tmp_path: Path) -> None:
    source = json_source(write_json_lines(tmp_path / "a.jsonl", made_up_texts(500)))
    with FolderDestination(tmp_path / "g").claim("genesis build"), pytest.raises(ConflictError, match="genesis build"):
        run_population(configured(source), tmp_path / "g")
    assert [path.name for path in (tmp_path / "g").iterdir() if not path.name.startswith(".")] == []


def test_a_clock_that_goes_back_does_not_show(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", made_up_texts(800))
    run_population(configured(json_source(path, target=17)), tmp_path / "g", date=lambda: "2025-06-01T00:00:00+00:00")
    run_population(configured(json_source(path, target=18)), tmp_path / "g", date=lambda: "2024-01-01T00:00:00+00:00")
    manifest = parse_manifest((tmp_path / "g/manifest.json").read_bytes())
    assert (manifest.total_shards, manifest.updated_at) == (18, "2025-06-01T00:00:00+00:00")
    checkpoints = json.loads((tmp_path / "g/checkpoints.json").read_bytes())
    assert checkpoints["sources"]["lines"]["timestamp"] == "2025-06-01T00:00:00+00:00"


def test_a_folder_built_otherwise_is_refused(tmp_path: Path) -> None:
    source = json_source(write_json_lines(tmp_path / "a.jsonl", made_up_texts(500)))
    run_population(configured(source), tmp_path / "g")
    (tmp_path / "g/checkpoints.json").unlink()
    with pytest.raises(DataError, match="not made by"):
        run_population(configured(source), tmp_path / "g")


def test_a_name_that_stands_for_another_source_is_refused(tmp_path: Path) -> None:
    path = write_json_lines(tmp_path / "a.jsonl", made_up_texts(500))
    run_population(configured(json_source(path)), tmp_path / "g")
    with pytest.raises(DataError, match="'lines' was jsonl when its shards were made and is text now"):
        run_population(configured(json_source(path, kind="text")), tmp_path / "g")


def test_a_stopped_build_leaves_a_whole_data_set_and_continues(tmp_path: Path) -> None:
    source = json_source(write_json_lines(tmp_path / "a.jsonl", made_up_texts(1_500)))
    stop, dates = Event(), 0

    def date() -> str:
        nonlocal dates
        dates += 1
        if dates == 20:
            stop.set()
        return "2025-01-01T00:00:00+00:00"

    report = run_population(configured(source), tmp_path / "g", stop=stop, date=date)
    assert report.is_stopped
    assert verify_folder(tmp_path / "g").is_sound
    assert not run_population(configured(source), tmp_path / "g").is_stopped
    run_population(configured(source), tmp_path / "whole")
    assert contents(tmp_path / "g") == contents(tmp_path / "whole")
