"""Where second copies lie in a data folder; no torch here."""

from __future__ import annotations

from pathlib import Path

from neuroshard.types import LayerRange, RunId

FOLDER = "copies"


def copy_folder(data_dir: Path, run_id: RunId, layers: LayerRange) -> Path:
    """Where the copy of one stage lies."""
    return data_dir / FOLDER / run_id / f"layers-{layers.start}-{layers.stop}"


def copy_folders(data_dir: Path) -> list[Path]:
    """Where copies lie, of whatever runs and stages."""
    return sorted((data_dir / FOLDER).glob("*/layers-*"))
