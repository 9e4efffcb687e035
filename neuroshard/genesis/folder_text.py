"""The user's own text files as documents. Only reads; follows no symbolic link and enters no hidden folder."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from neuroshard.errors import DataError
from neuroshard.genesis.documents import Document, Fraction
from neuroshard.genesis.plain_text import TEXT_SUFFIXES, decode_text
from neuroshard.genesis.sources.file_tree import files_from

MAX_FILE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 512 << 20
MAX_FILES = 200_000
EXPECTED = "Put text files (*.txt, *.md, *.py and the like, UTF-8) into it; about 100 kB is the least."


class FolderText:
    """Documents from the text files of a folder and its subfolders, one a file, in order of their paths."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self._folder.resolve().name[:64] or "text"

    def fingerprint(self) -> str:
        """Hash over the names and contents of the files."""
        digest = sha256()
        for path in self._files():
            name = self._relative(path).encode("utf-8", "surrogatepass")
            content = sha256(self._read(path)).digest()
            digest.update(len(name).to_bytes(8) + name + content)
        return digest.hexdigest()

    def documents(self, progress: Fraction) -> list[Document]:
        """The files that hold text. Raises DataError when there are none, or too much for one build."""
        files = self._files()
        documents: list[Document] = []
        for done, path in enumerate(files):
            text = decode_text(self._read(path))
            if text is not None and text.strip():
                documents.append(Document(self._relative(path), text))
            progress((done + 1) / len(files))
        if not documents:
            raise DataError(f"There is no text in {self._folder}.", EXPECTED)
        return documents

    def _files(self) -> list[Path]:
        if not self._folder.is_dir():
            raise DataError(f"{self._folder} is not a folder.", "Name a folder with text files in it.")
        found: list[Path] = []
        total = 0
        for parts in files_from(self._folder, TEXT_SUFFIXES):
            path = self._folder.joinpath(*parts)
            found.append(path)
            total += self._size(path)
            if total > MAX_TOTAL_BYTES or len(found) > MAX_FILES:
                raise DataError(
                    f"{self._folder} has more than {MAX_TOTAL_BYTES >> 20} MB or {MAX_FILES:,} files of text.",
                    "Name a smaller folder, or build with --config.",
                )
        if not found:
            raise DataError(f"There are no text files in {self._folder}.", EXPECTED)
        return found

    def _size(self, path: Path) -> int:
        try:
            size = path.stat().st_size
        except OSError as error:
            raise _unreadable(path, error) from error
        if size > MAX_FILE_BYTES:
            raise DataError(
                f"{path} has {size >> 20} MB; at most {MAX_FILE_BYTES >> 20} MB a file are read.", "Split it."
            )
        return size

    def _read(self, path: Path) -> bytes:
        try:
            with path.open("rb") as file:
                return file.read(MAX_FILE_BYTES)  # it may have grown since its size was checked
        except OSError as error:
            raise _unreadable(path, error) from error

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}.", "Make it readable or move it away.")
