"""Which files hold plain text, and reading their bytes as text."""

from __future__ import annotations

import codecs

_TEXT_SUFFIXES = (
    ".txt .md .markdown .rst .tex .org .adoc .xml .html .htm .srt"
    " .py .pyi .js .ts .tsx .jsx .c .h .cc .cpp .hpp .cs .java .kt .go .rs .rb .php .swift .scala .sh .sql .lua .pl .r"
    " .css .toml .yaml .yml .ini .cfg"
)
TEXT_SUFFIXES = tuple(_TEXT_SUFFIXES.split())
_BINARY_PROBE_BYTES = 8_192


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
