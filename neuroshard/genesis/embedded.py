"""The demo's text, found on every Python installation: language reference topics and standard-library docstrings.

Source files are parsed, never imported. Where they are missing (a frozen program) the documentation of what is
loaded anyway stands in.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import cast

from neuroshard.errors import DataError
from neuroshard.genesis.documents import Document, Fraction

COLLECTION_VERSION = "1"  # raise it when the collected text changes
MAX_SOURCE_BYTES = 2_000_000
MIN_DOCSTRING_CHARACTERS = 40
MIN_DOCUMENT_CHARACTERS = 200
MIN_TEXT_CHARACTERS = 200_000
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "__pycache__"}
)
_TOPICS = Path("pydoc_data") / "topics.py"
# Kinds of objects whose docstring is plain data; asking others may run code (lazy or deprecated attributes).
_DOCUMENTED = (
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    property,
)
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class StandardLibraryText:
    """Documents from a Python standard library: one a topic, one a module."""

    name = "python-documentation"

    def __init__(self, root: Path | None = None) -> None:
        """`root` is the folder of the standard library; by default that of the running Python."""
        self._root = root or Path(sysconfig.get_paths()["stdlib"])

    def fingerprint(self) -> str:
        """Hash over the Python version and the names and sizes of the files."""
        parts = [COLLECTION_VERSION, sys.version]
        parts += [f"{path.relative_to(self._root).as_posix()} {path.stat().st_size}" for path in self._files()]
        return sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()

    def documents(self, progress: Fraction) -> list[Document]:
        """Topics first, then modules by name; a docstring that occurred before is left out."""
        documents = list(_topics(self._root / _TOPICS))
        seen: set[str] = set()
        files = self._files()
        for done, path in enumerate(files):
            if path != self._root / _TOPICS:
                documents += _module_document(_module_name(path.relative_to(self._root)), _parse(path), seen)
            progress((done + 1) / len(files))
        if sum(len(document.text) for document in documents) < MIN_TEXT_CHARACTERS:
            documents += _loaded_documentation(seen)
        if not documents:
            raise DataError("This Python installation has no documentation to learn from.", "Use --text FOLDER.")
        return documents

    def _files(self) -> list[Path]:
        found: list[Path] = []
        for folder, subfolders, names in os.walk(self._root):
            subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith(".")]
            found += [Path(folder) / name for name in names if name.endswith(".py")]
        return sorted(path for path in found if 0 < path.stat().st_size <= MAX_SOURCE_BYTES)


def _module_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _parse(path: Path) -> ast.Module | None:
    """The syntax tree of a file; None for one that is not valid Python (templates, other versions)."""
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return None  # one module less is no loss


def _topics(path: Path) -> Iterator[Document]:
    """The entries of `topics = {name: text}` in pydoc_data, read without running it."""
    tree = _parse(path) if path.is_file() else None
    for node in tree.body if tree else []:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if not isinstance(value, ast.Dict):
            continue
        for key, text in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield Document(f"topic {key.value}", text.value.strip() + "\n")


def _module_document(name: str, tree: ast.Module | None, seen: set[str]) -> list[Document]:
    """A module's docstrings in order of appearance, each under its name; nothing for a module with hardly any."""
    if tree is None:
        return []
    parts = [*_new_docstring(ast.get_docstring(tree), f"module {name}", seen)]
    for heading, docstring in _docstrings(tree, ""):
        parts += _new_docstring(docstring, heading, seen)
    text = "\n\n".join(parts) + "\n"
    return [Document(name, text)] if len(text) >= MIN_DOCUMENT_CHARACTERS else []


def _docstrings(parent: ast.Module | _Definition, prefix: str) -> Iterator[tuple[str, str | None]]:
    for node in parent.body:
        if isinstance(node, ast.ClassDef):
            yield f"class {prefix}{node.name}", ast.get_docstring(node)
            yield from _docstrings(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield f"{prefix}{node.name}({ast.unparse(node.args)})", docstring


def _new_docstring(docstring: str | None, heading: str, seen: set[str]) -> list[str]:
    if docstring is None or len(docstring) < MIN_DOCSTRING_CHARACTERS or docstring in seen:
        return []
    seen.add(docstring)
    return [f"{heading}\n{docstring}"]


def _loaded_documentation(seen: set[str]) -> list[Document]:
    """Docstrings of the standard modules that are loaded: what is left when there are no source files."""
    names = sorted(set(sys.modules) & sys.stdlib_module_names)
    documents: list[Document] = []
    for name in names:
        module = sys.modules[name]
        parts = _new_docstring(_docstring_of(module), f"module {name}", seen)
        for heading, value in _members(module):
            parts += _new_docstring(_docstring_of(value), f"{name}.{heading}", seen)
        text = "\n\n".join(parts) + "\n"
        if len(text) >= MIN_DOCUMENT_CHARACTERS:
            documents.append(Document(f"loaded {name}", text))
    return documents


def _members(module: ModuleType) -> Iterator[tuple[str, object]]:
    """The module's values and the members of its classes, looked up without running any code of theirs."""
    for name, value in sorted(vars(module).items()):
        yield name, value
        if isinstance(value, type):
            for member, attribute in sorted(cast("dict[str, object]", dict(vars(value))).items()):
                yield f"{name}.{member}", attribute


def _docstring_of(value: object) -> str | None:
    if isinstance(value, type):
        docstring = vars(value).get("__doc__")
    else:
        docstring = value.__doc__ if isinstance(value, _DOCUMENTED) else None
    return inspect.cleandoc(docstring) if isinstance(docstring, str) else None
