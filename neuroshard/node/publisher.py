"""The single writer of the status board: changes parts of the snapshot and publishes the whole."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from neuroshard.errors import NeuroShardError
from neuroshard.status.board import StatusBoard
from neuroshard.status.snapshot import NodeState, StartupStep, StartupStepState

log = logging.getLogger(__name__)


class Publisher:
    """Owned by the thread that runs the node's tasks; nobody else publishes."""

    def __init__(self, board: StatusBoard, wall_clock: Callable[[], float] = time.time) -> None:
        self._board = board
        self._wall_clock = wall_clock

    def change(self, **parts: Any) -> None:
        """Publish the current snapshot with these fields of NodeStatus replaced."""
        now = {"time": self._wall_clock(), "uptime_seconds": self._board.uptime()}
        self._board.publish(replace(self._board.current(), **now, **parts))

    def state(self, state: NodeState, reason: str) -> None:
        """Publish what the node does now and why, in one sentence."""
        self.change(state=state, state_reason=reason, is_standing_by=False)

    def warn(self, *messages: str) -> None:
        """Add warnings that stay visible, and log them; each text once."""
        known = self._board.current().warnings
        for message in dict.fromkeys(messages):
            if message not in known:
                log.warning("%s", message)
        self.change(warnings=tuple(dict.fromkeys((*known, *messages))))


class StartupProgress:
    """The stages of the start-up, as the dashboard shows them."""

    def __init__(self, publisher: Publisher, names: tuple[str, ...]) -> None:
        self._publisher = publisher
        self._stages = {name: StartupStep(name) for name in names}
        self._show()

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Mark a stage as running for the duration of the block, then as done or failed."""
        self.tell(name, "")
        self._publisher.state(NodeState.STARTING, f"{name} ...")
        try:
            yield
        except NeuroShardError as error:
            self._set(replace(self._stages[name], state=StartupStepState.FAILED, detail=str(error)))
            raise
        self._set(replace(self._stages[name], state=StartupStepState.DONE, fraction=None))
        going_on = next((stage for stage in self._stages.values() if stage.state is StartupStepState.RUNNING), None)
        if going_on is not None:
            self._publisher.state(NodeState.STARTING, going_on.detail or f"{going_on.name} ...")

    def tell(self, name: str, detail: str, fraction: float | None = None) -> None:
        """Show how far a running stage is; fraction in 0..1."""
        self._set(replace(self._stages[name], state=StartupStepState.RUNNING, detail=detail, fraction=fraction))

    def complete(self) -> None:
        """Everything works: all stages are done."""
        if any(stage.state is not StartupStepState.DONE for stage in self._stages.values()):
            done = StartupStepState.DONE
            self._stages = {name: replace(stage, state=done) for name, stage in self._stages.items()}
            self._show()

    def _set(self, stage: StartupStep) -> None:
        self._stages[stage.name] = stage
        self._show()

    def _show(self) -> None:
        self._publisher.change(startup=tuple(self._stages.values()))
