"""Runs the command as a user does: its own process, home folder and environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_run import Command


@pytest.fixture
def neuroshard(tmp_path: Path) -> Command:
    """`neuroshard` with a home folder of its own and nothing of NeuroShard in the environment."""
    return Command(tmp_path / "home")
