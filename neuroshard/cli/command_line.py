"""Hides the wallet token from the process list as soon as the program starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_HIDDEN = "***"


def redacted(arguments: Sequence[str]) -> list[str]:
    """The command line as it may be seen by others: the value of --token replaced."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        if hide_next:
            shown.append(_HIDDEN)
            hide_next = False
        elif argument == "--token":
            shown.append(argument)
            hide_next = True
        elif argument.startswith("--token="):
            shown.append(f"--token={_HIDDEN}")
        else:
            shown.append(argument)
    return shown


def hide_token(arguments: Sequence[str]) -> None:
    """Overwrite the visible command line of this process when it carries a token."""
    shown = redacted(arguments)
    if shown != list(arguments):
        from setproctitle import setproctitle

        setproctitle(" ".join([Path(shown[0]).name, *shown[1:]]))
