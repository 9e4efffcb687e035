"""Writing and extending a folder: publication order, deterministic bytes, growth that moves nobody."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from genesis_samples import TOKENIZER, TestSigner, folder_files, shard_tokens, write_genesis

from neuroshard.data.genesis import writer as writer_module
from neuroshard.data.genesis.layout import checked_page
from neuroshard.data.genesis.manifest import ManifestTrust, parse_manifest
from neuroshard.data.genesis.writer import GenesisWriter
from neuroshard.errors import DataError


def test_folder_has_what_the_format_names(tmp_path: Path) -> None:
    manifest = write_genesis(tmp_path, shards=3, signer=TestSigner())
    assert set(folder_files(tmp_path)) == {
        "manifest.json",
        "tokenizer.json",
        f"tokenizers/{manifest.tokenizers[0].sha256}.json",
        "pages/00000.bin",
        "shard_0.pt",
        "shard_1.pt",
        "shard_2.pt",
    }
    assert (tmp_path / "tokenizer.json").read_bytes() == TOKENIZER
    assert (manifest.total_shards, manifest.total_tokens, manifest.tokens_per_shard) == (3, 1200, 400)
    assert manifest.total_size_bytes == sum(
        len(data) for name, data in folder_files(tmp_path).items() if "shard" in name
    )
    assert np.array_equal(torch.load(tmp_path / "shard_2.pt", weights_only=True).numpy(), shard_tokens(2, 400))


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
    write = writer_module.write_atomically

    def recording(path: Path, data: bytes) -> None:
        write(path, data)
        order.append(path.name)
        page = (tmp_path / "pages/00000.bin").read_bytes()
        manifest = parse_manifest((tmp_path / "manifest.json").read_bytes(), ManifestTrust(was_signed=True))
        for reader in (before, manifest):  # a reader that holds the old manifest, and one that reads it now
            checked_page(page, reader.page_entries(0), reader.pages[0], "page")

    monkeypatch.setattr(writer_module, "write_atomically", recording)
    write_genesis(tmp_path, shards=5, signer=TestSigner())
    assert [name for name in order if not name.endswith(".json")] == ["shard_3.pt", "shard_4.pt", "00000.bin"]
    assert order[-1] == "manifest.json"


def test_growth_keeps_shards_and_lists_the_new_table(tmp_path: Path) -> None:
    first = write_genesis(tmp_path, shards=3, signer=TestSigner())
    shard = (tmp_path / "shard_1.pt").read_bytes()
    grown = write_genesis(tmp_path, shards=5, signer=TestSigner(), tokenizer=b"{}  ", next_merge_id=2000)
    assert (tmp_path / "shard_1.pt").read_bytes() == shard
    assert [(entry.first_shard, entry.next_merge_id) for entry in grown.tokenizers] == [(0, 1000), (3, 2000)]
    assert grown.tokenizers_before(3) == first.tokenizers
    assert (tmp_path / f"tokenizers/{first.tokenizers[0].sha256}.json").read_bytes() == TOKENIZER


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    writer = GenesisWriter(tmp_path, tokens_per_shard=10)
    with pytest.raises(ValueError, match=r"\(10,\)"):
        writer.add_shard(np.arange(11))
    with pytest.raises(DataError, match="at least one shard"):
        writer.finish(None, tokenizer=b"{}", next_merge_id=300, now="")
    (tmp_path / "manifest.json").write_text('{"total_shards": 3}')
    with pytest.raises(DataError, match="cannot be extended"):
        GenesisWriter(tmp_path)
