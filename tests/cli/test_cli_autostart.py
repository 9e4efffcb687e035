"""`neuroshard autostart`, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_run import Command

from benchmarks.node_process import TOKEN

pytestmark = pytest.mark.process


def test_on_status_and_off(neuroshard: Command, tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    refused = neuroshard("autostart", "on", "--data-dir", folder)
    assert refused.code == 3
    assert "needs the token in a file" in refused.err
    (folder / "token").write_text(TOKEN)
    (folder / "token").chmod(0o600)
    (folder / "config.toml").write_text('token_file = "token"\n')
    on = neuroshard("autostart", "on", "--data-dir", folder)
    entry = neuroshard.home / ".config/autostart/neuroshard.desktop"
    assert on.out == f"Autostart is on: desktop autostart entry {entry}\n"
    assert TOKEN not in entry.read_text()
    told = neuroshard("autostart", "status", "--json").json()
    assert (told["is_on"], told["path"]) == (True, str(entry))
    assert f'"--headless" "--data-dir" "{folder}"' in told["content"]
    assert neuroshard("autostart", "off").out.startswith("Autostart is off.")
    assert not entry.exists()
    assert neuroshard("autostart", "status", "--json").json()["is_on"] is False
