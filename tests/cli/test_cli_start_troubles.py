"""A start that cannot go well says what to do, shows no wizard, and writes over nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.node_process import TOKEN
from tests.worlds.commands import Command, Icon

pytestmark = pytest.mark.process


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own; needs the right to mount."""
    if sys.platform != "linux":
        pytest.skip("only Linux has a file system in memory that can be mounted for a test")
    place = tmp_path / "disk"
    place.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk of its own can be mounted here: {error}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def icon(neuroshard: Command) -> Icon:
    """The command without a token, started from a desktop's menu."""
    return Icon(neuroshard)


def test_a_full_and_a_read_only_disk_are_told(icon: Icon, tiny_disk: Path) -> None:
    node = tiny_disk / "node"
    start = ("--port", "0", "--data-dir", node)
    with pytest.raises(OSError, match="No space left"):
        (tiny_disk / "filler").write_bytes(bytes(1_000_000))
    for started in (icon.having(NEUROSHARD_TOKEN=TOKEN), icon):
        full = started.click(*start)
        assert full.code == 5
        for told in (full.told, full.only_page.text):
            assert f"The disk of the data folder {node} is full" in told
            assert "Free some space" in told
    (tiny_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    refused = icon.click(*start)
    assert refused.code == 5
    for told in (refused.told, refused.only_page.text):
        assert f"The data folder {node} cannot be used: Read-only file system." in told
        assert "--data-dir" in told
    assert list(node.iterdir()) == []


def test_settings_that_are_nonsense_are_named_by_line_and_stay(icon: Icon) -> None:
    folder = icon.command.home / ".local/share/neuroshard"
    folder.mkdir(parents=True)
    file = folder / "config.toml"
    told = {
        "memory = 900\nmemroy = 3\n": [f"key in {file}: memroy (line 2)", "Did you mean memory?"],
        "# mine\n\ncpu_threads = 'many'\n": [f"cpu_threads (from {file}, line 3)", "'many'", "1 to 1024"],
        "memory = 900\nport = = 3\n": [str(file), "line 2"],
        "token_file = 'gone'\n": [f"The token file {folder / 'gone'} cannot be read"],
    }
    for text, words in told.items():
        file.write_text(text)
        outcome = icon.click("--port", "0")
        assert outcome.code == (3 if "gone" in text else 2), outcome.told
        for word in words:
            assert word in outcome.told
            assert word in outcome.only_page.text
        assert file.read_text() == text
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml"]
