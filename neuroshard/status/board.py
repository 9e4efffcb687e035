"""The board that publishes the node's snapshot to every thread, and the channel that carries users' commands back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, Full, Queue
from threading import Event, Lock
from typing import TypeAlias

from neuroshard.errors import NotReadyError
from neuroshard.status.snapshot import NodeStatus
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
