"""A node without a model: it obeys commands and publishes snapshots, behind the real API on a real socket."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

from neuroshard.api.app import ApiContext, create_app
from neuroshard.api.context import ApiLimits
from neuroshard.api.server import ApiServer, bind
from neuroshard.config.loading import load_settings
from neuroshard.errors import NeuroShardError
from neuroshard.host.live_settings import Configuration
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
    Shutdown,
    StatusBoard,
    UpdateSettings,
)
from neuroshard.status.snapshot import LossPoint, NodeState, NodeStatus
from neuroshard.telemetry.logs import LogRing

SECRET = "a" * 43
POLL_SECONDS = 0.02
WORDS = ("a", "list", "of", "names", "is", "returned", "when", "the", "file", "ends")


class PretendNode:
    """Answers commands in a thread; `received` holds them in order."""

    def __init__(
        self, status: NodeStatus, port: int = 0, *, folder: Path | None = None, limits: ApiLimits | None = None
    ) -> None:
        """`folder` holds its settings; one of its own by default."""
        self.board = StatusBoard(status)
        self.commands = CommandChannel()
        self.ring = LogRing()
        self.received: list[Command] = []
        self.endless_text = False
        self._ended = Event()
        listener = bind("127.0.0.1", port)
        self.port: int = listener.getsockname()[1]
        self._own_folder = TemporaryDirectory() if folder is None else None
        data_dir = Path(self._own_folder.name) if self._own_folder else folder
        self._configuration = Configuration(load_settings({}, {}, data_dir))
        context = ApiContext(
            board=self.board,
            commands=self.commands,
            log_ring=self.ring,
            secret=SECRET,
            config_view=self._configuration.view,
            host="127.0.0.1",
            port=self.port,
            limits=limits or ApiLimits(),
        )
        self._server = ApiServer(create_app(context), listener)
        self._thread = Thread(target=self._serve_commands, name="pretend-node")

    @property
    def url(self) -> str:
        """Address of the dashboard."""
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Serve until stop()."""
        self._server.start()
        self._thread.start()

    def stop(self) -> None:
        """Close the socket and end both threads; calling it again does nothing."""
        self._ended.set()
        self._server.stop()
        if self._thread.is_alive():
            self._thread.join(5)
        if self._own_folder is not None:
            self._own_folder.cleanup()

    def publish(self, change: Callable[[NodeStatus], NodeStatus]) -> None:
        """Publish a changed snapshot."""
        self.board.publish(replace(change(self.board.current()), time=time.time(), uptime_seconds=self.board.uptime()))

    def take_step(self, loss: float) -> None:
        """Publish one more training step."""
        self.publish(lambda status: with_step(status, loss))

    def _serve_commands(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            while (item := self.commands.take()) is not None:
                command, answer = item
                self.received.append(command)
                self._answer(command, answer)

    def _answer(self, command: Command, answer: Future[CommandAnswer]) -> None:
        try:
            answer.set_result(self._obey(command))
        except NeuroShardError as error:
            answer.set_exception(error)

    def _obey(self, command: Command) -> CommandResult | GenerationSummary:
        match command:
            case Pause(seconds):
                until = None if seconds is None else time.time() + seconds
                self.publish(lambda status: replace(status, paused_until=until))
                return self._move(NodeState.PAUSED, "Paused by you.")
            case Resume():
                return self._move(NodeState.TRAINING, "Training goes on.")
            case Shutdown():
                return self._move(NodeState.STOPPING, "Saving a final checkpoint.")
            case Generate():
                return self._write(command)
            case UpdateSettings(changes):
                return self._configuration.change(changes, str(self.board.current().state))
            case _:
                return CommandResult(str(self.board.current().state), "Done.")

    def _move(self, state: NodeState, reason: str) -> CommandResult:
        self.publish(lambda status: replace(status, state=state, state_reason=reason))
        return CommandResult(str(state), reason)

    def _write(self, command: Generate) -> GenerationSummary:
        written = 0
        while (self.endless_text or written < command.max_tokens) and not self._ended.is_set():
            if command.cancelled.wait(0.02):
                return GenerationSummary(3, written, "stop")
            written += 1
            command.sink(GeneratedText(" " + WORDS[written % len(WORDS)], written))
        command.sink(GeneratedText("", written, "length"))
        return GenerationSummary(3, written, "length")


def with_step(status: NodeStatus, loss: float) -> NodeStatus:
    """The snapshot after one more step with this loss."""
    training = status.training
    step = training.steps + 1
    tokens = training.tokens + 2048
    point = LossPoint(step=step, time=time.time(), loss=loss, lr=1e-3, tokens=tokens)
    return replace(
        status,
        training=replace(training, steps=step, tokens=tokens, loss=loss, loss_ema=loss),
        history=(*status.history[-999:], point),
    )
