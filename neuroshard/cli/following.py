"""Looks at a running node again and again, for `status --watch` and `logs -f`; both outlive a restart of the node."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

    from neuroshard.cli.client import NodeClient

FOLLOW_SECONDS = 1.0
MOST_LINES = 2_000  # in one answer; the node keeps no more
_WAITING = "The node does not answer; waiting for it."


class PatientClient:
    """The node of a data folder, looked for again while it does not answer: it may come back at another port."""

    def __init__(self, find: Callable[[], NodeClient]) -> None:
        """Raises what `find` does: a node must be there to begin with."""
        self._find = find
        self._client = find()
        self._process = self._current_process()
        self._answers = True
        self.restarts = 0  # seen so far

    def get(self, path: str) -> dict[str, Any] | None:
        """JSON of a GET; None while nobody answers. The first look at a process that was started anew counts it."""
        from neuroshard.errors import NeuroShardError

        try:
            if not self._answers:
                self._client = self._find()
                process = self._current_process()
                self.restarts += process != self._process
                self._process = process
            answer = self._client.get(path)
        except NeuroShardError:  # starting, stopping, gone, or with another secret than before
            self._answers = False
            return None
        self._answers = True
        return answer

    def _current_process(self) -> int | None:
        from neuroshard.training.checkpoint.lock import read_lock_owner

        owner = read_lock_owner(self._client.folder)
        return None if owner is None else owner.pid


def log_records(node: PatientClient, sleep: Callable[[float], None] = time.sleep) -> Iterator[Mapping[str, Any]]:
    """Every record once, for ever; of a node that was started anew from its first one on."""
    after, restarts, told = 0, 0, False
    while True:
        answer = node.get(f"/api/logs?after={after}&limit={MOST_LINES}")
        if answer is None:
            if not told:
                sys.stderr.write(f"{_WAITING}\n")
            told = True
            sleep(FOLLOW_SECONDS)
            continue
        told = False
        if node.restarts != restarts or answer["last_sequence"] < after:
            after, restarts = 0, node.restarts
            continue
        for record in answer["records"]:
            after = record["sequence"]
            yield record
        sleep(FOLLOW_SECONDS)


def watch(node: PatientClient, lines_of: Callable[[Mapping[str, Any]], list[str]]) -> None:
    """Show the status in place until Ctrl+C; what was seen last stays while the node does not answer."""
    from rich.console import Console
    from rich.live import Live

    seen: list[str] = []
    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            answer = node.get("/api/status")
            if answer is not None:
                seen = lines_of(answer)
            live.update(shown(seen, answers=answer is not None), refresh=True)
            time.sleep(FOLLOW_SECONDS)


def shown(lines: list[str], *, answers: bool) -> RenderableType:
    """A line a row, cut where the terminal ends; of a node that does not answer what it said last, and that first."""
    from rich.console import Group
    from rich.text import Text

    text = Text("\n".join(lines), style="" if answers else "dim", no_wrap=True, overflow="ellipsis")
    return text if answers else Group(Text(_WAITING, style="bold red"), text)
