"""Which files the project's own rules look at, and what they read of them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON_FOLDERS = ("neuroshard", "tests", "benchmarks", "installers")
WEB_FOLDERS = ("web/src", "web/public")
WEB_ENDINGS = {".ts", ".tsx", ".css", ".mjs", ".js", ".html"}
TEXT_ENDINGS = {".py", ".md", ".toml", ".json", ".yml", ".yaml", ".sh", ".svg", *WEB_ENDINGS}
NOT_OURS = {"node_modules", "__pycache__", "static"}


def python_files(*folders: str) -> list[Path]:
    """Python files below the folders (all of ours by default), with the build hook."""
    found = [path for folder in folders or PYTHON_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted([path for path in found if ours(path)] + ([] if folders else [ROOT / "hatch_build.py"]))


def web_files() -> list[Path]:
    """Sources of the dashboard."""
    found = [path for folder in WEB_FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in WEB_ENDINGS]
    return sorted([*found, ROOT / "web/index.html", ROOT / "web/vite.config.ts"])


def text_files() -> list[Path]:
    """Everything of ours that people read."""
    folders = [*PYTHON_FOLDERS, *WEB_FOLDERS, "docs"]
    below = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in TEXT_ENDINGS]
    top = [path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXT_ENDINGS]
    named = [ROOT / "Makefile", ROOT / ".ci/run", ROOT / "web/package.json", ROOT / "web/.npmrc"]
    return sorted({path for path in (*below, *top, *named) if ours(path)})


def ours(path: Path) -> bool:
    """Whether a file is source of this project: neither built nor installed."""
    return not NOT_OURS.intersection(path.relative_to(ROOT).parts)


def name_of(path: Path) -> str:
    """Path inside the repository, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


@cache
def syntax_tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
