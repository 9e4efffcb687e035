"""What a fuzz target is: a reader of strangers' bytes, with what must hold whatever they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parents[1] / "vectors"


@dataclass(frozen=True)
class Target:
    """A reader under test."""

    name: str
    check: Callable[[bytes], None]  # raises for a defect of the reader, never for bad bytes
    seeds: Callable[[], tuple[bytes, ...]]  # good and bad inputs to begin with


def golden(name: str) -> Any:
    """A file of golden vectors."""
    return json.loads((VECTORS / name).read_text("utf-8"))
