"""What people asked for survives a restart: a pause lies in the data folder until it ends."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import cast

from neuroshard.config.state_file import write_atomically
from neuroshard.errors import StorageError
from neuroshard.identity.strict_json import parse_json
from neuroshard.pipeline.control import PAUSED_BY_USER, RequestedPause, TimedPause

PAUSE_FILE = "pause.json"
MAX_PAUSE_BYTES = 10_000


def keep_pause(folder: Path, asked: TimedPause | None) -> None:
    """Store what was asked for, for the next start; None: nothing is. Raises StorageError."""
    file = folder / PAUSE_FILE
    try:
        if asked is None:
            file.unlink(missing_ok=True)
        else:
            write_atomically(file, json.dumps({"begun": time.time(), "until": asked.until}).encode())
    except OSError as error:
        raise StorageError(
            f"This does not survive a restart: {file} cannot be written ({error.strerror}).", "Look at the disk."
        ) from error


def restore_pause(wish: RequestedPause, folder: Path) -> tuple[str, ...]:
    """Ask for the pause of an earlier start again, unless it is over; warnings.

    One that cannot be read any more has no end: whoever asked for it did not want training to begin by itself.
    """
    file = folder / PAUSE_FILE
    try:
        begun, until = read_pause(file)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        wish.begin(PAUSED_BY_USER)
        return (f"{file} is damaged ({error}): the node stays paused until it is resumed.",)
    wish.renew_request(PAUSED_BY_USER, begun, until)
    return ()


def read_pause(file: Path) -> tuple[float, float | None]:
    """When it began and when it ends (None: not by itself), in seconds since the epoch. Raises OSError, ValueError."""
    with file.open("rb") as stream:
        content = parse_json(stream.read(MAX_PAUSE_BYTES + 1), MAX_PAUSE_BYTES)
    match content:
        case {"begun": begun, "until": until, **_others} if _is_time(begun) and (until is None or _is_time(until)):
            return float(cast("float", begun)), None if until is None else float(cast("float", until))
        case _:
            raise ValueError("it has other members")


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e12
