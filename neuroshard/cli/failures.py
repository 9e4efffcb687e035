"""Failures of a command: exit codes, the text on the terminal, and a browser page if there is no terminal."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from neuroshard.errors import (
    DataError,
    NetworkRefusedError,
    NeuroShardError,
    SiteRestartError,
    StoppedError,
    StorageError,
    TokenError,
    UsageError,
)


class ExitCode(IntEnum):
    """Exit code of a command; README.md describes each of them."""

    CLEAN = 0
    REFUSED = 1  # refused by the running node, a problem found by `doctor`, or an error without a code of its own
    USAGE = 2
    TOKEN = 3
    NETWORK = 4
    STORAGE = 5
    DATA = 6
    RESTART = 7  # the launcher must start all ranks of the site again
    STOPPED = 130  # as shells report Ctrl+C


# The first class that matches decides.
_EXIT_CODES: tuple[tuple[type[NeuroShardError], ExitCode], ...] = (
    (UsageError, ExitCode.USAGE),
    (TokenError, ExitCode.TOKEN),
    (NetworkRefusedError, ExitCode.NETWORK),
    (StorageError, ExitCode.STORAGE),
    (DataError, ExitCode.DATA),
    (SiteRestartError, ExitCode.RESTART),
    (StoppedError, ExitCode.STOPPED),
)


def exit_code(error: NeuroShardError) -> ExitCode:
    """Find the exit code for an error's class."""
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), ExitCode.REFUSED)


def exit_codes_line() -> str:
    """List all exit codes on one line, for the help text."""
    return f"Exit codes: {', '.join(f'{code.value} {code.name.lower()}' for code in ExitCode)}."


def print_error(error: NeuroShardError) -> None:
    """Print what happened and what to do about it to standard error."""
    sys.stderr.write(f"neuroshard: {error.message}\n")
    if error.action:
        sys.stderr.write(f"  {error.action}\n")


_LOG = logging.getLogger(__name__)

SAYS_NO = frozenset({"0", "false", "no", "off", "f", "n"})


@contextmanager
def show_failure_on_desktop(flags: Mapping[str, object], *, ends_with_stdin: bool = False) -> Generator[None]:
    """If an error ends this block and there is no terminal, show it in the browser; then raise it again."""
    try:
        yield
    except Exception as error:
        if not ends_with_stdin:
            _show(error, flags)
        raise


def _show(error: Exception, flags: Mapping[str, object]) -> None:
    """Show the error in the browser. A failure to show it is only logged, so that the original error still rises."""
    try:
        if _may_show(flags, os.environ):
            from neuroshard.cli.failure_page import failure_page, serve_once
            from neuroshard.host.desktop import open_browser_at

            serve_once(failure_page(error, _folder(flags)).encode(), open_browser_at)
    except (OSError, ValueError, RuntimeError) as hindrance:
        _LOG.warning("The browser cannot show the failure: %s", hindrance)


def _may_show(flags: Mapping[str, object], environment: Mapping[str, str]) -> bool:
    """Whether a desktop user without a terminal can see a page and has not disabled the browser.

    An unreadable config.toml does not disable it.
    """
    from neuroshard.host.desktop import can_show_pages, has_terminal, is_over_ssh

    chosen = flags.get("browser", environment.get("NEUROSHARD_BROWSER"))
    if chosen is None:
        chosen = _stored_choice(_folder(flags))
    if str(chosen).strip().lower() in SAYS_NO or is_over_ssh(environment):
        return False
    return can_show_pages() and not has_terminal()


def _stored_choice(data_dir: Path | None) -> object:
    from neuroshard.config.folders import NodePaths
    from neuroshard.config.loading import read_config

    try:
        return None if data_dir is None else read_config(NodePaths.below(data_dir).config_file).get("browser")
    except NeuroShardError:
        return None


def _folder(flags: Mapping[str, object]) -> Path | None:
    """The node's data folder; None if it is the cause of the error."""
    from neuroshard.config.loading import resolve_data_dir

    named = flags.get("data_dir")
    try:
        return resolve_data_dir(named if isinstance(named, Path) else None)
    except NeuroShardError:
        return None
