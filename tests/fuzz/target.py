"""What a fuzz target is: a reader of strangers' bytes, with what must hold whatever they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VECTORS = Path(__file__).parents[1] / "vectors"
MODULES = (  # with a tuple TARGETS each; those that import most come last
    "tests.fuzz.wire_targets",
    "tests.fuzz.network_targets",
    "tests.fuzz.greeting_target",
    "tests.fuzz.record_targets",
    "tests.fuzz.statistics_targets",
    "tests.fuzz.message_targets",
    "tests.fuzz.stateful_targets",
    "tests.fuzz.stage_targets",
    "tests.fuzz.vector_targets",
)
SHORT_INPUTS = 1_500


@dataclass(frozen=True)
class Target:
    """A reader under test."""

    name: str
    check: Callable[[bytes], None]  # raises for a defect of the reader, never for bad bytes
    seeds: Callable[[], tuple[bytes, ...]]  # good and bad inputs to begin with
    max_memory_bytes: int = 2_000_000  # that one input may take at once, besides ten times its own size
    short_inputs: int = SHORT_INPUTS  # of the short run


def golden(name: str) -> Any:
    """A file of golden vectors."""
    return json.loads((VECTORS / name).read_text("utf-8"))
