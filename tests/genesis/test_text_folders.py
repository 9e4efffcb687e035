"""The list of folders for the choice of text: what is counted, what is left out, and how much is read at most."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neuroshard.dataset import FolderText, text_folders
from neuroshard.dataset.text_folders import MAX_FOLDERS, MAX_NAMES_EACH, ListedFolder, drives_of, list_text_folders
from neuroshard.errors import DataError


def written(path: Path, size: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"a" * size)
    return path


def test_folders_are_listed_with_the_text_below_them_and_files_are_not(tmp_path: Path) -> None:
    written(tmp_path / "own.txt", 5)
    written(tmp_path / "Zoo" / "a.md", 10)
    written(tmp_path / "Zoo" / "deep" / "er" / "b.TXT", 20)
    written(tmp_path / "Zoo" / "picture.png", 400)
    written(tmp_path / "album" / "picture.png", 400)
    found = list_text_folders(tmp_path)
    album, zoo = str(tmp_path / "album"), str(tmp_path / "Zoo")
    assert found.folders == (ListedFolder(album, 0, 0, True), ListedFolder(zoo, 2, 30, True))
    assert found.folder == ListedFolder(str(tmp_path), 3, 35, True)
    assert (found.parent, found.has_more) == (str(tmp_path.parent), False)
    assert list_text_folders(Path("/")).parent is None


def test_links_are_neither_shown_nor_followed_nor_counted(tmp_path: Path) -> None:
    secret, home = tmp_path / "secret", tmp_path / "home"
    written(secret / "diary.txt", 100)
    written(home / "notes" / "a.txt", 1)
    (home / "away").symlink_to(secret)
    (home / "loop").symlink_to(home)
    (home / "notes" / "below").symlink_to(secret)
    (home / "notes" / "diary.txt").symlink_to(secret / "diary.txt")
    found = list_text_folders(home)
    assert found.folders == (ListedFolder(str(home / "notes"), 1, 1, True),)
    assert list_text_folders(home / "away").folder.path == str(
        secret
    )  # the owner named the link: the page shows where it leads


@pytest.mark.parametrize("name", [".git", "node_modules", "__pycache__", "venv", "line\nbreak", "\u202egnp"])
def test_folders_that_training_skips_or_that_cannot_be_shown_are_left_out(tmp_path: Path, name: str) -> None:
    written(tmp_path / name / "a.txt", 10)
    written(tmp_path / "shown" / name / "a.txt", 10)
    (row,) = list_text_folders(tmp_path).folders
    assert (row.path, row.files) == (str(tmp_path / "shown"), 0)


def test_what_is_counted_is_what_training_reads(tmp_path: Path) -> None:
    written(tmp_path / "all" / "built" / "build.json", 10)
    written(tmp_path / "all" / "built" / "a.txt", 10)
    written(tmp_path / "all" / ".hidden.txt", 10)
    written(tmp_path / "all" / "a" / "b" / "c.py", 10)
    written(tmp_path / "all" / "a.html", 10)
    size = FolderText(tmp_path / "all").size()
    (row,) = list_text_folders(tmp_path).folders
    assert (row.files, row.bytes) == (size.files, size.bytes) == (2, 20)


def test_what_cannot_be_listed_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for folder in (tmp_path / "none", written(tmp_path / "file", 1), tmp_path / "loop", Path("/proc/1/x\0y")):
        with pytest.raises(DataError, match=r"cannot be opened"):
            list_text_folders(folder)


def test_a_part_of_another_user_makes_the_count_a_lower_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "a" / "mine.txt", 10)
    written(tmp_path / "a" / "theirs" / "x.txt", 10)
    written(tmp_path / "a" / "zz" / "mine.txt", 10)
    scandir = os.scandir

    def refuse(path: Path) -> object:  # root reads everything, so the refusal of the system is made up
        if Path(path).name == "theirs":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(text_folders.os, "scandir", refuse)
    (row,) = list_text_folders(tmp_path).folders
    assert row == ListedFolder(str(tmp_path / "a"), 2, 20, False)


def test_a_large_folder_is_read_up_to_a_limit(tmp_path: Path) -> None:
    for number in range(MAX_FOLDERS + 5):
        (tmp_path / f"f{number:03}").mkdir()
    for number in range(MAX_NAMES_EACH + 50):
        (tmp_path / "f000" / f"{number}.txt").touch()
    found = list_text_folders(tmp_path)
    assert (len(found.folders), found.has_more, found.folder.is_complete) == (MAX_FOLDERS, True, False)
    first = found.folders[0]
    assert (first.files, first.is_complete) == (MAX_NAMES_EACH, False)


def test_all_counts_together_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_folders, "MAX_NAMES_BELOW", 5)
    for name in "abc":
        for number in range(4):
            written(tmp_path / name / f"{number}.txt", 1)
    rows = list_text_folders(tmp_path).folders
    assert (rows[0].files, rows[0].bytes) == (4, 4)
    assert [row.is_complete for row in rows] == [True, False, False]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse names that are not text")
def test_a_name_that_is_not_text_is_left_out(tmp_path: Path) -> None:
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")).mkdir()
    assert list_text_folders(tmp_path).folders == ()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_lists_a_folder_or_is_refused(tmp_path: Path, text: str) -> None:
    try:
        found = list_text_folders(tmp_path / text.lstrip("/"))
    except DataError:
        return
    assert Path(found.folder.path).is_dir()


def test_the_drives_of_windows_are_the_bits_of_its_mask() -> None:
    """The call that gives the mask was not run: it needs Windows."""
    assert drives_of(0) == ()
    assert drives_of(0b1100) == ("C:\\", "D:\\")
    assert drives_of(1 | 1 << 25) == ("A:\\", "Z:\\")
    assert drives_of(1 << 26) == ()  # there is no letter for it


def test_elsewhere_there_are_no_drives(tmp_path: Path) -> None:
    assert list_text_folders(tmp_path).drives == ()
