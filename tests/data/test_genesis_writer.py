"""Writing and extending a folder: publication order, deterministic bytes, growth that moves nobody."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from neuroshard.data.manifest import ManifestTrust, checked_page, parse_manifest
from neuroshard.dataset import folder_destination as folder_module
from neuroshard.dataset.destination import FolderDestination
from neuroshard.dataset.writer import GenesisWriter
from neuroshard.errors import ConflictError, DataError
from tests.worlds.data_sets import TOKENIZER, TestSigner, folder_files, shard_tokens, write_genesis


def test_folder_has_what_the_format_names(tmp_path: Path) -> None:
    manifest = write_genesis(tmp_path, shards=3, signer=TestSigner())
    assert set(folder_files(tmp_path)) == {
        "manifest.json",
        "tokenizer.json",
        f"tokenizers/{manifest.tokenizers[0].sha256}.json",
        "pages/00000.bin",
        "shard_0.bin",
        "shard_1.bin",
        "shard_2.bin",
    }
    assert (tmp_path / "tokenizer.json").read_bytes() == TOKENIZER
    assert (manifest.total_shards, manifest.total_tokens, manifest.tokens_per_shard) == (3, 1200, 400)
    assert manifest.total_size_bytes == sum(
        len(data) for name, data in folder_files(tmp_path).items() if "shard" in name
    )
    assert np.array_equal(np.fromfile(tmp_path / "shard_2.bin", dtype="<u2"), shard_tokens(2, 400))


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_genesis(tmp_path / name, signer=TestSigner())
    assert folder_files(tmp_path / "a") == folder_files(tmp_path / "b")


def test_manifest_comes_last_and_every_state_on_the_way_is_consistent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_genesis(tmp_path, shards=3, signer=TestSigner())
    before = parse_manifest((tmp_path / "manifest.json").read_bytes())
    order: list[str] = []
    write = folder_module.write_shared_file

    def recording(path: Path, data: bytes) -> None:
        write(path, data)
        order.append(path.name)
        page = (tmp_path / "pages/00000.bin").read_bytes()
        manifest = parse_manifest((tmp_path / "manifest.json").read_bytes(), ManifestTrust(was_signed=True))
        for reader in (before, manifest):  # a reader that holds the old manifest, and one that reads it now
            checked_page(page, reader.page_entries(0), reader.pages[0], "page")

    monkeypatch.setattr(folder_module, "write_shared_file", recording)
    write_genesis(tmp_path, shards=5, signer=TestSigner())
    assert [name for name in order if not name.endswith(".json")] == ["shard_3.bin", "shard_4.bin", "00000.bin"]
    assert order[-1] == "manifest.json"


def test_growth_keeps_shards_and_lists_the_new_table(tmp_path: Path) -> None:
    first = write_genesis(tmp_path, shards=3, signer=TestSigner())
    shard = (tmp_path / "shard_1.bin").read_bytes()
    grown = write_genesis(tmp_path, shards=5, signer=TestSigner(), tokenizer=b"{}  ", next_merge_id=2000)
    assert (tmp_path / "shard_1.bin").read_bytes() == shard
    assert [(entry.first_shard, entry.next_merge_id) for entry in grown.tokenizers] == [(0, 1000), (3, 2000)]
    assert grown.tokenizers_before(3) == first.tokenizers
    assert (tmp_path / f"tokenizers/{first.tokenizers[0].sha256}.json").read_bytes() == TOKENIZER


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    writer = GenesisWriter(FolderDestination(tmp_path), tokens_per_shard=10)
    with pytest.raises(ValueError, match=r"\(10,\)"):
        writer.add_shard(np.arange(11))
    with pytest.raises(DataError, match="at least one shard"):
        writer.finish(None, tokenizer=b"{}", next_merge_id=300, now="")
    (tmp_path / "manifest.json").write_text('{"total_shards": 3}')
    with pytest.raises(DataError, match="cannot be extended"):
        GenesisWriter(FolderDestination(tmp_path))


def test_a_second_writer_that_comes_late_changes_nothing_published(tmp_path: Path) -> None:
    write_genesis(tmp_path, shards=3, signer=TestSigner())
    late = GenesisWriter(FolderDestination(tmp_path))
    late.add_shard(shard_tokens(3, 400))
    late.add_shard(shard_tokens(99, 400))
    write_genesis(tmp_path, shards=4, signer=TestSigner())
    published = folder_files(tmp_path)
    with pytest.raises(ConflictError, match="Another process published"):
        late.finish(TestSigner(), tokenizer=TOKENIZER, next_merge_id=1000, now="2026-01-02")
    assert folder_files(tmp_path) == published
    assert parse_manifest((tmp_path / "manifest.json").read_bytes()).total_shards == 4


def test_leftovers_of_an_interrupted_writer_are_replaced(tmp_path: Path) -> None:
    write_genesis(tmp_path / "whole", shards=5, signer=TestSigner())
    write_genesis(tmp_path / "killed", shards=3, signer=TestSigner())
    (tmp_path / "killed/shard_3.bin").write_bytes(b"of another table, longer than a shard" * 200)
    write_genesis(tmp_path / "killed", shards=5, signer=TestSigner())
    assert folder_files(tmp_path / "killed") == folder_files(tmp_path / "whole")


def test_one_writer_publishes_again_and_again(tmp_path: Path) -> None:
    writer = GenesisWriter(FolderDestination(tmp_path / "steps"), tokens_per_shard=400)
    for shard in range(5):
        writer.add_shard(shard_tokens(shard, 400))
        manifest = writer.finish(
            TestSigner(), tokenizer=TOKENIZER, next_merge_id=1000, now="2026-01-01T00:00:00Z", tokenizer_version="1"
        )
        assert manifest.total_shards == shard + 1
        assert writer.published == manifest
    write_genesis(tmp_path / "once", shards=5, signer=TestSigner())
    assert folder_files(tmp_path / "steps") == folder_files(tmp_path / "once")


@pytest.mark.parametrize("signer", [None, TestSigner(2)])
def test_signed_data_grow_under_their_key_only(tmp_path: Path, signer: TestSigner | None) -> None:
    write_genesis(tmp_path, shards=3, signer=TestSigner())
    published = folder_files(tmp_path)["manifest.json"]
    with pytest.raises(DataError, match="extended with that key only"):
        write_genesis(tmp_path, shards=4, signer=signer)
    assert folder_files(tmp_path)["manifest.json"] == published
