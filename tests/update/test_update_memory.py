"""The newest metadata seen: it survives, and a damaged record of it stops updates instead of letting a replay pass."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from neuroshard.config.settings import Settings
from neuroshard.errors import DamagedFileError, StorageError
from neuroshard.update import checking
from neuroshard.update.checking import FILE_NAME, UpdateMemory, daily_notice, look_for_update, memory_file
from tests.worlds.publishers import Publisher

METADATA = {"timestamp.json": b"{}", "root_history/12.root.json": b"\xff"}
MEMORY = UpdateMemory(1e9, verified_at=1e9, available="1.2.3", metadata=METADATA)


def test_what_was_seen_is_known_to_the_next_start(tmp_path: Path) -> None:
    assert memory_file(tmp_path).read() is None
    memory_file(tmp_path).write(MEMORY)
    assert memory_file(tmp_path).read() == MEMORY


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"asked_at": 1e9, "available": "../1"}',
        b'{"asked_at": 1e9, "metadata": {"../timestamp.json": ""}}',
        b'{"asked_at": 1e9, "metadata": {"timestamp.json": 3}}',
        b" " * 4_000_001,
    ],
)
def test_a_damaged_record_stops_updates_until_the_owner_acts(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "release_root", lambda: Publisher().anchor)
    file = tmp_path / FILE_NAME
    file.write_bytes(content)
    settings = Settings(data_dir=tmp_path, update_url="https://localhost")
    for ask in (look_for_update, daily_notice):
        with pytest.raises(DamagedFileError, match=r"update\.json is damaged"):
            anyio.run(ask, settings, "0.1.0", 2e9)
    assert file.read_bytes() == content


def test_a_record_that_cannot_be_read_is_an_error_of_the_disk(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(StorageError, match="cannot be read"):
        memory_file(tmp_path).read()
