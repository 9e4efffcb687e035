"""What a computer remembers of manifests: when it asked last, and the newest it saw. In the data folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from neuroshard.config.atomic_write import write_atomically
from neuroshard.errors import StorageError
from neuroshard.update.judgement import Seen
from neuroshard.update.manifest import version_number

FILE_NAME = "update.json"
MAX_FILE_BYTES = 4096
DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class UpdateMemory:
    """Times in seconds since the epoch."""

    asked_at: float = 0.0
    seen: Seen = field(default_factory=Seen)
    available: str = ""  # the version that was offered to this computer then

    def is_due(self, now: float) -> bool:
        """Whether the publisher may be asked again: once a day; a clock that was ahead delays it by a day at most."""
        return not 0 <= now - self.asked_at < DAY_SECONDS


def load_memory(data_dir: Path) -> UpdateMemory:
    """What stands in the folder; nothing readable there counts as nothing seen."""
    try:
        with (data_dir / FILE_NAME).open("rb") as file:
            value: Any = json.loads(file.read(MAX_FILE_BYTES))
        seen = Seen(str(value["seen"]["version"]), float(value["seen"]["issued_at"]))
        version_number(seen.version)
        available = str(value["available"])
        if available:
            version_number(available)
        return UpdateMemory(float(value["asked_at"]), seen, available)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return UpdateMemory()


def save_memory(data_dir: Path, memory: UpdateMemory) -> None:
    """Store it. Raises StorageError."""
    path = data_dir / FILE_NAME
    try:
        write_atomically(path, json.dumps(asdict(memory)).encode())
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}.", "Free or repair the data folder.") from error
