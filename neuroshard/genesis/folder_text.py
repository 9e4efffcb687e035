"""The user's own text files as documents. Only reads; follows no symbolic link and enters no hidden folder."""

from __future__ import annotations

import codecs
import os
import stat
from hashlib import sha256
from pathlib import Path

from neuroshard.errors import DataError
from neuroshard.genesis.documents import Document, Fraction
from neuroshard.genesis.report import REPORT_NAME, UNFINISHED_SUFFIX

_TEXT_SUFFIXES = (
    ".txt .md .markdown .rst .tex .org .adoc .xml .html .htm .srt"
    " .py .pyi .js .ts .tsx .jsx .c .h .cc .cpp .hpp .cs .java .kt .go .rs .rb .php .swift .scala .sh .sql .lua .pl .r"
    " .css .toml .yaml .yml .ini .cfg"
)
TEXT_SUFFIXES = frozenset(_TEXT_SUFFIXES.split())
MAX_FILE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 512 << 20
MAX_FILES = 200_000
_SKIPPED_FOLDERS = frozenset({"node_modules", "__pycache__", "venv"})
_BINARY_PROBE_BYTES = 8_192
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
        for folder, subfolders, names in os.walk(self._folder):
            if REPORT_NAME in names or folder.endswith(UNFINISHED_SUFFIX):
                subfolders.clear()  # a Genesis folder built in here is not text
                continue
            subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith(".")]
            for name in names:
                path = Path(folder) / name
                if name.startswith(".") or path.suffix.lower() not in TEXT_SUFFIXES or path.is_symlink():
                    continue
                size = self._size(path)
                if size is None:
                    continue
                found.append(path)
                total += size
                if total > MAX_TOTAL_BYTES or len(found) > MAX_FILES:
                    raise DataError(
                        f"{self._folder} has more than {MAX_TOTAL_BYTES >> 20} MB or {MAX_FILES:,} files of text.",
                        "Name a smaller folder.",
                    )
        if not found:
            raise DataError(f"There are no text files in {self._folder}.", EXPECTED)
        return sorted(found)

    def _size(self, path: Path) -> int | None:
        """Bytes of a regular file; None for a pipe or device, whose reading might never end."""
        try:
            status = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from error
        if not stat.S_ISREG(status.st_mode):
            return None
        size = status.st_size
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


def decode_text(data: bytes) -> str | None:
    """Text of a file: UTF-16 with a byte order mark, else UTF-8, else Windows-1252; None for a binary file.

    A file with a zero byte near its start is binary. Bytes that Windows-1252 does not define become U+FFFD. Line ends
    become \\n.
    """
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = data.decode("utf-16", "replace")
    elif b"\0" in data[:_BINARY_PROBE_BYTES]:
        return None
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = data.decode("cp1252", "replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror or error}.", "Make it readable or move it away.")
