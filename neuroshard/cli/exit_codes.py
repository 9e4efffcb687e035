"""The one table from errors to exit codes, and how an error is told on a terminal."""

from __future__ import annotations

import sys

from neuroshard.errors import DataError, NetworkRefusedError, NeuroShardError, StorageError, TokenError, UsageError

OK = 0
INTERNAL_ERROR = 1

# The first class that matches decides.
_EXIT_CODES: tuple[tuple[type[NeuroShardError], int], ...] = (
    (UsageError, 2),
    (TokenError, 3),
    (NetworkRefusedError, 4),
    (StorageError, 5),
    (DataError, 6),
)


def exit_code(error: NeuroShardError) -> int:
    """Exit code of an error; 1 for errors that have no row of their own."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), INTERNAL_ERROR)


def tell(error: NeuroShardError) -> None:
    """Print what happened and what to do about it to standard error."""
    sys.stderr.write(f"neuroshard: {error.message}\n")
    if error.action:
        sys.stderr.write(f"  {error.action}\n")
