"""Sizes: a file has at most 600 lines and one whole subject, a function has at most 60 lines."""

from __future__ import annotations

import ast
from pathlib import Path

from source_files import name_of, python_files, syntax_tree, web_files

MOST_FILE_LINES = 600
MOST_FUNCTION_LINES = 60


def test_files_are_at_most_600_lines() -> None:
    lengths = {name_of(path): line_count(path) for path in (*python_files(), *web_files())}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_FILE_LINES} == {}


def test_functions_are_at_most_60_lines() -> None:
    too_long = {
        f"{name_of(path)}:{node.lineno} {node.name}": lines
        for path in python_files()
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_FUNCTION_LINES
    }
    assert too_long == {}


def line_count(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())
