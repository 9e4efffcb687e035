"""Tells of a newer version where the owner asked for that (`update_check`); installing it stays a command of theirs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import anyio

from neuroshard import __version__
from neuroshard.config.settings import Settings
from neuroshard.errors import NeuroShardError
from neuroshard.node.publisher import Publisher
from neuroshard.update.checking import daily_notice

log = logging.getLogger(__name__)

LOOK_SECONDS = 3600.0  # asks only when the last time was a day ago


async def watch_for_updates(
    settings: Settings, publisher: Publisher, wall_clock: Callable[[], float] = time.time
) -> None:
    """Run until cancelled. A publisher that does not answer is a line in the log, nothing more."""
    while True:
        try:
            told = await daily_notice(settings, __version__, wall_clock())
        except NeuroShardError as error:
            log.info("No newer version could be looked for: %s", error)
        else:
            if told:
                publisher.warn(told)
        await anyio.sleep(LOOK_SECONDS)
