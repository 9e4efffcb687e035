"""Which command line starts this program again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from neuroshard import __version__
from neuroshard.config.folders import LAUNCHER, installation_root, installed_program, this_program


def test_the_program_of_an_environment_starts_again() -> None:
    answer = subprocess.run([*this_program(), "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == f"neuroshard {__version__}"


def test_a_frozen_program_is_its_own_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert this_program() == (sys.executable,)


def test_autostart_names_the_launcher_of_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = tmp_path / "versions" / "0.1.0"
    monkeypatch.setattr(sys, "prefix", str(version))
    assert installed_program() == this_program()  # no installation yet
    (tmp_path / "current").write_text("0.1.0\n", encoding="utf-8")
    assert installation_root() == tmp_path
    assert installed_program() == (str(tmp_path / LAUNCHER),)


def test_a_folder_that_merely_looks_alike_is_no_installation(tmp_path: Path) -> None:
    (tmp_path / "current").write_text("x\n", encoding="utf-8")
    assert installation_root(tmp_path / "elsewhere" / "0.1.0") is None
