from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuroshard.dataset import Document, FolderText, StandardLibraryText
from neuroshard.dataset.build_text import in_sections, shuffled, without_repeats
from neuroshard.dataset.file_source import decode_text
from neuroshard.errors import DataError

PROSE = "The quick brown fox jumps over the lazy dog.\nPack my box with five dozen liquor jugs.\n"


def silent(_: float) -> None:
    """Progress nobody looks at."""


def write(path: Path, data: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def test_near_duplicates_are_dropped_and_the_first_stays() -> None:
    original = Document("a", PROSE + "And a third line that is only here.\n")
    changed = Document("b", PROSE + "  And a third line that was edited.\n")
    other = Document("c", "Something else entirely stands in this longer new line.\n" + PROSE.splitlines()[0] + "\n")
    assert without_repeats([original, changed, other]) == [original, other]
    assert without_repeats([other, original, changed]) == [other, original]


def test_short_documents_are_compared_whole() -> None:
    documents = [Document("a", "one\ntwo\n"), Document("b", "one\ntwo\n"), Document("c", "one\nthree\n")]
    assert [document.name for document in without_repeats(documents)] == ["a", "c"]


@given(st.lists(st.text(alphabet="ab \n", max_size=300)), st.integers(4, 80))
def test_sections_join_to_the_text_and_fit(texts: list[str], limit: int) -> None:
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    sections = list(in_sections(documents, limit))
    assert "".join(section.text for section in sections) == "".join(texts)
    assert all(len(section.text) <= limit for section in sections)
    assert len({section.name for section in sections}) == len(sections)


def test_sections_end_at_paragraphs() -> None:
    text = ("word " * 10 + "\n\n") * 10
    sections = list(in_sections([Document("a", text)], 120))
    assert all(section.text.endswith("\n\n") for section in sections)


@given(st.permutations([Document(str(i), f"text {i}") for i in range(8)]))
def test_the_order_depends_on_the_documents_alone(documents: list[Document]) -> None:
    assert shuffled(documents) == shuffled(sorted(documents, key=lambda document: document.name))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"plain\r\ntext\r", "plain\ntext\n"),
        (b"\xef\xbb\xbfmarked", "marked"),
        ("\u00e9\U0001f600".encode(), "\u00e9\U0001f600"),
        ("wide \u00e9".encode("utf-16"), "wide \u00e9"),
        (b"caf\xe9 \x93quoted\x94 \x81", "caf\u00e9 \u201cquoted\u201d \ufffd"),
        (b"\x7fELF\x00\x01", None),
        (b"", ""),
    ],
)
def test_the_decoding_policy(data: bytes, text: str | None) -> None:
    assert decode_text(data) == text


@given(st.binary(max_size=50))
def test_any_file_decodes_or_is_binary(data: bytes) -> None:
    text = decode_text(data)
    assert text is None or "\r" not in text


def test_a_folder_gives_its_text_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "second")
    write(tmp_path / "a" / "deep.MD", "first")
    write(tmp_path / "image.png", b"\x89PNG")
    write(tmp_path / "binary.txt", b"a\0b")
    write(tmp_path / "blank.txt", " \n")
    write(tmp_path / ".git" / "config.txt", "hidden folder")
    write(tmp_path / ".env.txt", "hidden file")
    write(tmp_path / "node_modules" / "x.js", "not the user's own")
    source = FolderText(tmp_path)
    assert source.documents(silent) == [Document("a/deep.MD", "first"), Document("b.txt", "second")]
    assert source.name == tmp_path.name


def test_a_genesis_folder_inside_is_not_text(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "text")
    before = FolderText(tmp_path).fingerprint()
    write(tmp_path / "genesis" / "build.json", "{}")
    write(tmp_path / "genesis" / "pages" / "x.txt", "made")
    write(tmp_path / "genesis.unfinished" / "x.txt", "made")
    assert FolderText(tmp_path).fingerprint() == before


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "outside" / "secret.txt", "secret")
    write(tmp_path / "inside" / "open.txt", "open")
    (tmp_path / "inside" / "link.txt").symlink_to(tmp_path / "outside" / "secret.txt")
    (tmp_path / "inside" / "folder").symlink_to(tmp_path / "outside")
    (tmp_path / "inside" / "loop").symlink_to(tmp_path / "inside")
    assert FolderText(tmp_path / "inside").documents(silent) == [Document("open.txt", "open")]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "open.txt", "open")
    os.mkfifo(tmp_path / "pipe.txt")
    assert FolderText(tmp_path).documents(silent) == [Document("open.txt", "open")]


def test_an_edit_changes_the_fingerprint_and_a_copy_does_not(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write(tmp_path / name / "a.txt", "text")
    before = FolderText(tmp_path / "one").fingerprint()
    assert FolderText(tmp_path / "two").fingerprint() == before
    write(tmp_path / "one" / "a.txt", "tixt")
    assert FolderText(tmp_path / "one").fingerprint() != before


def test_a_folder_without_text_is_told_what_is_expected(tmp_path: Path) -> None:
    for source in (FolderText(tmp_path), FolderText(tmp_path / "missing")):
        with pytest.raises(DataError, match=r"text files"):
            source.documents(silent)
    write(tmp_path / "blank.txt", "\n")
    with pytest.raises(DataError, match=r"\*\.txt"):
        FolderText(tmp_path).documents(silent)


def test_python_documentation_is_collected_without_importing(tmp_path: Path) -> None:
    docs = '"""A module that does one thing and says so at length."""\n' + "raise SystemExit\n"
    body = 'class Thing:\n    """A thing with a description of some length, more than a line."""\n\n'
    method = '    def act(self, n: int = 3):\n        """Act on the thing, n times over; return how often it did."""\n'
    write(tmp_path / "pkg" / "__init__.py", docs + body + method + "\nX = '" + "y" * 10 + "'\n")
    write(tmp_path / "pkg" / "twin.py", docs + body + method)
    write(tmp_path / "broken.py", "def (:\n")
    write(tmp_path / "test" / "test_x.py", '"""' + "Tests are not documentation. " * 20 + '"""')
    write(tmp_path / "pydoc_data" / "topics.py", "topics = {'assert': 'The assert statement.\\n', 'x': 1 + 1}\n")
    documents = {document.name: document.text for document in StandardLibraryText(tmp_path).documents(silent)}
    assert documents["topic assert"] == "The assert statement.\n"
    assert "Thing.act(self, n: int=3)\nAct on the thing" in documents["pkg"]
    assert "pkg.twin" not in documents  # every docstring of it occurred before
    assert not any(name.startswith("test") for name in documents)


def test_without_source_files_what_is_loaded_stands_in(tmp_path: Path) -> None:
    documents = StandardLibraryText(tmp_path).documents(silent)
    assert sum(len(document.text) for document in documents) > 200_000
    assert any(document.name == "loaded builtins" for document in documents)


def test_this_python_has_enough_documentation() -> None:
    source = StandardLibraryText()
    documents = source.documents(silent)
    assert sum(len(document.text) for document in documents) > 1_000_000
    assert documents == source.documents(silent)
    assert source.fingerprint() == StandardLibraryText().fingerprint()
