"""The publisher's tool: what it signs is what nodes believe, and what it refuses it leaves as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import anyio
import pytest

from installers import release
from neuroshard.errors import NeuroShardError
from neuroshard.update.checking import platform_name
from neuroshard.update.metadata import look_at_metadata
from neuroshard.update.release import AvailableUpdate, judge, target_name
from tests.worlds.file_servers import HostileServer
from tests.worlds.releases import archive_of

TOOL = Path(__file__).parents[2] / "installers/release.py"
LINUX = "linux-x86_64"


class Maintainers:
    """A folder with keys, a repository in it, and the tool."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.repository, self._capsys = folder, folder / "repository", capsys
        for name in ("root-a", "root-b", "root-c", "release", "time"):
            self.run("keygen", "--out", self.key(name))
        (folder / "notes").write_text("Better.\n")

    def run(self, *line: object) -> str:
        release.main([str(part) for part in line])
        return self._capsys.readouterr().out

    def key(self, name: str) -> Path:
        return self.folder / name

    def public(self, *names: str) -> list[Path]:
        return [self.folder / f"{name}.pub" for name in names]

    def root(self, *signers: str, **options: object) -> str:
        line = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", *_several(value))]
        signing = ["--sign", *map(self.key, signers)] if signers else []
        return self.run("root", "--repository", self.repository, *line, *signing)

    def first_root(self, *signers: str) -> str:
        return self.root(
            *signers,
            root_key=self.public("root-a", "root-b", "root-c"),
            threshold=2,
            release_key=self.public("release"),
            timestamp_key=self.public("time"),
        )

    def publish(
        self, version: str | None = None, *, sign: str = "release", time: str = "time", platform: str = LINUX
    ) -> str:
        archives = []
        if version is not None:
            archives = [self.folder / f"neuroshard-{version}-{platform}.update.tar.gz"]
            archives[0].write_bytes(archive_of({"neuroshard": b"x" * 5000}))
        keys = ("--sign", self.key(sign), "--timestamp", self.key(time))
        return self.run("release", "--repository", self.repository, *keys, "--notes", self.folder / "notes", *archives)

    def seen(self, *, root: int = 1, platform: str = LINUX) -> AvailableUpdate | None:
        """What a computer of this platform believes that has this root. Raises its refusal."""
        files = {path.relative_to(self.repository).as_posix(): path.read_bytes() for path in self._published()}
        anchor = (self.repository / f"metadata/{root}.root.json").read_bytes()
        with HostileServer(files) as server:
            look = anyio.run(look_at_metadata, server.url, anchor, {}, target_name(platform))
            if look.refusal:
                raise look.refusal
            update = judge(look.archive, server.url, current="0.1.0", platform=platform)
            assert update is None or update.artefact.url.removeprefix(f"{server.url}/") in files
            return update

    def _published(self) -> list[Path]:
        return [path for path in self.repository.rglob("*") if path.is_file()]


def _several(value: object) -> list[object]:
    return list(value) if isinstance(value, list) else [value]


@pytest.fixture
def maintainers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Maintainers:
    return Maintainers(tmp_path, capsys)


def test_a_release_that_was_signed_is_an_update(maintainers: Maintainers) -> None:
    assert "is signed by enough keys" in maintainers.first_root("root-a", "root-b")
    maintainers.publish("0.2.0")
    update = maintainers.seen()
    assert update is not None
    assert (update.version, update.notes, update.artefact.unpacked_size) == ("0.2.0", "Better.", 5000)
    maintainers.publish("0.3.0")
    maintainers.run("timestamp", "--repository", maintainers.repository, "--sign", maintainers.key("time"))
    newer = maintainers.seen()
    assert newer is not None
    assert newer.version == "0.3.0"


def test_the_root_is_signed_on_several_computers_one_after_the_other(maintainers: Maintainers) -> None:
    assert "needs signatures: 1 of its own keys" in maintainers.first_root("root-a")
    with pytest.raises(SystemExit, match="no root yet"):
        maintainers.publish("0.2.0")
    sign = ("sign-root", "--repository", maintainers.repository, "--sign")
    assert "needs signatures: 1" in maintainers.run(*sign, maintainers.key("root-a"))  # the same key again
    with pytest.raises(SystemExit, match="root key of neither"):
        maintainers.run(*sign, maintainers.key("release"))
    assert "is signed by enough" in maintainers.run(*sign, maintainers.key("root-c"))
    with pytest.raises(SystemExit, match="no draft"):
        maintainers.run(*sign, maintainers.key("root-b"))
    maintainers.publish("0.2.0")
    assert maintainers.seen() is not None


def test_a_rotation_needs_the_old_keys_and_the_new_ones(maintainers: Maintainers) -> None:
    maintainers.first_root("root-a", "root-b")
    maintainers.publish("0.2.0")
    for name in ("root-d", "root-e", "release-2", "time-2"):
        maintainers.run("keygen", "--out", maintainers.key(name))
    keys = {"root_key": maintainers.public("root-d", "root-e"), "release_key": maintainers.public("release-2")}
    keys["timestamp_key"] = maintainers.public("time-2")
    assert "0 of its own keys, 2 of the keys before" in maintainers.root("root-d", "root-e", **keys)
    assert "2 of its own keys, 0 of the keys before" in maintainers.root("root-a", "root-b", **keys)
    assert "signed by enough" in maintainers.root("root-a", "root-c", "root-d", "root-e", **keys)
    with pytest.raises(SystemExit, match="may not sign targets"):
        maintainers.publish("0.3.0")
    maintainers.publish(sign="release-2", time="time-2")  # the same release again, with the new keys
    update = maintainers.seen(root=1)
    assert update is not None
    assert update.version == "0.2.0"
    assert "signed by enough" in maintainers.root("root-d", "root-e")  # the same keys for two more years


def test_a_release_for_one_platform_keeps_the_others(maintainers: Maintainers) -> None:
    maintainers.first_root("root-a", "root-b")
    maintainers.publish("0.2.0")
    maintainers.publish("0.3.0", platform="win32-x86_64")
    assert [maintainers.seen(platform=one).version for one in (LINUX, "win32-x86_64")] == ["0.2.0", "0.3.0"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"threshold": 4}, "must be 1 to 3"),
        ({"threshold": 0}, "must be 1 to 3"),
        ({"release_key": []}, "needs --root-key"),
    ],
)
def test_a_root_that_cannot_work_is_refused(maintainers: Maintainers, options: dict[str, object], words: str) -> None:
    whole = {"root_key": maintainers.public("root-a", "root-b", "root-c"), "threshold": 2}
    whole |= {"release_key": maintainers.public("release"), "timestamp_key": maintainers.public("time")}
    chosen = {name: value for name, value in {**whole, **options}.items() if value != []}
    with pytest.raises(SystemExit, match=words):
        maintainers.root("root-a", "root-b", **chosen)
    assert not (maintainers.repository / "metadata").exists()


def test_a_wrong_key_changes_nothing_that_clients_read(maintainers: Maintainers) -> None:
    maintainers.first_root("root-a", "root-b")
    maintainers.publish("0.2.0")
    for wrong in ({"sign": "root-a"}, {"sign": "time"}, {"time": "release"}):
        with pytest.raises(SystemExit, match="may not sign"):
            maintainers.publish("0.3.0", **wrong)  # type: ignore[arg-type]
        update = maintainers.seen()
        assert update is not None
        assert update.version == "0.2.0"
    maintainers.publish("0.4.0")  # over what the failed tries left
    update = maintainers.seen()
    assert update is not None
    assert update.version == "0.4.0"


def test_a_timestamp_cannot_be_made_for_years(maintainers: Maintainers) -> None:
    maintainers.first_root("root-a", "root-b")
    renew = ("timestamp", "--repository", maintainers.repository, "--sign", maintainers.key("time"))
    with pytest.raises(SystemExit, match="no release yet"):
        maintainers.run(*renew)
    maintainers.publish("0.2.0")
    with pytest.raises(SystemExit, match="at most 30 days"):
        maintainers.run(*renew, "--days", 300)


def test_an_expired_root_signs_nothing_but_its_successor(maintainers: Maintainers) -> None:
    maintainers.first_root("root-a", "root-b")
    maintainers.publish("0.2.0")
    maintainers.root("root-a", "root-b", days=-1)
    with pytest.raises(SystemExit, match="root has expired"):
        maintainers.publish("0.3.0")
    with pytest.raises(NeuroShardError, match="root of trust expired"):
        maintainers.seen()
    maintainers.root("root-a", "root-b", days=30)
    assert maintainers.seen() is not None


@pytest.mark.parametrize("name", ["neuroshard-0.3.0.update.tar.gz", "neuroshard-0.3.0-linux-x86_64.tar.gz"])
def test_an_archive_with_another_name_is_refused(maintainers: Maintainers, name: str) -> None:
    maintainers.first_root("root-a", "root-b")
    (maintainers.folder / name).write_bytes(archive_of({"neuroshard": b"x"}))
    keys = ("--sign", maintainers.key("release"), "--timestamp", maintainers.key("time"))
    notes = ("--notes", maintainers.folder / "notes")
    with pytest.raises(SystemExit, match="does not have a name like"):
        maintainers.run("release", "--repository", maintainers.repository, *keys, *notes, maintainers.folder / name)


def test_a_key_is_secret_and_never_overwritten(maintainers: Maintainers) -> None:
    key = maintainers.key("root-a")
    assert os.name == "nt" or key.stat().st_mode & 0o077 == 0
    before = key.read_bytes()
    again = [sys.executable, str(TOOL), "keygen", "--out", str(key)]  # as a maintainer runs it
    assert subprocess.run(again, capture_output=True, check=False).returncode != 0
    assert key.read_bytes() == before


def test_a_key_with_a_passphrase_asks_for_it(maintainers: Maintainers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "getpass", lambda _prompt: "correct horse")
    maintainers.key("root-a").unlink()
    maintainers.key("root-a.pub").unlink()
    maintainers.run("keygen", "--out", maintainers.key("root-a"), "--passphrase")
    assert b"ENCRYPTED" in maintainers.key("root-a").read_bytes()
    assert "signed by enough" in maintainers.first_root("root-a", "root-b")
    monkeypatch.setattr(release, "getpass", lambda _prompt: "wrong")
    with pytest.raises(SystemExit, match="cannot be read as a secret key"):
        maintainers.root("root-a", "root-b")


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_what_is_built_on_linux_is_an_update_there(
    processor: str, maintainers: Maintainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuroshard.update.checking.machine", lambda: processor)
    monkeypatch.setattr(sys, "path", list(sys.path))
    build_artefact = import_module("installers.build_tarball").build_artefact
    program = maintainers.folder / "program"
    program.mkdir()
    (program / "neuroshard").write_text("x")
    archive = build_artefact(program, maintainers.folder)
    maintainers.first_root("root-a", "root-b")
    repository = release.Repository(maintainers.repository)
    _version, target = release.add_archive(repository, archive, "", "0.0.1")
    assert target.path == target_name(platform_name("linux", processor))


def test_the_payloads_have_the_names_that_nodes_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    platforms = import_module("installers.build_payload").PLATFORMS
    assert {name: told[3] for name, told in platforms.items()} == {
        "windows": platform_name("win32", "AMD64"),
        "macos": platform_name("darwin", "arm64"),
    }
