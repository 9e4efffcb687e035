"""The status board: one writer publishes a complete new snapshot; readers on any thread take the newest one."""

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
from neuroshard.status.feed import feed_after
from neuroshard.status.machines import MachineAction, MachineList
from neuroshard.status.snapshot import NodeState, NodeStatus, StartupStep, StartupStepState
from neuroshard.types import JsonValue, NodeId


class StatusBoard:
    """Holds the current immutable NodeStatus with a version number that grows with every publication."""

    def __init__(self, initial: NodeStatus, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._lock = Lock()
        # Version and snapshot are one tuple: readers take both in one atomic read, without the lock.
        self._current = (1, initial)
        self._monotonic = monotonic
        self._started = monotonic() - initial.uptime_seconds

    def publish(self, status: NodeStatus) -> None:
        """Replace the current snapshot and increase the version by one."""
        with self._lock:
            self._current = (self._current[0] + 1, status)

    def uptime(self) -> float:
        """Seconds since the node started, by a clock that changes of the computer's date do not affect."""
        return self._monotonic() - self._started

    def age(self) -> float:
        """Seconds since the newest snapshot was made."""
        return max(0.0, self.uptime() - self.current().uptime_seconds)

    def current(self) -> NodeStatus:
        """Return the newest snapshot. It never blocks."""
        return self._current[1]

    def versioned(self) -> tuple[int, NodeStatus]:
        """Return the version and the newest snapshot. Equal versions mean the same object."""
        return self._current


@dataclass(frozen=True)
class Pause:
    """Stop training and free the accelerator for `duration_seconds`; None: until Resume."""

    duration_seconds: float | None = None


@dataclass(frozen=True)
class Resume:
    """Resume training after a Pause."""


@dataclass(frozen=True)
class SaveCheckpoint:
    """Write a checkpoint now, independently of the schedule."""


@dataclass(frozen=True)
class Shutdown:
    """Save a final checkpoint and end the process with exit code 0."""

    reason: str


@dataclass(frozen=True)
class Restart:
    """Save a checkpoint and start again in the same process, with the stored settings."""


@dataclass(frozen=True)
class UpdateSettings:
    """Change settings of this node and store them in config.toml."""

    changes: Mapping[str, JsonValue]


@dataclass(frozen=True)
class ScoredToken:
    """A token of a prompt or of its continuation, with its probability under the model before temperature and top_p."""

    text: str  # escaped if its bytes are not UTF-8
    content: bytes
    offset: int  # characters before it, counted from the start of the prompt
    logprob: float | None  # in nats; None: no token precedes it
    top: tuple[tuple[str, bytes, float], ...] = ()  # text, bytes and logprob of the likeliest tokens at this place


@dataclass(frozen=True)
class GeneratedText:
    """A piece of a completion. The last piece has a finish reason: "stop" or "length"."""

    text: str
    completion_tokens: int  # real tokens so far, this piece included
    finish_reason: str | None = None
    scores: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with the model in training. The result of the command is a GenerationSummary.

    A prompt of token ids is read as it is; a text gets the token that begins a text. `logprobs` is the number of
    alternatives of each scored token; None: no scores. With `echo` the first piece is the prompt, scored if `logprobs`
    is set. The node calls `sink` for every piece, on a thread of its own; `sink` must not block. Setting `cancelled`
    ends the generation early.
    """

    prompt: str | tuple[int, ...]
    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[str, ...]
    seed: int | None
    sink: Callable[[GeneratedText], None]
    cancelled: Event
    echo: bool = False
    logprobs: int | None = None


@dataclass(frozen=True)
class ListMembers:
    """Return the invitations and the members of the run, and the runs that this computer knows, as details."""


@dataclass(frozen=True)
class Invite:
    """Make an invitation to the run. The details of the result contain its link."""

    label: str
    uses: int
    days: float
    may_invite: bool


@dataclass(frozen=True)
class RevokeInvitation:
    """End an invitation, named by its label or the first digits of its key, and the membership of its wallets."""

    named: str


@dataclass(frozen=True)
class NameDeputy:
    """Let a member found the run again while its owner is away; `wallet` is the beginning of its wallet id."""

    wallet: str


@dataclass(frozen=True)
class JoinRun:
    """Serve another run after the next checkpoint: that of an invitation, or a known one. Neither: one of its own."""

    code: str | None = None
    run_id: str | None = None


@dataclass(frozen=True)
class AnswerKnock:
    """Let a computer of the local network into the run, or refuse it."""

    wallet: str  # wallet id
    is_allowed: bool


@dataclass(frozen=True)
class ListMachines:
    """Return the machines of this node's wallet. The result is a MachineList."""


@dataclass(frozen=True)
class OrderMachines:
    """Pause or resume all machines of this node's wallet, or one. The result is a MachineList with the outcomes."""

    action: MachineAction
    node_id: NodeId | None = None  # None: all of them, this node included


MachineCommand: TypeAlias = "ListMachines | OrderMachines"
RunCommand: TypeAlias = "ListMembers | Invite | RevokeInvitation | NameDeputy | JoinRun | AnswerKnock"


@dataclass(frozen=True)
class CommandResult:
    """Result of a command: the state afterwards and a sentence for the user."""

    state: str
    message: str
    details: Mapping[str, JsonValue] | None = None


@dataclass(frozen=True)
class GenerationSummary:
    """Usage counts of a finished completion, in real tokens."""

    prompt_tokens: int
    completion_tokens: int
    finish_reason: str


Command: TypeAlias = (
    "Pause | Resume | SaveCheckpoint | Shutdown | Restart | UpdateSettings | Generate | RunCommand | MachineCommand"
)
CommandAnswer: TypeAlias = "CommandResult | GenerationSummary | MachineList"


class CommandChannel:
    """Bounded queue of commands from API threads to the node, each with a future for its result."""

    def __init__(self, capacity: int = 64) -> None:
        self._queue: Queue[tuple[Command, Future[CommandAnswer]]] = Queue(capacity)
        self._notify: Callable[[], object] = _nobody

    def listen(self, notify: Callable[[], object]) -> None:
        """Call `notify` for every later command, on the sender's thread. A second call replaces the first."""
        self._notify = notify

    def send(self, command: Command) -> Future[CommandAnswer]:
        """Queue a command and return the future of its result. Raises NotReadyError when the queue is full."""
        answer: Future[CommandAnswer] = Future()
        try:
            self._queue.put_nowait((command, answer))
        except Full as full:
            raise NotReadyError("The node has too many commands waiting.", "Try again in a few seconds.") from full
        self._notify()
        return answer

    def take(self) -> tuple[Command, Future[CommandAnswer]] | None:
        """Remove and return the oldest waiting command, or None if there is none. It never blocks."""
        try:
            return self._queue.get_nowait()
        except Empty:
            return None


def _nobody() -> None:
    """Do nothing: no listener is registered yet."""


_LOG = logging.getLogger(__name__)


def with_totals_of_lone_node(status: NodeStatus) -> NodeStatus:
    """The snapshot whose totals of the run equal this node's own values while it knows no other node.

    The network publishes the totals up to 2 s after the trainer publishes the values. In between, one page would show
    two losses of the same model. The work of nodes that left stays in the totals.
    """
    swarm, training, data = status.swarm, status.training, status.data
    if swarm is None or swarm.nodes > 1 or status.peers or training.loss_ema is None:
        return status
    is_training = status.state is NodeState.TRAINING
    totals = replace(
        swarm,
        training_nodes=int(is_training),
        global_loss=training.loss_ema,
        min_loss=training.loss_ema if swarm.min_loss is None else min(swarm.min_loss, training.loss_ema),
        total_steps=max(swarm.total_steps, training.steps),
        total_tokens=max(swarm.total_tokens, training.tokens),
        shards_covered=max(swarm.shards_covered, data.shards_seen if data else 0),
        tokens_per_second=training.tokens_per_second if is_training else 0.0,
    )
    return replace(status, swarm=totals)


class Publisher:
    """Changes the snapshot on the status board.

    Only the thread that runs the node's tasks uses it: a change reads the current snapshot and publishes a new one,
    so a second writer in between would lose its change.
    """

    def __init__(self, board: StatusBoard, wall_clock: Callable[[], float] = time.time) -> None:
        self._board = board
        self._wall_clock = wall_clock

    @property
    def node_state(self) -> NodeState:
        """State of the node in the newest snapshot."""
        return self._board.current().state

    def change(self, **parts: Any) -> None:
        """Publish the current snapshot with these fields of NodeStatus replaced, and with the time of now."""
        before, now = self._board.current(), {"time": self._wall_clock(), "uptime_seconds": self._board.uptime()}
        after = with_totals_of_lone_node(replace(before, **now, **parts))
        self._board.publish(replace(after, feed=feed_after(before, after)))

    def state(self, state: NodeState, reason: str) -> None:
        """Publish the node's state and the reason for it, which is one sentence."""
        self.change(state=state, state_reason=reason, is_standing_by=False)

    def warn(self, *messages: str) -> None:
        """Add warnings that stay visible, and log them. A text that is already shown is ignored."""
        known = self._board.current().warnings
        for message in dict.fromkeys(messages):
            if message not in known:
                _LOG.warning("%s", message)
        self.change(warnings=tuple(dict.fromkeys((*known, *messages))))

    def end_warning(self, message: str) -> None:
        """Remove a warning whose cause is gone."""
        self.change(warnings=tuple(known for known in self._board.current().warnings if known != message))


class StartupProgress:
    """Publishes the progress of the start-up steps, which the dashboard shows."""

    def __init__(self, publisher: Publisher, names: tuple[str, ...]) -> None:
        self._publisher = publisher
        self._stages = {name: StartupStep(name) for name in names}
        self._show()

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Mark a step as running during the block, then as done, or as failed after a NeuroShardError."""
        self.report(name, "")
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

    def report(self, name: str, detail: str, fraction: float | None = None) -> None:
        """Mark a step as running and show its progress; `fraction` is in 0..1, or None if it is not known."""
        self._set(replace(self._stages[name], state=StartupStepState.RUNNING, detail=detail, fraction=fraction))

    def complete(self) -> None:
        """Mark all steps as done."""
        if any(stage.state is not StartupStepState.DONE for stage in self._stages.values()):
            done = StartupStepState.DONE
            self._stages = {name: replace(stage, state=done) for name, stage in self._stages.items()}
            self._show()

    def _set(self, stage: StartupStep) -> None:
        self._stages[stage.name] = stage
        self._show()

    def _show(self) -> None:
        self._publisher.change(startup=tuple(self._stages.values()))
