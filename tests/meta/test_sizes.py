"""Files and functions stay small enough to read: 400 lines a file, 60 a function, a median file about 130."""

from __future__ import annotations

import ast
from pathlib import Path
from statistics import median

from source_files import name_of, python_files, syntax_tree, web_files

MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60
MOST_MEDIAN_LINES = 160


def test_files_are_at_most_400_lines() -> None:
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


def test_the_median_file_of_the_package_is_short() -> None:
    assert median(line_count(path) for path in python_files("neuroshard")) <= MOST_MEDIAN_LINES


def line_count(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())
