"""The size of a benchmark: full, or tiny, which executes the same code within seconds and says nothing about speed."""

from __future__ import annotations

import os
from typing import TypeVar

# Read at import, like the constants that it decides. Processes that a benchmark starts inherit the variable.
IS_TINY = bool(os.environ.get("BENCHMARK_TINY"))
T = TypeVar("T")


def size(full: T, tiny: T) -> T:
    """Return the value for the size that `python -m benchmarks` was asked for."""
    return tiny if IS_TINY else full
