"""The tray icon: its view of a node, its menu against a real one, and the icon itself on a made-up screen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.node_process import running_node
from neuroshard.cli.tray_view import MOST_TITLE_CHARACTERS, Mood, TrayNode, tray_view


@pytest.mark.parametrize(
    ("status", "mood", "may_pause", "may_resume"),
    [
        (None, Mood.RESTING, False, False),
        ({"state": "training", "state_reason": "Training."}, Mood.WORKING, True, False),
        ({"state": "paused", "state_reason": "Paused by the user."}, Mood.RESTING, False, True),
        ({"state": "waiting_for_data", "state_reason": "No answer."}, Mood.RESTING, True, False),
        ({"state": "failed", "state_reason": "The disk is gone."}, Mood.TROUBLE, False, False),
        ({"state": "stopping", "state_reason": ""}, Mood.RESTING, False, False),
    ],
)
def test_what_the_icon_shows(status: Mapping[str, Any] | None, mood: Mood, may_pause: bool, may_resume: bool) -> None:
    view = tray_view(status)
    assert (view.mood, view.may_pause, view.may_resume) == (mood, may_pause, may_resume)
    assert view.title.startswith("NeuroShard: ")
    assert (status or {}).get("state_reason", "no node") in view.title


def test_a_long_reason_is_cut() -> None:
    assert len(tray_view({"state": "failed", "state_reason": "x" * 500}).title) == MOST_TITLE_CHARACTERS


def test_without_a_node_every_command_explains_itself(tmp_path: Path) -> None:
    pages: list[str] = []
    node = TrayNode(tmp_path, open_page=pages.append)
    assert not node.look().is_running
    for told in (node.pause_an_hour(), node.resume(), node.open_dashboard()):
        assert "No node is running" in told
    assert pages == []


@pytest.mark.process
def test_the_menu_drives_a_real_node(quick: list[str], tmp_path: Path) -> None:
    pages: list[str] = []
    with running_node(tmp_path / "node", quick) as started:
        node = TrayNode(started.data_dir, open_page=pages.append)
        started.wait_for("training", lambda status: status["state"] == "training")
        assert node.look().may_pause
        assert "Paused" in node.pause_an_hour()
        paused = started.wait_for("pause", lambda status: status["state"] == "paused")
        assert paused["paused_until"] - paused["time"] == pytest.approx(3600, abs=60)
        assert node.look().may_resume
        assert node.resume() == "Training resumes."
        started.wait_for("training", lambda status: status["state"] == "training")
        assert node.open_dashboard() == ""
        assert pages == [(started.data_dir / "dashboard.html").as_uri()]
        content = (started.data_dir / "dashboard.html").read_text()
        assert f"http://localhost:{started.port}/#key=" in content
    assert not node.look().is_running


ICON_PROGRAM = """
import os
import sys
from pathlib import Path
from neuroshard.cli import desktop
from neuroshard.cli.tray_view import TrayNode

icon = desktop._icon(TrayNode(Path(sys.argv[1])))

print(icon.title, icon.icon.size, [str(item.text) for item in icon.menu.items], flush=True)
os._exit(0)
"""


@pytest.mark.skipif(shutil.which("Xvfb") is None, reason="Xvfb is not installed")
def test_the_icon_and_its_menu_are_made_on_a_screen(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    read, write = os.pipe()
    command = ["Xvfb", "-displayfd", str(write), "-screen", "0", "320x200x24", "-nolisten", "tcp"]
    with subprocess.Popen(command, pass_fds=(write,), stderr=subprocess.DEVNULL) as screen:
        os.close(write)
        try:
            with os.fdopen(read) as told:
                display = f":{told.readline().strip()}"
            ran = subprocess.run(
                [sys.executable, "-c", ICON_PROGRAM, str(tmp_path)],
                env={**os.environ, "DISPLAY": display, "PYSTRAY_BACKEND": "xorg"},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        finally:
            screen.terminate()
    title, menu = "NeuroShard: no node is running", ["Open dashboard", "Pause for an hour", "Resume", "Close this icon"]
    assert ran.stdout == f"{title} (64, 64) {[title, *menu]}\n", ran.stderr
    assert ran.returncode == 0
