"""How many bytes this computer has sent and received in the present calendar month; lies in the data folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from neuroshard.config.atomic_write import write_atomically

LEDGER_FILE = "transfer.json"
MAX_LEDGER_BYTES = 10_000


class TransferLedger:
    """Adds up what parts of the node have counted since their start. No clock: the month is an argument."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LEDGER_FILE
        self._month: str = ""
        self._bytes: int = 0
        self._month, self._bytes = _read(self._file)
        self._counted: int = 0
        self._saved: int = self._bytes

    @property
    def is_saved(self) -> bool:
        """Whether a kill would lose nothing."""
        return self._saved == self._bytes

    def note(self, total: int, month: str) -> int:
        """`total` bytes were moved since the start, the newest of them in this month ("2026-11"); the month's bytes."""
        if month != self._month:
            self._month, self._bytes, self._saved = month, 0, -1
        self._bytes += max(0, total - self._counted)
        self._counted = max(total, self._counted)
        return self._bytes

    def save(self) -> None:
        """Write what was noted. Raises OSError."""
        month, moved = self._month, self._bytes
        write_atomically(self._file, json.dumps({"month": month, "bytes": moved}).encode())
        self._saved = moved


def _read(file: Path) -> tuple[str, int]:
    """A file that is not there, or says nothing, counts from now on."""
    try:
        with file.open("rb") as stream:
            content: object = json.loads(stream.read(MAX_LEDGER_BYTES))
    except (OSError, ValueError):
        return "", 0
    table = cast("dict[str, object]", content) if isinstance(content, dict) else {}
    month, moved = table.get("month"), table.get("bytes")
    if not isinstance(month, str) or type(moved) is not int or moved < 0:
        return "", 0
    return month, moved
