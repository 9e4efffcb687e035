"""Docstrings say something, and a public name means one thing."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest
from source_files import ROOT, python_files, syntax_tree

EMPTY_DOCSTRING = re.compile(r"See \w+(\.\w+)*[.:]|Of (the|a|an|its|this|that|all|each) [^.]*\.$|Once\.$")
ELSEWHERE = re.compile(r"\bDESIGN(\.md)?\b|STYLE\.md|FIELD\.md")

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def test_docstrings_say_something() -> None:
    assert [line for path in python_files("neuroshard") for line in empty_docstrings(path)] == []


@pytest.mark.parametrize(
    "text", ["See Exchange: waits.", "Of the next step.", "Once.", "The size of.", "As DESIGN 4.7 says."]
)
def test_an_empty_docstring_is_seen(text: str) -> None:
    assert says_nothing("size_of", text)
    assert not says_nothing("size_of", "Bytes of an encoded contribution.")


def test_a_public_name_is_defined_once() -> None:
    places = defaultdict[str, set[Path]](set)
    for path in python_files("neuroshard"):
        for node in syntax_tree(path).body:
            if isinstance(node, Documented) and not node.name.startswith("_") and node.name != "main":
                places[node.name].add(path)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def empty_docstrings(path: Path) -> list[str]:
    """Docstrings of a file that say nothing, with their lines."""
    nodes = [node for node in ast.walk(syntax_tree(path)) if isinstance(node, Documented)]
    texts = ((node, ast.get_docstring(node)) for node in nodes)
    found = [(node, text) for node, text in texts if text and says_nothing(node.name, text)]
    return [f"{path.relative_to(ROOT).as_posix()}:{node.lineno}: {text.splitlines()[0]}" for node, text in found]


def says_nothing(name: str, text: str) -> bool:
    """Whether a docstring is of a kind that tells its reader nothing."""
    words = [word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in {"a", "an", "the"}]
    repeats = words == re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return repeats or bool(EMPTY_DOCSTRING.match(text) or ELSEWHERE.search(text))
