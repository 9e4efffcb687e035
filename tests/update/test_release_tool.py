"""The publisher's tool: what it signs is what nodes believe."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from installers.release import artefact_of
from neuroshard.identity.signing import SigningKey
from neuroshard.update.checking import platform_name
from neuroshard.update.manifest import SeenManifest, UpdateManifest, judge, read_update_manifest
from tests.worlds.releases import archive_of

TOOL = Path(__file__).parents[2] / "installers/release.py"


def test_a_release_that_was_signed_is_an_update(tmp_path: Path) -> None:
    key = tool("keygen", "--out", tmp_path / "key").removeprefix("public key: ").strip()
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0
    archive = tmp_path / "neuroshard-0.2.0-linux-x86_64.update.tar.gz"
    archive.write_bytes(archive_of({"neuroshard": b"x" * 5000}))
    (tmp_path / "notes").write_text("Better.\n")
    options = ("--key", tmp_path / "key", "--notes", tmp_path / "notes", "--out", tmp_path / "update.json")
    tool("sign", *options, "--base-url", "https://releases.example.org", archive)
    manifest = read_update_manifest((tmp_path / "update.json").read_bytes(), bytes.fromhex(key))
    update = judge(manifest, current="0.1.0", platform="linux-x86_64", seen=SeenManifest(), now=time.time())
    assert update is not None
    assert (update.version, update.notes, update.artefact.unpacked_size) == ("0.2.0", "Better.", 5000)
    assert update.artefact.url == "https://releases.example.org/neuroshard-0.2.0-linux-x86_64.update.tar.gz"


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_what_is_built_on_linux_is_an_update_there(
    processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuroshard.update.checking.machine", lambda: processor)
    monkeypatch.setattr(sys, "path", list(sys.path))
    build_artefact = import_module("installers.build_tarball").build_artefact
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "neuroshard").write_text("x")
    archive = build_artefact(tmp_path / "program", tmp_path)
    here = platform_name("linux", processor)
    key = SigningKey.generate()
    version, platform, artefact = artefact_of(archive, "https://releases.example.org")
    now = time.time()
    manifest = UpdateManifest(version, "0.0.1", int(now), int(now) + 60, "", {platform: artefact})
    update = judge(manifest, current="0.0.1", platform=here, seen=SeenManifest(), now=now)
    assert update is not None
    assert update.artefact == artefact
    assert read_update_manifest(manifest.signed(key), key.public_key) == manifest


def test_the_payloads_have_the_names_that_nodes_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    platforms = import_module("installers.build_payload").PLATFORMS
    assert {name: told[3] for name, told in platforms.items()} == {
        "windows": platform_name("win32", "AMD64"),
        "macos": platform_name("darwin", "arm64"),
    }


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    tool("keygen", "--out", tmp_path / "key")
    before = (tmp_path / "key").read_text()
    again = [sys.executable, str(TOOL), "keygen", "--out", str(tmp_path / "key")]
    assert subprocess.run(again, capture_output=True, check=False).returncode != 0
    assert (tmp_path / "key").read_text() == before


def tool(*arguments: object) -> str:
    command = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
