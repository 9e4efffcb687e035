"""The text of a build: text files of a folder, or the documentation in the Python installation.

Includes the order of the documents, the removal of near duplicates and the cut into sections."""

from __future__ import annotations

import ast
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

from neuroshard.dataset.file_source import TEXT_SUFFIXES, decode_text, files_from
from neuroshard.errors import DataError

MIN_LINE_CHARACTERS = 16  # shorter lines repeat in any text and say nothing about a copy
MIN_NEW_SHARE = 0.5

StageProgress = Callable[[str, float], None]  # (name of the stage, fraction done of it)
Fraction = Callable[[float], None]


@dataclass(frozen=True)
class Document:
    """One text and the name of its origin."""

    name: str
    text: str


class TextSource(Protocol):
    """The origin of the documents of a Genesis folder."""

    @property
    def name(self) -> str:
        """Name of the source in the manifest."""
        ...

    def fingerprint(self) -> str:
        """Return a value that changes whenever the documents would; it costs much less than reading them."""
        ...

    def documents(self, progress: Fraction) -> list[Document]:
        """Return all documents, in the same order every time. Raises DataError when there are none."""
        ...


def without_repeats(documents: Iterable[Document]) -> list[Document]:
    """Remove near-duplicates of earlier documents, so that no copy is on both sides of a held-out split.

    A document stays when at least half of its text (in lines of 16 characters and more, ignoring white space at their
    ends) is new; a document without such lines stays unless the same text came before.
    """
    seen: set[bytes] = set()
    kept: list[Document] = []
    for document in documents:
        lines = [line for line in map(str.strip, document.text.splitlines()) if len(line) >= MIN_LINE_CHARACTERS]
        lines = lines or [document.text.strip()]
        digests = {_digest(line): len(line) for line in lines}
        new = sum(length for digest, length in digests.items() if digest not in seen)
        if new >= MIN_NEW_SHARE * sum(digests.values()) and new > 0:
            kept.append(document)
            seen.update(digests)
    return kept


def _digest(line: str) -> bytes:
    return blake2b(line.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def in_sections(documents: Iterable[Document], max_characters: int) -> Iterator[Document]:
    """Cut long documents at ends of paragraphs, otherwise lines, otherwise anywhere, to at most max_characters.

    Each section is then a document of its own: shuffled apart, they make every shard represent the whole text.
    """
    for document in documents:
        if len(document.text) <= max_characters:
            yield document
            continue
        start = 0
        while start < len(document.text):
            stop = _section_end(document.text, start, max_characters)
            yield Document(f"{document.name}#{start}", document.text[start:stop])
            start = stop


def _section_end(text: str, start: int, max_characters: int) -> int:
    limit = start + max_characters
    if limit >= len(text):
        return len(text)
    earliest = start + max_characters // 2
    for separator in ("\n\n", "\n", " "):
        found = text.rfind(separator, earliest, limit)
        if found >= 0:
            return found + len(separator)
    return limit


def shuffled(documents: Sequence[Document]) -> list[Document]:
    """Order the documents by SHA-256(name, text): the same order everywhere, unrelated to their origin."""
    return sorted(documents, key=_order_key)


def _order_key(document: Document) -> bytes:
    name = document.name.encode("utf-8", "surrogatepass")
    return sha256(len(name).to_bytes(8) + name + document.text.encode("utf-8", "surrogatepass")).digest()


MAX_TEXT_FILE_BYTES = 64 << 20
MAX_TEXT_BYTES = 512 << 20
MAX_TEXT_FILES = 200_000
_EXPECTED_CONTENT = "Add text files (*.txt, *.md, *.py and the like, UTF-8) to it, at least about 100 kB."


@dataclass(frozen=True)
class TextSize:
    """Number and total size of text files."""

    files: int
    bytes: int


class FolderText:
    """Documents from the text files of a folder and its subfolders, one per file, in order of their paths."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def name(self) -> str:
        return self._folder.resolve().name[:64] or "text"

    def fingerprint(self) -> str:
        """Return a hash over the names and contents of the files."""
        digest = sha256()
        for path in self._files():
            name = self._relative(path).encode("utf-8", "surrogatepass")
            content = sha256(self._read(path)).digest()
            digest.update(len(name).to_bytes(8) + name + content)
        return digest.hexdigest()

    def documents(self, progress: Fraction) -> list[Document]:
        """Return the files that contain text. Raises DataError when there are none, or too much for one build."""
        files = self._files()
        documents: list[Document] = []
        for done, path in enumerate(files):
            text = decode_text(self._read(path))
            if text is not None and text.strip():
                documents.append(Document(self._relative(path), text))
            progress((done + 1) / len(files))
        if not documents:
            raise DataError(f"There is no text in {self._folder}.", _EXPECTED_CONTENT)
        return documents

    def size(self) -> TextSize:
        """Count the text files, without reading them. Raises DataError when there are none, or too much."""
        files = self._files()
        return TextSize(len(files), sum(map(self._size, files)))

    def _files(self) -> list[Path]:
        if not self._folder.is_dir():
            raise DataError(f"{self._folder} is not a folder.", "Name a folder with text files in it.")
        found: list[Path] = []
        total = 0
        for parts in files_from(self._folder, TEXT_SUFFIXES):
            path = self._folder.joinpath(*parts)
            found.append(path)
            total += self._size(path)
            if total > MAX_TEXT_BYTES or len(found) > MAX_TEXT_FILES:
                raise DataError(
                    f"{self._folder} has more than {MAX_TEXT_BYTES >> 20} MB or {MAX_TEXT_FILES:,} files of text.",
                    "Name a smaller folder, or build with --config.",
                )
        if not found:
            raise DataError(f"There are no text files in {self._folder}.", _EXPECTED_CONTENT)
        return found

    def _size(self, path: Path) -> int:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise _unreadable(path, error) from error
        if size > MAX_TEXT_FILE_BYTES:
            raise DataError(
                f"{path} has {size >> 20} MB; at most {MAX_TEXT_FILE_BYTES >> 20} MB per file are read.", "Split it."
            )
        return size

    def _read(self, path: Path) -> bytes:
        try:
            with path.open("rb") as file:
                return file.read(MAX_TEXT_FILE_BYTES)  # the file may have grown since its size was checked
        except OSError as error:
            raise _unreadable(path, error) from error

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}.", "Make it readable or move it away.")


COLLECTION_VERSION = "1"  # raise it when the collected text changes
MAX_SOURCE_BYTES = 2_000_000
MIN_DOCSTRING_CHARACTERS = 40
MIN_DOCUMENT_CHARACTERS = 200
MIN_TEXT_CHARACTERS = 200_000
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test", "lib2to3", "turtledemo", "__pycache__"}
)
_TOPICS = Path("pydoc_data") / "topics.py"
# Kinds of objects whose docstring is plain data; reading others may run code (lazy or deprecated attributes).
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
    """Documents from a Python standard library: one per topic and one per module."""

    name = "python-documentation"

    def __init__(self, root: Path | None = None) -> None:
        """`root` is the folder of the standard library; by default that of the running Python."""
        self._root = root or Path(sysconfig.get_paths()["stdlib"])

    def fingerprint(self) -> str:
        """Return a hash over the Python version and the names and sizes of the files."""
        parts = [COLLECTION_VERSION, sys.version]
        parts += [f"{path.relative_to(self._root).as_posix()} {path.stat().st_size}" for path in self._files()]
        return sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()

    def documents(self, progress: Fraction) -> list[Document]:
        """Return topics first, then modules by name, without repeated docstrings."""
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
    """Return the syntax tree of a file; None for one that is not valid Python (templates, other versions)."""
    try:
        return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError):
        return None  # one missing module does no harm


def _topics(path: Path) -> Iterator[Document]:
    """Yield the entries of `topics = {name: text}` in pydoc_data without running it."""
    tree = _parse(path) if path.is_file() else None
    for node in tree.body if tree else []:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if not isinstance(value, ast.Dict):
            continue
        for key, text in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield Document(f"topic {key.value}", text.value.strip() + "\n")


def _module_document(name: str, tree: ast.Module | None, seen: set[str]) -> list[Document]:
    """Return a module's docstrings in order of appearance, each under its name; empty for a module with very few."""
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
    """Yield docstrings of the loaded standard modules, for an installation without source files."""
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
    """Yield the module's values and the members of its classes, without running any of their code."""
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
