"""The publisher's tool: what it signs is what nodes believe."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from neuroshard.update.judgement import Seen, judge
from neuroshard.update.manifest import read_manifest
from tests.update.made_releases import archive_of

TOOL = Path(__file__).parents[2] / "installers/release.py"


def test_a_release_that_was_signed_is_an_update(tmp_path: Path) -> None:
    key = tool("keygen", "--out", tmp_path / "key").removeprefix("public key: ").strip()
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    archive = tmp_path / "neuroshard-0.2.0-linux-x86_64.update.tar.gz"
    archive.write_bytes(archive_of({"neuroshard": b"x" * 5000}))
    (tmp_path / "notes").write_text("Better.\n")
    options = ("--key", tmp_path / "key", "--notes", tmp_path / "notes", "--out", tmp_path / "update.json")
    tool("sign", *options, "--base-url", "https://releases.example.org", archive)
    manifest = read_manifest((tmp_path / "update.json").read_bytes(), bytes.fromhex(key))
    update = judge(manifest, current="0.1.0", platform="linux-x86_64", seen=Seen(), now=time.time())
    assert update is not None
    assert (update.version, update.notes, update.artefact.unpacked_size) == ("0.2.0", "Better.", 5000)
    assert update.artefact.url == "https://releases.example.org/neuroshard-0.2.0-linux-x86_64.update.tar.gz"


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    tool("keygen", "--out", tmp_path / "key")
    before = (tmp_path / "key").read_text()
    again = [sys.executable, str(TOOL), "keygen", "--out", str(tmp_path / "key")]
    assert subprocess.run(again, capture_output=True, check=False).returncode != 0
    assert (tmp_path / "key").read_text() == before


def tool(*arguments: object) -> str:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
