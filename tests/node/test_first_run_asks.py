"""When a start without a token may show the wizard: only where somebody sits who can answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from neuroshard.config.loading import load_settings
from neuroshard.host.autostart import places_here
from neuroshard.host.desktop import has_desktop, is_service
from neuroshard.node.first_run import asks_first, surroundings_of


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
    assert surroundings_of(places).autostart_possible
    entry.write_bytes(b"\xff\xfe")
    broken = surroundings_of(places)
    assert not broken.autostart_possible
    assert str(entry) in broken.autostart_how
