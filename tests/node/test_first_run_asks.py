"""When a start without a token may show the wizard: only where somebody sits who can answer."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import pytest
from pydantic import SecretStr

from neuroshard.api.setup import SetupChoices
from neuroshard.config.folders import home_data_dir
from neuroshard.config.instance_lock import InstanceLock
from neuroshard.config.loading import load_settings
from neuroshard.config.saving import FirstSettings, store_first_token
from neuroshard.errors import ConflictError
from neuroshard.host.autostart import places_here
from neuroshard.host.desktop import has_desktop, is_service
from neuroshard.node import first_run
from neuroshard.node.first_run import asks_first, surroundings_of
from neuroshard.runs.chosen_run import ChosenRun, RunChoice


@pytest.mark.parametrize(
    ("platform", "environment", "expected"),
    [
        ("linux", {}, False),
        ("linux", {"DISPLAY": ""}, False),
        ("linux", {"DISPLAY": ":0"}, True),
        ("linux", {"WAYLAND_DISPLAY": "wayland-0"}, True),
        ("darwin", {}, True),
        ("darwin", {"SSH_CONNECTION": "192.0.2.1 5 192.0.2.2 22"}, False),
        ("win32", {}, True),
    ],
)
def test_where_there_is_a_desktop(platform: str, environment: dict[str, str], expected: bool) -> None:
    assert has_desktop(platform, environment) is expected


def test_a_service_is_known_from_what_a_desktop_started() -> None:
    assert is_service(77, {"SYSTEMD_EXEC_PID": "77"})
    assert is_service(77, {"XPC_SERVICE_NAME": "ai.neuroshard.node"})
    for inherited in ({}, {"SYSTEMD_EXEC_PID": "5"}, {"XPC_SERVICE_NAME": "0"}, {"XPC_SERVICE_NAME": "application.x"}):
        assert not is_service(77, inherited)


def test_who_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPLAY", ":9")
    monkeypatch.setenv("BROWSER", "true")
    for name in ("SSH_CONNECTION", "SSH_TTY", "SYSTEMD_EXEC_PID", "XPC_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)
    lone = load_settings({}, {}, tmp_path)
    assert asks_first(lone, ends_with_stdin=False)
    assert not asks_first(lone, ends_with_stdin=True)
    for flags in ({"browser": False}, {"token": "correct horse"}):
        assert not asks_first(load_settings(flags, {}, tmp_path), ends_with_stdin=False)
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    assert not asks_first(lone, ends_with_stdin=False)


def test_a_broken_file_of_autostart_is_told_and_keeps_nobody_from_the_wizard(tmp_path: Path) -> None:
    entry = tmp_path / ".config" / "autostart" / "neuroshard.desktop"
    entry.parent.mkdir(parents=True)
    places = places_here("linux", tmp_path, {})
    assert surroundings_of(tmp_path, places).autostart_possible
    entry.write_bytes(b"\xff\xfe")
    broken = surroundings_of(tmp_path, places)
    assert not broken.autostart_possible
    assert str(entry) in broken.autostart_how


TOKEN = "correct horse battery staple correct horse battery staple"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return home_data_dir()


def finish(home: Path, first: FirstSettings) -> None:
    """Store the answers of a wizard that was opened in the home folder, without an invitation."""
    lock = InstanceLock.acquire(home)
    with ExitStack() as stack:
        stack.callback(lock.release)
        load = partial(load_settings, {}, {})
        run = first_run._FirstRun(load(), load, lock, ("127.0.0.1", 8080))  # pyright: ignore[reportPrivateUsage]
        with run.waker:
            run._finish(SetupChoices(first))  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("killed_at", ["store_first_token", "_store_run", "store_first_settings", None])
def test_after_a_kill_before_the_last_write_of_the_wizard_the_next_start_asks_again(
    killed_at: str | None, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    if killed_at is not None:
        monkeypatch.setattr(first_run, killed_at, kill)
    with suppress(Killed):
        finish(home, FirstSettings(home, SecretStr(TOKEN), {"memory": 900}))
    stored, is_whole = load_settings({}, {}).settings, killed_at is None
    assert (stored.token_file is not None, stored.memory == 900) == (is_whole, is_whole)


def test_the_run_of_a_folder_that_belongs_to_another_wallet_stays(home: Path, tmp_path: Path) -> None:
    other, chosen = tmp_path / "other", ChosenRun("5" * 64, "theirs")
    store_first_token(FirstSettings(other, SecretStr(TOKEN)))
    RunChoice(other).choose(chosen)
    with pytest.raises(ConflictError):
        finish(home, FirstSettings(other, SecretStr(f"another {TOKEN}")))
    assert RunChoice(other).current() == chosen
