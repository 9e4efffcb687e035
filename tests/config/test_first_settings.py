"""What the first run stores: all of it or nothing that counts, and never over another wallet."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from pydantic import SecretStr

from neuroshard.config.folders import default_data_dir, home_data_dir
from neuroshard.config.loading import load_settings, read_token
from neuroshard.config.saving import FirstSettings, save_settings, store_first_settings, stored_token
from neuroshard.errors import ConflictError, StorageError, UsageError

TOKEN = "correct horse battery staple, and some more"


@pytest.fixture
def users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home folder without anything of NeuroShard."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    return home


def choices(folder: Path, **settings: object) -> FirstSettings:
    return FirstSettings(folder, SecretStr(TOKEN), settings)


def test_a_start_finds_what_was_stored(users_home: Path) -> None:
    folder = home_data_dir()
    store_first_settings(choices(folder, memory=900, max_upload=None))
    loaded = load_settings({}, {})
    assert (loaded.settings.data_dir, loaded.settings.memory) == (folder, 900)
    assert read_token(loaded).get_secret_value() == TOKEN
    assert loaded.warnings == ()
    assert stat.S_IMODE((folder / "keys/wallet").stat().st_mode) == 0o600
    assert (folder / "config.toml").read_text() == 'memory = 900\ntoken_file = "keys/wallet"\n'


@pytest.mark.parametrize("place", ["below the home folder", "elsewhere"])
def test_another_data_folder_is_found_also_when_the_home_folder_has_moved(
    users_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder = users_home / "big" / "node" if place.startswith("below") else tmp_path / "disk" / "node"
    store_first_settings(choices(folder, memory=900))
    loaded = load_settings({}, {})
    assert (loaded.settings.data_dir, loaded.sources["data_dir"]) == (folder, "config.toml")
    moved = tmp_path / "new home"
    users_home.rename(moved)
    monkeypatch.setenv("HOME", str(moved))
    folder = moved / "big" / "node" if place.startswith("below") else folder
    after = load_settings({}, {})
    assert (after.settings.data_dir, after.settings.memory) == (folder, 900)
    assert read_token(after).get_secret_value() == TOKEN
    save_settings(folder, {"memory": 800})
    assert load_settings({}, {}).settings.memory == 800


def test_on_a_disk_that_is_not_connected_nothing_starts_anew(users_home: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    store_first_settings(choices(disk / "node"))
    disk.rename(tmp_path / "unplugged")
    with pytest.raises(StorageError, match=r"does not exist.*Connect its disk") as raised:
        load_settings({}, {})
    assert str(home_data_dir() / "config.toml") in str(raised.value)
    assert not disk.exists()
    assert load_settings({"data_dir": tmp_path / "other"}, {}).settings.token is None  # a flag still wins
    (tmp_path / "unplugged").rename(disk)
    assert load_settings({}, {}).settings.data_dir == disk / "node"


def test_a_break_at_any_moment_leaves_nothing_that_counts(
    users_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rename is a step; whatever was made before the last one is no set-up, and the next try ends well."""
    rename = Path.replace
    for broken in range(3):  # token, settings, where the folder is
        folder, done = tmp_path / f"disk {broken}", list[Path]()

        def stumble(path: Path, target: Path, most: int = broken, done: list[Path] = done) -> Path:
            if len(done) == most:
                raise KeyboardInterrupt
            done.append(path)
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", stumble)
            with pytest.raises(KeyboardInterrupt):
                store_first_settings(choices(folder, memory=900))
        assert load_settings({}, {}).settings.token is None, broken
        assert default_data_dir() == home_data_dir()
        assert not list(tmp_path.rglob(".tmp-*"))
    for broken in range(3):
        store_first_settings(choices(tmp_path / f"disk {broken}", memory=900 + broken))
        assert load_settings({}, {}).settings.memory == 900 + broken


def test_no_wallet_and_no_nonsense_is_written_over(users_home: Path, tmp_path: Path) -> None:
    store_first_settings(choices(tmp_path))
    other = FirstSettings(tmp_path, SecretStr("another token, which is long enough"))
    with pytest.raises(ConflictError, match="another wallet"):
        store_first_settings(other)
    (tmp_path / "keys/wallet").write_bytes(b"\xff")
    with pytest.raises(ConflictError, match="no usable token"):
        store_first_settings(other)
    assert (tmp_path / "keys/wallet").read_bytes() == b"\xff"
    nonsense = tmp_path / "node"
    nonsense.mkdir()
    (nonsense / "config.toml").write_text("memory = 1\n\nmax_storag = 12\n")
    with pytest.raises(UsageError, match=r"line 3.*Did you mean max_storage\?"):
        store_first_settings(choices(nonsense))
    assert (nonsense / "config.toml").read_text() == "memory = 1\n\nmax_storag = 12\n"
    assert stored_token(tmp_path / "nowhere") is None
