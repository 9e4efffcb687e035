"""Genesis folders that cannot be used are refused at once; one that grew keeps its run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import trio

from neuroshard.data.fetcher import Fetcher
from neuroshard.data.source import open_source
from neuroshard.data.tokenizer import TokenizerTable, learn_merges
from neuroshard.dataset.destination import FolderDestination
from neuroshard.dataset.writer import GenesisWriter
from neuroshard.errors import DamagedFileError, DataError
from neuroshard.identity import Wallet, parse_token
from neuroshard.runs.data_opening import OpenedData, open_data
from neuroshard.runs.run_file import new_parameters
from neuroshard.runs.stored_runs import LocalRuns
from neuroshard.types import JsonValue

TABLE = learn_merges(["the theory of the other mother"] * 3, 6)
GROWN = learn_merges(["whether the feather or the leather"] * 3, 6, TABLE)


@pytest.mark.parametrize("manifest", [None, "{", "", "[]", '{"total_shards": 16}'])
def test_a_folder_that_is_no_genesis_folder(tmp_path: Path, manifest: str | None) -> None:
    folder = tmp_path / "genesis"
    folder.mkdir()
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    runs = LocalRuns(tmp_path / "node", Wallet.from_secret(parse_token("ab" * 32)))
    started = time.monotonic()
    with pytest.raises(DataError) as raised:
        trio.run(open_data, Fetcher(open_source(str(folder))), tmp_path / "store", runs, 1_000_000)
    assert str(folder) in raised.value.message
    assert "--genesis" in raised.value.action
    assert time.monotonic() - started < 20  # a folder does not mend itself while one waits


def publish(folder: Path, shards: int, table: TokenizerTable, token: int = 20) -> None:
    writer = GenesisWriter(FolderDestination(folder), tokens_per_shard=64)
    for shard in range(writer.shard_count, shards):
        writer.add_shard(np.full(64, token + shard))
    writer.finish(None, tokenizer=table.to_json(), next_merge_id=table.next_merge_id, now="2026-01-01")


def opened(home: Path, folder: Path) -> tuple[OpenedData, LocalRuns]:
    runs = LocalRuns(home / "node", Wallet.from_secret(parse_token("ab" * 32)))
    return trio.run(open_data, Fetcher(open_source(str(folder))), home / "store", runs, 1_000_000), runs


@pytest.mark.parametrize("vocabulary_size", [TABLE.next_merge_id, TABLE.next_merge_id - 2])
def test_a_folder_that_grew_with_its_table_keeps_its_run(tmp_path: Path, vocabulary_size: int) -> None:
    folder = tmp_path / "genesis"
    publish(folder, 16, TABLE)
    data, runs = opened(tmp_path, folder)
    shape: dict[str, JsonValue] = {"depth": 2, "vocabulary_size": vocabulary_size}
    run = runs.create(new_parameters({"architecture": shape}, data.genesis.pins(data.table.next_merge_id)))
    runs.remember_source(str(folder), run)
    publish(folder, 20, GROWN)
    again, _ = opened(tmp_path, folder)
    assert again.run is not None
    assert again.run.run_id == run.run_id
    assert again.genesis.manifest.total_shards == 16
    assert again.table == replace(TABLE.restricted_to(vocabulary_size), vocab_size=vocabulary_size)


def test_a_folder_with_other_data_begins_another_run(tmp_path: Path) -> None:
    publish(tmp_path / "genesis", 16, TABLE)
    data, runs = opened(tmp_path, tmp_path / "genesis")
    run = runs.create(new_parameters({"architecture": {"depth": 2}}, data.genesis.pins(data.table.next_merge_id)))
    runs.remember_source(str(tmp_path / "genesis"), run)
    (tmp_path / "genesis").rename(tmp_path / "old")
    publish(tmp_path / "genesis", 16, GROWN, token=40)
    assert opened(tmp_path, tmp_path / "genesis")[0].run is None


@pytest.mark.parametrize(
    "record", [b"", b"[]", b'{"run_file": "own.json"}', b'{"signing_key": null, "run_file": "../own.json"}']
)
def test_a_damaged_record_of_a_source_ends_the_start_and_stays(tmp_path: Path, record: bytes) -> None:
    folder = tmp_path / "genesis"
    publish(folder, 16, TABLE)
    data, runs = opened(tmp_path, folder)
    run = runs.create(new_parameters({"architecture": {"depth": 2}}, data.genesis.pins(data.table.next_merge_id)))
    runs.remember_source(str(folder), run)
    (file,) = (tmp_path / "node" / "runs").glob("*/source-*.json")
    file.write_bytes(record)
    with pytest.raises(DamagedFileError, match="source-"):
        runs.of_source(str(folder))
    assert file.read_bytes() == record
