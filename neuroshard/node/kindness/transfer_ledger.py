"""How many bytes this computer has sent and received in the present calendar month; lies in the data folder."""

from __future__ import annotations

import json
from pathlib import Path

from neuroshard.config.state_file import set_damaged_aside, write_atomically
from neuroshard.identity.strict_json import parse_json
from neuroshard.types import JsonValue

LEDGER_FILE = "transfer.json"
MAX_LEDGER_BYTES = 10_000


class TransferLedger:
    """Adds up what parts of the node have counted since their start. No clock: the month is an argument."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / LEDGER_FILE
        self._month: str
        self._bytes: int
        self.warnings: tuple[str, ...]
        self._month, self._bytes, self.warnings = _read(self._file)
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


def _read(file: Path) -> tuple[str, int, tuple[str, ...]]:
    """Month, bytes and warnings. A file that is not there counts from now on; one that cannot be read is put aside."""
    try:
        with file.open("rb") as stream:
            month, moved = _counted(parse_json(stream.read(MAX_LEDGER_BYTES + 1), MAX_LEDGER_BYTES))
    except FileNotFoundError:
        return "", 0, ()
    except (OSError, ValueError) as error:
        return "", 0, (set_damaged_aside(file, str(error), "this month's transfer is counted from now on"),)
    return month, moved, ()


def _counted(content: JsonValue) -> tuple[str, int]:
    match content:
        case {"month": str() as month, "bytes": int() as moved} if not isinstance(moved, bool) and moved >= 0:
            return month, moved
        case _:
            raise ValueError("it names no month and bytes")
