"""Genesis folders that cannot be used are refused at once, by name, with advice."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import trio

from neuroshard.data.fetcher import Fetcher
from neuroshard.data.source import open_source
from neuroshard.errors import DataError
from neuroshard.identity import Wallet, parse_token
from neuroshard.node.data_opening import open_data
from neuroshard.node.own_run import OwnRuns


@pytest.mark.parametrize("manifest", [None, "{", "", "[]", '{"total_shards": 16}'])
def test_a_folder_that_is_no_genesis_folder(tmp_path: Path, manifest: str | None) -> None:
    folder = tmp_path / "genesis"
    folder.mkdir()
    if manifest is not None:
        (folder / "manifest.json").write_text(manifest)
    runs = OwnRuns(tmp_path / "node", Wallet.from_secret(parse_token("ab" * 32)))
    started = time.monotonic()
    with pytest.raises(DataError) as raised:
        trio.run(open_data, Fetcher(open_source(str(folder))), tmp_path / "store", runs, 1_000_000)
    assert str(folder) in raised.value.message
    assert "--genesis" in raised.value.action
    assert time.monotonic() - started < 2  # a folder does not mend itself while one waits
