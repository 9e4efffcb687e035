"""The one table from outcomes to exit codes, and how an error is told on a terminal."""

from __future__ import annotations

import sys
from enum import IntEnum

from neuroshard.errors import (
    DataError,
    NetworkRefusedError,
    NeuroShardError,
    StoppedError,
    StorageError,
    TokenError,
    UsageError,
)


class ExitCode(IntEnum):
    """What a script can tell from the end of a command; README.md says it in full."""

    CLEAN = 0
    REFUSED = 1  # by the running node; a finding of `doctor`; and whatever has no code of its own
    USAGE = 2
    TOKEN = 3
    NETWORK = 4
    STORAGE = 5
    DATA = 6
    STOPPED = 130  # as shells have it for Ctrl+C


# The first class that matches decides.
_EXIT_CODES: tuple[tuple[type[NeuroShardError], ExitCode], ...] = (
    (UsageError, ExitCode.USAGE),
    (TokenError, ExitCode.TOKEN),
    (NetworkRefusedError, ExitCode.NETWORK),
    (StorageError, ExitCode.STORAGE),
    (DataError, ExitCode.DATA),
    (StoppedError, ExitCode.STOPPED),
)


def exit_code(error: NeuroShardError) -> ExitCode:
    """Exit code of an error."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), ExitCode.REFUSED)


def exit_codes_line() -> str:
    """All codes in short."""
    return f"Exit codes: {', '.join(f'{code.value} {code.name.lower()}' for code in ExitCode)}."


def tell(error: NeuroShardError) -> None:
    """Print what happened and what to do about it to standard error."""
    sys.stderr.write(f"neuroshard: {error.message}\n")
    if error.action:
        sys.stderr.write(f"  {error.action}\n")
