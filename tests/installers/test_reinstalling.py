"""The archive for Linux, installed over itself and removed: nothing that works is lost, nothing broken stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from neuroshard import __version__
from neuroshard.config.saving import TOKEN_FILE
from tests.worlds.releases import program, real_program, script, unpacked_archive

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="the archive for Linux"),
]
BROKEN = b"#!/bin/sh\nexit 7\n"
LIBRARY = ".local/lib/neuroshard"
DATA = ".local/share/neuroshard"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home in which the stand-in is installed."""
    home = tmp_path / "a home"
    home.mkdir()
    done = script(unpacked_archive(tmp_path / "good", program(__version__)) / "install.sh", home)
    assert done.returncode == 0, done.stderr
    return home


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def test_a_copy_that_does_not_start_replaces_nothing(home: Path, tmp_path: Path) -> None:
    before = files(home)
    done = script(unpacked_archive(tmp_path / "bad", BROKEN) / "install.sh", home)
    assert done.returncode == 5
    assert "The installed version is unchanged" in done.stderr
    assert files(home) == before
    told = subprocess.run(
        [str(home / ".local/bin/neuroshard"), "--version"], capture_output=True, text=True, check=True
    )
    assert told.stdout == f"neuroshard {__version__}\n"


def test_the_same_version_again_leaves_one_copy(home: Path, tmp_path: Path) -> None:
    before = files(home)
    versions = home / LIBRARY / "versions"
    (versions / f"{__version__}.new").mkdir()  # of a try that was killed
    (versions / f"{__version__}.old").mkdir()
    done = script(unpacked_archive(tmp_path / "again", program(__version__)) / "install.sh", home)
    assert done.returncode == 0, done.stderr
    assert files(home) == before
    assert [path.name for path in versions.iterdir()] == [__version__]


@pytest.mark.parametrize("damage", ["version is gone", "does not start", "no pointer"])
def test_a_broken_installation_can_be_removed(home: Path, damage: str) -> None:
    version = home / LIBRARY / "versions" / __version__
    if damage == "version is gone":
        (version / "neuroshard").unlink()
    elif damage == "does not start":
        (version / "neuroshard").write_bytes(BROKEN)
    else:
        (home / LIBRARY / "current").unlink()
    entry = home / ".config/autostart/neuroshard.desktop"
    entry.parent.mkdir(parents=True)
    entry.write_text(f'Exec="{home / LIBRARY}/neuroshard" "--headless"\n')
    other = home / ".config/systemd/user/neuroshard.service"
    other.parent.mkdir(parents=True)
    other.write_text('ExecStart="/home/me/.venv/bin/neuroshard"\n')
    removed = script(home / LIBRARY / "uninstall.sh", home)
    assert removed.returncode == 0, removed.stderr
    assert files(home) == {other.relative_to(home).as_posix()}


def test_a_node_that_does_not_stop_keeps_its_program_and_says_why(home: Path) -> None:
    stubborn = '#!/bin/sh\n[ "$1" = --version ] && exit 0\n[ "$1" = stop ] && echo "it is busy" && exit 1\n'
    (home / LIBRARY / "versions" / __version__ / "neuroshard").write_text(stubborn)
    before = files(home)
    removed = script(home / LIBRARY / "uninstall.sh", home)
    assert removed.returncode == 1
    assert "it is busy" in removed.stderr
    assert files(home) == before


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """The data folder that the wizard's user chose."""
    return tmp_path / "a disk" / "träining"


@pytest.fixture
def chosen_home(tmp_path: Path, elsewhere: Path) -> Path:
    """A home in which this checkout's program is installed; the wizard was told to keep its data elsewhere."""
    from pydantic import SecretStr

    from neuroshard.config.saving import FirstSettings, store_first_settings

    home = tmp_path / "home"
    home.mkdir()
    done = script(unpacked_archive(tmp_path / "real", real_program(__version__)) / "install.sh", home)
    assert done.returncode == 0, done.stderr
    store_first_settings(FirstSettings(elsewhere, SecretStr("correct horse battery staple")), home / DATA)
    return home


def test_a_chosen_data_folder_is_named_when_it_stays(chosen_home: Path, elsewhere: Path) -> None:
    removed = script(chosen_home / LIBRARY / "uninstall.sh", chosen_home)
    assert removed.returncode == 0, removed.stderr
    assert f"stay in {elsewhere}." in removed.stdout
    assert f"stay in {chosen_home / DATA}." in removed.stdout
    assert (elsewhere / TOKEN_FILE).exists()


def test_a_chosen_data_folder_goes_with_the_wallet_when_that_is_asked_for(chosen_home: Path, elsewhere: Path) -> None:
    removed = script(chosen_home / LIBRARY / "uninstall.sh", chosen_home, "--delete-data")
    assert removed.returncode == 0, removed.stderr
    assert f"{elsewhere} is deleted." in removed.stdout
    assert not elsewhere.exists()
    assert files(chosen_home) == set()


def test_what_a_broken_program_cannot_tell_is_not_deleted_and_named(chosen_home: Path, elsewhere: Path) -> None:
    (chosen_home / LIBRARY / "versions" / __version__ / "neuroshard").write_bytes(BROKEN)
    removed = script(chosen_home / LIBRARY / "uninstall.sh", chosen_home, "--delete-data")
    assert removed.returncode == 0, removed.stderr
    assert f'data_dir = "{elsewhere}"' in removed.stdout
    assert (elsewhere / TOKEN_FILE).exists()


def test_a_home_folder_is_never_deleted(chosen_home: Path) -> None:
    (chosen_home / DATA / "config.toml").write_text('data_dir = "~"\n')
    (chosen_home / "letters").write_text("precious")
    removed = script(chosen_home / LIBRARY / "uninstall.sh", chosen_home, "--delete-data")
    assert removed.returncode == 0, removed.stderr
    assert "contains your home folder" in removed.stderr
    assert files(chosen_home) == {"letters"}
