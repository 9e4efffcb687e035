"""A node that answers commands on a thread of its own, as the real one does, but trains nothing."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from threading import Event, Thread
from types import TracebackType

from neuroshard.errors import NeuroShardError
from neuroshard.status.board import (
    Command,
    CommandAnswer,
    CommandChannel,
    CommandResult,
    Generate,
    GeneratedText,
    GenerationSummary,
    Pause,
    Resume,
    SaveCheckpoint,
    Shutdown,
    StatusBoard,
    UpdateSettings,
)
from neuroshard.status.data import DataStatus
from neuroshard.status.snapshot import (
    CheckpointGeneration,
    CheckpointStatus,
    HeldOutPoint,
    LossPoint,
    MemoryStatus,
    ModelStatus,
    NodeState,
    NodeStatus,
    RunStatus,
    TrainingStatus,
)
from neuroshard.types import Architecture, LayerRange, NodeId, Role, RunId, ShardId, WalletId

STARTED = 1_000.0


def training_status(steps: int = 20) -> NodeStatus:
    """A node in the middle of a run of its own."""
    architecture = Architecture(
        hidden_size=64,
        layer_count=4,
        head_count=4,
        key_value_head_count=2,
        feed_forward_size=160,
        vocabulary_size=512,
        sequence_length=64,
    )
    points = tuple(LossPoint(step, STARTED + step, 7.0 - step / 100, 1e-3, step * 512) for step in range(1, steps + 1))
    return NodeStatus(
        version="0.0.1",
        started_at=STARTED,
        time=STARTED + 60,
        uptime_seconds=60,
        state=NodeState.TRAINING,
        state_reason="Training.",
        node_id=NodeId("12D3KooWtest"),
        wallet_id=WalletId("0123456789abcdef"),
        data_dir="/data",
        model=ModelStatus(architecture, 123_456, LayerRange(0, 4), (Role.DRIVER, Role.VALIDATOR)),
        memory=MemoryStatus(1_000, 1_200, "--memory", 900, 400, 450),
        run=RunStatus(RunId("ab" * 32), is_own=True, is_demo=False, explanation="A run of its own."),
        training=TrainingStatus(
            steps=steps,
            tokens=steps * 512,
            loss=6.8,
            loss_ema=6.9,
            initial_loss=6.99,
            tokens_per_second=900.0,
            held_out=(HeldOutPoint(0, STARTED, 7.1, 0.0, 0.1), HeldOutPoint(10, STARTED + 10, 6.5, 0.6, 0.1)),
        ),
        data=DataStatus(
            "folder", verified=True, explanation="Signed.", total_shards=16, shard=ShardId(3), shards_seen=2
        ),
        checkpoints=CheckpointStatus("/data/c", (CheckpointGeneration(10, 0, STARTED, 6.9, 100, "/data/c/step-10"),)),
        history=points,
    )


class FakeNode:
    """Takes commands until it leaves its `with` block. `hold` keeps generations waiting, `refuse` makes all fail."""

    def __init__(self, status: NodeStatus | None = None) -> None:
        self.board = StatusBoard(status if status is not None else training_status())
        self.commands = CommandChannel()
        self.taken: list[Command] = []
        self.stored: dict[str, object] = {}
        self.refuse: NeuroShardError | None = None
        self.refuse_in_the_middle: NeuroShardError | None = None
        self.hold = Event()
        self.hold.set()
        self.cancelled = Event()
        self._stop = Event()
        self._thread = Thread(target=self._work, name="fake-node")
        self._generators: list[Thread] = []

    def __enter__(self) -> FakeNode:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self.hold.set()
        self._thread.join()
        for thread in self._generators:
            thread.join()

    def train(self, steps: int = 1) -> None:
        """Publish a snapshot that is some steps further."""
        self.board.publish(training_status(self.board.current().training.steps + steps))

    def _work(self) -> None:
        while not self._stop.wait(0.002):
            while (taken := self.commands.take()) is not None:
                command, answer = taken
                self.taken.append(command)
                if self.refuse is not None:
                    answer.set_exception(self.refuse)
                elif isinstance(command, Generate):
                    thread = Thread(target=self._generate, args=(command, answer))
                    self._generators.append(thread)
                    thread.start()
                else:
                    answer.set_result(self._carry_out(command))

    def _carry_out(self, command: Pause | Resume | SaveCheckpoint | Shutdown | UpdateSettings) -> CommandResult:
        match command:
            case Pause(seconds):
                return self._enter(NodeState.PAUSED, f"Paused for {seconds} s." if seconds else "Paused.")
            case Resume():
                return self._enter(NodeState.TRAINING, "Training.")
            case SaveCheckpoint():
                return CommandResult(
                    self.board.current().state, "Saved step 20.", {"step": 20, "seconds": float("inf")}
                )
            case Shutdown(reason):
                return self._enter(NodeState.STOPPING, reason)
            case UpdateSettings(changes):
                self.stored.update(changes)
                return CommandResult(self.board.current().state, "Stored.", {"stored": dict(changes)})

    def _enter(self, state: NodeState, message: str) -> CommandResult:
        self.board.publish(replace(self.board.current(), state=state, state_reason=message))
        return CommandResult(state, message)

    def _generate(self, command: Generate, answer: Future[CommandAnswer]) -> None:
        """Says the prompt's words once more, one token each."""
        words = command.prompt.split()[: command.max_tokens] or ["..."]
        for count, word in enumerate(words, start=1):
            last = count == len(words)
            command.sink(GeneratedText(f" {word}", count, "stop" if last else None))
            while not self.hold.wait(0.002):
                if command.cancelled.is_set():
                    break
            if self.refuse_in_the_middle is not None:
                answer.set_exception(self.refuse_in_the_middle)
                return
            if command.cancelled.is_set():
                self.cancelled.set()
                answer.set_result(GenerationSummary(1, count, "stop"))
                return
        answer.set_result(GenerationSummary(len(command.prompt.split()), len(words), "stop"))
