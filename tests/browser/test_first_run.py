"""The wizard as a user meets it: no token, a desktop, a browser; and what a kill, a reload and a second start leave."""

from __future__ import annotations

import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from dashboard_session import OpenPage
from playwright.sync_api import Page, ViewportSize, expect
from wizard_session import (
    SLOW_MS,
    FirstRun,
    check_dashboard,
    check_page,
    give_words_back,
    heading,
    press,
    started,
)

from neuroshard.host.presets import presets_of
from neuroshard.identity import Wallet, parse_token
from neuroshard.model.memory_limit import available_mb, probe_memory


def listing(folder: Path) -> Mapping[str, str]:
    """Every file below a folder with its mode."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): oct(path.stat().st_mode & 0o777) for path in files}


pytestmark = [pytest.mark.browser, pytest.mark.process]
PHRASE = "legal winner thank year wave sausage worth useful legal winner thank yellow"
WALLET = Wallet.from_secret(parse_token(PHRASE)).wallet_id
REFUSALS = "Failed to load resource"  # by the node, or because it is not there
WAITING = {"api-secret": "0o600", "dashboard.html": "0o600", "instance.lock": "0o600"}  # until it is finished


@pytest.fixture
def desktop(tmp_path: Path, small_genesis: Path) -> FirstRun:
    """A computer on which NeuroShard was never started; nothing leaves it. Its owner has named the data already."""
    variables = {"NEUROSHARD_NETWORK": "false", "NEUROSHARD_GENESIS": str(small_genesis)}
    return FirstRun(tmp_path / "home", variables=variables)


def check_second_start(desktop: FirstRun, words: str) -> None:
    """As a second click on the icon: it opens the page of the first one and ends well."""
    with started(desktop) as second:
        told, _ = second.communicate(timeout=60)
    assert (second.returncode, words in told) == (0, True), told


def check_other_browser(address: str, open_page: OpenPage) -> None:
    """The page of a second start opens the dashboard in another browser of the owner."""
    page = open_page(address, excused=REFUSALS)
    check_dashboard(page)
    page.goto("about:blank")


def choose_light_and_come_back(page: Page) -> None:
    """Back leads to the step before, also after Back to a step that is not shown again."""
    expect(page.get_by_label("Balanced")).to_be_checked()
    page.get_by_label("Light").check()
    press(page, "Next")
    heading(page, "When may it work?")
    page.go_back()
    expect(page.get_by_label("Light")).to_be_checked()


def choose_own_limits(page: Page) -> None:
    """Limits that no preset has, the first time with a mistake."""
    assert page.get_by_label("Memory (MB)").count() == 0
    page.get_by_label("Own limits").check()
    fields = page.locator(".setup-limits input")
    typed = fields.evaluate_all("fields => fields.map(({ value }) => value)")
    for field in fields.all():
        field.fill("1e99")
    press(page, "Next")
    expect(page.get_by_role("alert").filter(has_text="Enter a ")).to_have_count(len(typed))
    for field, value in zip(fields.all(), typed, strict=True):
        field.fill(value)
    page.get_by_label("Memory (MB)").fill("lots")
    press(page, "Next")
    expect(page.get_by_role("alert")).to_contain_text("Enter a whole number from 1 to 1,000,000,000")
    expect(page.get_by_label("Memory (MB)")).to_be_focused()
    page.get_by_label("Memory (MB)").fill("800")


def test_a_new_wallet_from_the_first_click_to_the_dashboard(desktop: FirstRun, open_page: OpenPage) -> None:
    with started(desktop) as process:
        page = open_page(desktop.wait_for_page(), excused=REFUSALS)
        heading(page, "Which wallet?")
        assert "key=" not in page.url
        check_page(page)
        press(page, "Next")
        heading(page, "Write these words down")
        words = page.locator(".setup-words .mono").all_inner_texts()
        check_page(page)
        page.reload()  # the words on the paper stay the right ones
        heading(page, "Write these words down")
        assert page.locator(".setup-words .mono").all_inner_texts() == words
        press(page, "I have written them down")
        heading(page, "Check what you have written")
        assert page.locator(".setup-words").count() == 0
        give_words_back(page, ["zebra"] * 12)
        press(page, "Check")
        expect(page.get_by_role("alert").first).to_have_text(re.compile(r"Word \d+ is wrong\."))
        page.go_back()
        heading(page, "Write these words down")
        page.go_forward()
        give_words_back(page, words)
        press(page, "Check")
        heading(page, "What may it use?")
        page.go_back()  # to words that are not shown again
        heading(page, "What may it use?")
        check_page(page)
        choose_light_and_come_back(page)
        choose_own_limits(page)  # they take back the rest of Light
        expect(page.get_by_label("Upload (Mbit/s)")).to_have_value("2.5")
        press(page, "Next")
        heading(page, "When may it work?")
        check_page(page)
        expect(page.get_by_label("Start with the computer")).not_to_be_checked()
        page.get_by_label("Do not train yet").check()
        press(page, "Next")
        heading(page, "Ready to start")
        check_page(page)
        expect(page.get_by_text("800 MB")).to_be_visible()
        assert listing(desktop.data_dir) == WAITING
        press(page, "Start")
        check_dashboard(page)
        assert (desktop.health(), process.poll()) == ("ok", None)
        check_second_start(desktop, "already runs")
        check_other_browser(desktop.addresses()[-1], open_page)
        page.goto("about:blank")
        process.terminate()
        log, _ = process.communicate(timeout=60)
    files = listing(desktop.data_dir)
    assert (files["keys/wallet"], files["config.toml"]) == ("0o600", "0o600")
    config = (desktop.data_dir / "config.toml").read_text()
    assert config == 'memory = 800\nmax_upload = 2.5\ntraining = false\ntoken_file = "keys/wallet"\n'
    assert (desktop.data_dir / "keys/wallet").read_text().split() == words
    kept = log + (desktop.data_dir / "logs/node.log").read_text()
    assert " ".join(words) not in kept
    assert not (desktop.home / ".config").exists()  # autostart was not asked for


def balanced_settings() -> Mapping[str, object]:
    """The preset that the wizard proposes on this computer, as config.toml has it: without settings that are unset."""
    presets = {preset.name: preset.settings for preset in presets_of(available_mb(probe_memory(), None))}
    return {key: value for key, value in presets["balanced"].items() if value is not None}


def test_a_wallet_is_entered_by_keyboard_at_phone_width(desktop: FirstRun, open_page: OpenPage, tmp_path: Path) -> None:
    folder = tmp_path / "big disk" / "node"
    folder.parent.mkdir()
    with started(desktop) as process:
        url = desktop.wait_for_page()
        page = open_page(url, theme="dark", viewport=ViewportSize(width=360, height=740), excused=REFUSALS)
        heading(page, "Which wallet?")
        keys = page.keyboard
        page.get_by_label("Make a new wallet").focus()
        keys.press("ArrowDown")
        keys.press("Tab")
        keys.type(PHRASE.replace("yellow", "thank"))
        keys.press("Tab")
        keys.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("The checksum of the wallet phrase is wrong.")
        expect(page.get_by_label("Wallet phrase")).to_be_focused()
        check_page(page)
        keys.press("Control+A")
        keys.type(PHRASE)
        keys.press("Tab")
        keys.press("Enter")
        heading(page, "What may it use?")
        keys.press("Tab")
        expect(page.get_by_label("Data folder")).to_be_focused()
        keys.press("Control+A")
        keys.type(str(folder))
        check_page(page)
        keys.press("Enter")
        heading(page, "When may it work?")
        keys.press("Tab")
        keys.press("ArrowUp")  # the last of the answers
        expect(page.get_by_label("Do not train yet")).to_be_checked()
        keys.press("Tab")
        keys.press("Space")
        expect(page.get_by_label("Start with the computer")).to_be_checked()
        keys.press("Enter")
        heading(page, "Ready to start")
        expect(page.get_by_text("5 Mbit/s", exact=True)).to_be_visible()  # half of the assumed line
        expect(page.get_by_text(WALLET[:8], exact=True)).to_be_visible()
        check_page(page)
        keys.press("Tab")
        keys.press("Enter")
        expect(page.get_by_role("navigation", name="Views")).to_be_visible(timeout=SLOW_MS)
        page.goto("about:blank")
        process.terminate()
        process.wait(60)
    assert (folder / "keys/wallet").read_text() == PHRASE + "\n"
    assert stat.S_IMODE((folder / "keys/wallet").stat().st_mode) == 0o600
    assert (desktop.data_dir / "config.toml").read_text() == f'data_dir = "{folder}"\n'
    assert tomllib.loads((folder / "config.toml").read_text()).items() >= balanced_settings().items()
    (entry,) = (path for path in (desktop.home / ".config").rglob("*") if path.is_file())
    assert str(folder) in entry.read_text()
    assert "legal" not in entry.read_text()
    with started(desktop, "--no-training") as again:  # the next start asks nothing and finds the folder
        desktop.wait_for_page(2)
        assert desktop.health() == "ok"
        again.terminate()
        assert again.wait(60) == 0


def test_a_kill_leaves_nothing_and_only_the_key_opens_the_page(desktop: FirstRun, open_page: OpenPage) -> None:
    with started(desktop) as process:
        url = desktop.wait_for_page()
        page = open_page(url, excused=REFUSALS)
        page.get_by_label("I have a wallet").check()
        page.get_by_label("Wallet phrase").fill("word " * 3_000)  # the page takes no more than the node reads
        press(page, "Next")
        expect(page.get_by_role("alert")).to_contain_text("A wallet phrase has 12 or 24 words")
        page.get_by_label("Wallet phrase").evaluate("box => box.removeAttribute('maxlength')")
        page.get_by_label("Wallet phrase").fill("word " * 3_000)
        press(page, "Next")
        expect(page.get_by_role("alert")).to_contain_text("4096")
        page.get_by_label("Wallet phrase").fill(PHRASE)
        press(page, "Next")
        heading(page, "What may it use?")
        stranger = open_page(url, excused=REFUSALS)  # the same address in another browser: its key is used up
        heading(stranger, "NeuroShard is locked")
        check_page(stranger)
        check_second_start(desktop, "already waits for its set-up")
        with started(desktop, "generate", "Once") as command:
            told, _ = command.communicate(timeout=60)
        assert (command.returncode, "`neuroshard` opens it again" in told) == (1, True), told
        stranger.goto(desktop.wait_for_page(2))
        heading(stranger, "What may it use?")
        stranger.reload()
        heading(stranger, "What may it use?")  # the same set-up, further on
        stranger.goto("about:blank")
        process.kill()
        process.wait()
        expect(page.get_by_role("alert")).to_contain_text("NeuroShard does not answer.")
    assert listing(desktop.data_dir) == WAITING
    with started(desktop) as process:
        desktop.wait_for_page(3)
        heading(page, "Which wallet?")  # the page that stayed open goes on
        expect(page.get_by_role("alert")).to_have_count(0)
        expect(page.get_by_label("Keep the wallet of this set-up")).to_have_count(0)
        page.goto("about:blank")
        process.terminate()
        told, _ = process.communicate(timeout=60)
        assert (process.returncode, "Nothing was stored." in told) == (0, True)
    assert listing(desktop.data_dir) == WAITING


def test_headless_the_ways_are_named(desktop: FirstRun) -> None:
    with started(desktop, "--headless", fresh=True) as process:
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 3, told
    for way in ("--token-file", "NEUROSHARD_TOKEN", "token_file in config.toml"):
        assert way in told
    assert desktop.addresses() == []
    assert not desktop.data_dir.exists()
