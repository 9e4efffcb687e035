"""Data folders for nodes that a test starts, stops, kills and spoils."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def trained(trained_folder: Path, tmp_path: Path) -> Path:
    """Data folder of a node that trained and was stopped well, ours to spoil; it holds three checkpoints."""
    return shutil.copytree(trained_folder, tmp_path / "node")
