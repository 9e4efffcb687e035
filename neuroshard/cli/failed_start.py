"""A start that fails where nobody sees a terminal: when what is to be done is shown in the browser as well."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from neuroshard.errors import NeuroShardError

_LOG = logging.getLogger(__name__)

SAYS_NO = frozenset({"0", "false", "no", "off", "f", "n"})


@contextmanager
def shown_at_a_desktop(flags: Mapping[str, object], *, ends_with_stdin: bool = False) -> Generator[None]:
    """What ends this block early is shown in the browser too, when a menu has started this process; it rises on."""
    try:
        yield
    except Exception as error:
        if not ends_with_stdin:
            _show(error, flags)
        raise


def _show(error: Exception, flags: Mapping[str, object]) -> None:
    """Show it where somebody sees that; a computer that cannot (no socket, no thread, no stream) does not hide it."""
    try:
        if _may_show(flags, os.environ):
            from neuroshard.cli.failure_page import failure_page, give_out
            from neuroshard.node.desktop import open_browser_at

            give_out(failure_page(error, _folder(flags)).encode(), open_browser_at)
    except (OSError, ValueError, RuntimeError) as hindrance:
        _LOG.warning("What has failed cannot be shown in the browser: %s", hindrance)


def _may_show(flags: Mapping[str, object], environment: Mapping[str, str]) -> bool:
    """Whether somebody sits there, reads no terminal, and has not asked for no pages; a broken file asks nothing."""
    from neuroshard.node.desktop import can_show_pages, has_terminal, is_over_ssh

    chosen = flags.get("browser", environment.get("NEUROSHARD_BROWSER"))
    if chosen is None:
        chosen = _stored_choice(_folder(flags))
    if str(chosen).strip().lower() in SAYS_NO or is_over_ssh(environment):
        return False
    return can_show_pages() and not has_terminal()


def _stored_choice(data_dir: Path | None) -> object:
    from neuroshard.config.data_dir import NodePaths
    from neuroshard.config.loading import read_config

    try:
        return None if data_dir is None else read_config(NodePaths.below(data_dir).config_file).get("browser")
    except NeuroShardError:
        return None


def _folder(flags: Mapping[str, object]) -> Path | None:
    """The node's data folder; None when that is what is wrong."""
    from neuroshard.config.loading import resolve_data_dir

    named = flags.get("data_dir")
    try:
        return resolve_data_dir(named if isinstance(named, Path) else None)
    except NeuroShardError:
        return None
