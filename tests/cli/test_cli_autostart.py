"""`neuroshard autostart`, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.node_process import TOKEN
from neuroshard.host.autostart import desktop_entry
from tests.worlds.commands import Command

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


def test_an_entry_whose_program_is_gone_is_told(neuroshard: Command, tmp_path: Path) -> None:
    """Written by an installation that was moved since."""
    entry = neuroshard.home / ".config/autostart/neuroshard.desktop"
    entry.parent.mkdir(parents=True)
    gone = tmp_path / "my programs" / "neuroshard"
    entry.write_text(desktop_entry((str(gone), "--headless")))
    told = neuroshard("autostart", "status")
    assert told.code == 0
    assert f"starts {gone}, which does not exist" in told.err
    assert "`neuroshard autostart on` writes it again" in told.err
    assert neuroshard("autostart", "status", "--json").json()["missing"] == str(gone)
    gone.parent.mkdir()
    gone.write_text("#!/bin/sh\n")
    gone.chmod(0o755)
    assert neuroshard("autostart", "status").err == ""
    assert neuroshard("autostart", "status", "--json").json()["missing"] is None


def test_the_doctor_tells_of_such_an_entry(neuroshard: Command, tmp_path: Path) -> None:
    def finding() -> dict[str, object]:
        outcome = neuroshard("doctor", "--json", "--data-dir", tmp_path / "node", "--genesis", tmp_path)
        found = {told["subject"]: told for told in outcome.json()["findings"]}
        return found["autostart"]

    assert finding() == {"subject": "autostart", "is_well": True, "detail": "off", "action": ""}
    entry = neuroshard.home / ".config/autostart/neuroshard.desktop"
    entry.parent.mkdir(parents=True)
    entry.write_text(desktop_entry((str(tmp_path / "gone"), "--headless")))
    told = finding()
    assert told["is_well"] is False
    assert f"starts {tmp_path}/gone, which does not exist" in str(told["detail"])
    assert "autostart off" in str(told["action"])
