"""A start that cannot go well says what to do, shows no page, and writes over nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_run import Command

from benchmarks.node_process import TOKEN

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
def desktop(neuroshard: Command) -> Command:
    """The command without a token at a desktop whose browser leaves a trace."""
    neuroshard.home.mkdir()
    browser = neuroshard.home / "browser"
    browser.write_text(f"#!/bin/sh\ntouch '{neuroshard.home}/opened'\n")
    browser.chmod(0o755)
    return neuroshard.having(DISPLAY=":9", BROWSER=str(browser))


def test_a_full_and_a_read_only_disk_are_told(neuroshard: Command, desktop: Command, tiny_disk: Path) -> None:
    node = tiny_disk / "node"
    start = ("--port", "0", "--data-dir", node)
    with pytest.raises(OSError, match="No space left"):
        (tiny_disk / "filler").write_bytes(bytes(1_000_000))
    for command in (neuroshard.having(NEUROSHARD_TOKEN=TOKEN), desktop):
        full = command(*start)
        assert (full.code, full.out) == (5, "")
        assert f"The disk of the data folder {node} is full" in full.err
        assert "Free some space" in full.err
    (tiny_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    refused = desktop(*start)
    assert refused.code == 5
    assert f"The data folder {node} cannot be used: Read-only file system." in refused.err
    assert "--data-dir" in refused.err
    assert not (desktop.home / "opened").exists()
    assert list(node.iterdir()) == []


def test_settings_that_are_nonsense_are_named_by_line_and_stay(desktop: Command) -> None:
    folder = desktop.home / ".local/share/neuroshard"
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
        outcome = desktop("--port", "0")
        assert outcome.code == (3 if "gone" in text else 2), outcome.err
        for word in words:
            assert word in outcome.err
        assert file.read_text() == text
    assert not (desktop.home / "opened").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["config.toml"]
