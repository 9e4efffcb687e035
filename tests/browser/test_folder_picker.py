"""The folder with the owner's text is chosen from a list, with the mouse or with the keyboard alone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from dashboard_session import OpenPage
from playwright.sync_api import Locator, Page, expect
from wizard_session import check_page, heading, press

from benchmarks.node_process import free_port
from tests.worlds.setup_api import SetupApi

pytestmark = pytest.mark.browser


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder: notes with text in two levels, pictures without, and a link out of it."""
    home = tmp_path / "home"
    for name, size in {"notes/2025/a.md": 90_000, "notes/2026/b.txt": 60_000, "notes/c.txt": 1_000}.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text("a" * size)
    (home / "pictures").mkdir()
    (home / "away").symlink_to("/etc")
    monkeypatch.setenv("HOME", str(home))
    return home


def folders(page: Page) -> Locator:
    return page.get_by_role("region", name="Folders on this computer")


def test_a_folder_is_found_and_chosen_with_the_mouse(home: Path, open_page: OpenPage) -> None:
    wizard = SetupApi(home / "node", is_given=False, port=free_port(), now=time.time())
    with wizard.served() as address:
        page = open_page(address, excused="422")
        press(page, "Train on my own text")
        heading(page, "Which text?")
        part, field = folders(page), page.get_by_label("Folder", exact=True)
        expect(part).to_contain_text(str(home))
        names = [row.split("\n")[0] for row in part.get_by_role("button").all_inner_texts()]
        assert names == ["↑ Folder above", "notes", "pictures"]
        expect(part.get_by_role("button", name="notes")).to_contain_text("3 text files, 151 kB")
        expect(part.get_by_role("button", name="pictures")).to_contain_text("no text files")
        expect(field).to_have_value("")  # the home folder is not chosen by itself
        check_page(page)
        part.get_by_role("button", name="notes").click()
        expect(field).to_have_value(str(home / "notes"))
        expect(part.get_by_role("button", name="2025")).to_contain_text("1 text file, 90 kB")
        part.get_by_role("button", name="2026").click()
        expect(part).to_contain_text("There are no folders in here.")
        check_page(page)
        page.set_viewport_size({"width": 390, "height": 844})
        check_page(page)
        (home / "notes" / "2025" / "a.md").unlink()
        (home / "notes" / "2025").rmdir()
        part.get_by_role("button", name="Folder above").click()
        expect(part.get_by_role("button", name="2025")).to_have_count(0)
        press(page, "Next")
        heading(page, "Which wallet?")
        page.goto("about:blank")
    assert wizard.desk.arrival.text is not None
    assert wizard.desk.arrival.text.path == home / "notes"


def test_the_keyboard_alone_chooses_a_folder(home: Path, open_page: OpenPage) -> None:
    wizard = SetupApi(home / "node", is_given=False, port=free_port(), now=time.time())
    with wizard.served() as address:
        page = open_page(address)
        press(page, "Train on my own text")
        part, field = folders(page), page.get_by_label("Folder", exact=True)
        expect(part.get_by_role("button", name="notes")).to_be_visible()
        field.focus()
        page.keyboard.press("Tab")
        expect(part.get_by_role("button", name="Folder above")).to_be_focused()
        page.keyboard.press("ArrowDown")
        expect(part.get_by_role("button", name="notes")).to_be_focused()
        page.keyboard.press("End")
        expect(part.get_by_role("button", name="pictures")).to_be_focused()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("Enter")
        expect(field).to_have_value(str(home / "notes"))
        expect(part.get_by_role("button", name="Folder above")).to_be_focused()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(field).to_have_value(str(home / "notes" / "2025"))
        page.keyboard.press("ArrowLeft")
        expect(field).to_have_value(str(home / "notes"))
        page.goto("about:blank")


def test_a_folder_that_is_gone_is_explained_and_the_list_stays(home: Path, open_page: OpenPage) -> None:
    wizard = SetupApi(home / "node", is_given=False, port=free_port(), now=time.time())
    with wizard.served() as address:
        page = open_page(address, excused="422")
        press(page, "Train on my own text")
        part = folders(page)
        expect(part.get_by_role("button", name="pictures")).to_be_visible()
        (home / "pictures").rmdir()
        part.get_by_role("button", name="pictures").click()
        expect(part.get_by_role("alert")).to_contain_text("cannot be opened")
        check_page(page)
        part.get_by_role("button", name="notes").click()
        expect(part.get_by_role("alert")).to_have_count(0)
        expect(part.get_by_role("button", name="2025")).to_be_visible()
        page.goto("about:blank")


def test_another_drive_is_opened_and_a_drive_without_a_disk_is_explained(
    home: Path, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two folders in place of the drives of Windows; on Windows itself this was not run."""
    drives = (str(home / "notes"), str(home / "pictures"), str(home / "nothing"))
    monkeypatch.setattr("neuroshard.dataset.text_folders.present_drives", lambda: drives)
    wizard = SetupApi(home / "node", is_given=False, port=free_port(), now=time.time())
    with wizard.served() as address:
        page = open_page(address, excused="422")
        press(page, "Train on my own text")
        part = folders(page)
        group = part.get_by_role("group", name="Drives")
        expect(group.get_by_role("button")).to_have_count(3)
        group.get_by_role("button").nth(1).click()
        expect(part).to_contain_text("There are no folders in here.")
        expect(group.get_by_role("button", pressed=True)).to_have_text(drives[1])
        expect(page.get_by_label("Folder", exact=True)).to_have_value("")  # a whole drive is not chosen by itself
        check_page(page)
        group.get_by_role("button").nth(0).focus()
        page.keyboard.press("Enter")
        expect(part.get_by_role("button", name="2025")).to_be_visible()
        group.get_by_role("button").nth(2).click()
        expect(part.get_by_role("alert")).to_contain_text("cannot be opened")
        expect(part.get_by_role("button", name="2025")).to_be_visible()
        page.set_viewport_size({"width": 390, "height": 844})
        check_page(page)
        page.goto("about:blank")
