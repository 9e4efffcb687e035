"""The status board: one writer changes parts of the snapshot and publishes the whole; readers take the newest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import Empty, Full, Queue
from threading import Event, Lock
from typing import Any, TypeAlias

from neuroshard.errors import NeuroShardError, NotReadyError
from neuroshard.status.snapshot import NodeState, NodeStatus, StartupStep, StartupStepState
from neuroshard.types import JsonValue


class StatusBoard:
    """Holds the current immutable NodeStatus with a version number that grows at every publication."""

    def __init__(self, initial: NodeStatus, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lock = Lock()
        self._current = (1, initial)
        self._monotonic = monotonic
        self._started = monotonic() - initial.uptime_seconds

    def publish(self, status: NodeStatus) -> None:
        """Replace the current snapshot."""
        with self._lock:
            self._current = (self._current[0] + 1, status)

    def uptime(self) -> float:
        """Seconds since the node started, whatever becomes of the computer's date."""
        return self._monotonic() - self._started

    def age(self) -> float:
        """Seconds since the newest snapshot."""
        return max(0.0, self.uptime() - self.current().uptime_seconds)

    def current(self) -> NodeStatus:
        """The newest snapshot."""
        return self._current[1]

    def versioned(self) -> tuple[int, NodeStatus]:
        """The newest snapshot with its version: equal versions mean the identical object."""
        return self._current


@dataclass(frozen=True)
class Pause:
    """Stop training and free the accelerator; for `duration_seconds`, or until Resume when None."""

    duration_seconds: float | None = None


@dataclass(frozen=True)
class Resume:
    """Go on training after a Pause."""


@dataclass(frozen=True)
class SaveCheckpoint:
    """Write a checkpoint now, whatever the schedule says."""


@dataclass(frozen=True)
class Shutdown:
    """Save a final checkpoint and end the process with exit code 0."""

    reason: str


@dataclass(frozen=True)
class UpdateSettings:
    """Change settings of this node; they are stored in config.toml."""

    changes: Mapping[str, JsonValue]


@dataclass(frozen=True)
class GeneratedText:
    """A piece of a completion. The last piece has a finish reason: "stop" or "length"."""

    text: str
    completion_tokens: int  # real tokens so far, this piece included
    finish_reason: str | None = None


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with the model in training. The answer of the command is GenerationSummary.

    `sink` is called from a foreign thread for every piece and must not block; setting `cancelled` ends the
    generation early.
    """

    prompt: str
    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    seed: int | None
    sink: Callable[[GeneratedText], None]
    cancelled: Event


@dataclass(frozen=True)
class CommandResult:
    """What a command led to: the state afterwards and a sentence for the user."""

    state: str
    message: str
    details: Mapping[str, JsonValue] | None = None


@dataclass(frozen=True)
class GenerationSummary:
    """Usage counts of a finished completion, in real tokens."""

    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    truncated_prompt_tokens: int = 0  # left out at the beginning of a prompt longer than the context


Command: TypeAlias = "Pause | Resume | SaveCheckpoint | Shutdown | UpdateSettings | Generate"
CommandAnswer: TypeAlias = "CommandResult | GenerationSummary"


class CommandChannel:
    """Bounded queue of commands from API threads to the node, each with a future for its answer."""

    def __init__(self, capacity: int = 64) -> None:
        self._queue: Queue[tuple[Command, Future[CommandAnswer]]] = Queue(capacity)
        self._tell: Callable[[], object] = _nobody

    def listen(self, tell: Callable[[], object]) -> None:
        """Call this, on the sender's thread, for every command from now on."""
        self._tell = tell

    def send(self, command: Command) -> Future[CommandAnswer]:
        """Queue a command. Raises NotReadyError when the node does not keep up with its queue."""
        answer: Future[CommandAnswer] = Future()
        try:
            self._queue.put_nowait((command, answer))
        except Full as full:
            raise NotReadyError("The node has too many commands waiting.", "Try again in a few seconds.") from full
        self._tell()
        return answer

    def take(self) -> tuple[Command, Future[CommandAnswer]] | None:
        """The oldest waiting command, or None; never blocks."""
        try:
            return self._queue.get_nowait()
        except Empty:
            return None


def _nobody() -> None:
    """Nobody listens."""


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
