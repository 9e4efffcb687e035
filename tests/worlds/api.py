"""A fake node that answers commands and trains nothing, and an application around it.

The node has a thread of its own, as the real one does. The application is called without a socket; the events of its
streams are read here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread
from types import TracebackType
from typing import Any

import anyio
import httpx
from fastapi import FastAPI

from neuroshard.api.app import ApiContext, create_app
from neuroshard.api.context import ApiLimits
from neuroshard.api.model_tokens import ModelTokens
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
    Restart,
    Resume,
    SaveCheckpoint,
    Shutdown,
    StatusBoard,
    UpdateSettings,
)
from neuroshard.status.snapshot import NodeState, NodeStatus
from neuroshard.telemetry.logs import LogRing
from neuroshard.types import JsonValue
from tests.worlds.run_commands import QUESTIONS, RUN_BODIES, AboutRuns, OwnerCommand, run_result
from tests.worlds.statuses import training_status, with_step

WORDS = ("a", "list", "of", "names", "is", "returned", "when", "the", "file", "ends")


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
                self.taken += () if isinstance(command, QUESTIONS) else (command,)
                if self.refuse is not None:
                    answer.set_exception(self.refuse)
                elif isinstance(command, Generate):
                    thread = Thread(target=self._generate, args=(command, answer))
                    self._generators.append(thread)
                    thread.start()
                else:
                    self._answer(command, answer)

    def _answer(self, command: OwnerCommand | AboutRuns, answer: Future[CommandAnswer]) -> None:
        try:
            result = run_result(command, self.board) if isinstance(command, AboutRuns) else self._carry_out(command)
            answer.set_result(result)
        except NeuroShardError as error:
            answer.set_exception(error)

    def _carry_out(self, command: OwnerCommand) -> CommandResult:
        match command:
            case Pause(seconds):
                return self._enter(NodeState.PAUSED, f"Paused for {seconds} s." if seconds else "Paused.")
            case Resume():
                return self._enter(NodeState.TRAINING, "Training.")
            case SaveCheckpoint():
                return CommandResult(self.board.current().state, "Saved step 20.", {"step": 20, "seconds": inf})
            case Shutdown(reason):
                return self._enter(NodeState.STOPPING, reason)
            case Restart():
                return CommandResult("stopping", "The node saves a checkpoint and starts again.")
            case UpdateSettings(changes):
                self.stored.update(changes)
                return CommandResult(self.board.current().state, "Stored.", {"stored": dict(changes)})

    def _enter(self, state: NodeState, message: str) -> CommandResult:
        self.board.publish(replace(self.board.current(), state=state, state_reason=message))
        return CommandResult(state, message)

    def _generate(self, command: Generate, answer: Future[CommandAnswer]) -> None:
        prompt = command.prompt if isinstance(command.prompt, str) else " ".join(map(str, command.prompt))
        words = prompt.split()[: command.max_tokens] or ["..."]
        if command.echo:
            command.sink(GeneratedText(prompt, 0))
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
        answer.set_result(GenerationSummary(len(prompt.split()), len(words), "stop"))


class ServedNode(FakeNode):
    """A fake node behind the real API on a real socket, from `start` to `stop`."""

    def __init__(
        self, status: NodeStatus, port: int = 0, *, folder: Path | None = None, limits: ApiLimits | None = None
    ) -> None:
        """`folder` holds its settings; one of its own by default."""
        super().__init__(status)
        self.ring = LogRing()
        self.endless_text = False
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

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        self._server.start()
        self._thread.start()

    def stop(self) -> None:
        """Close the socket and end all threads; calling it again does nothing."""
        self._stop.set()
        self._server.stop()
        for thread in (self._thread, *self._generators):
            if thread.is_alive():
                thread.join(5)
        if self._own_folder is not None:
            self._own_folder.cleanup()

    def publish(self, change: Callable[[NodeStatus], NodeStatus]) -> None:
        """Publish a changed snapshot."""
        self.board.publish(replace(change(self.board.current()), time=time.time(), uptime_seconds=self.board.uptime()))

    def take_step(self, loss: float) -> None:
        """Publish one more training step."""
        self.publish(lambda status: with_step(status, loss))

    def _carry_out(self, command: OwnerCommand) -> CommandResult:
        match command:
            case Pause(seconds):
                until = None if seconds is None else time.time() + seconds
                self.publish(lambda status: replace(status, paused_until=until))
                return self._enter(NodeState.PAUSED, "Paused by you.")
            case Resume():
                return self._enter(NodeState.TRAINING, "Training resumes.")
            case Shutdown():
                return self._enter(NodeState.STOPPING, "Saving a final checkpoint.")
            case UpdateSettings(changes):
                return self._configuration.change(changes, str(self.board.current().state))
            case SaveCheckpoint():
                return CommandResult(str(self.board.current().state), "Done.")
            case Restart():
                return CommandResult("stopping", "The node saves a checkpoint and starts again.")

    def _enter(self, state: NodeState, message: str) -> CommandResult:
        self.publish(lambda status: replace(status, state=state, state_reason=message))
        return CommandResult(str(state), message)

    def _generate(self, command: Generate, answer: Future[CommandAnswer]) -> None:
        """Write made-up words slowly, without end if asked to."""
        written, reason = 0, "length"
        while (self.endless_text or written < command.max_tokens) and not self._stop.is_set():
            if command.cancelled.wait(0.02):
                reason = "stop"
                break
            written += 1
            command.sink(GeneratedText(" " + WORDS[written % len(WORDS)], written))
        else:
            command.sink(GeneratedText("", written, "length"))
        answer.set_result(GenerationSummary(3, written, reason))


SECRET = "a-secret-of-the-tests-that-is-long-enough"
PORT = 8000
BODIES: dict[tuple[str, str], object] = {
    ("post", "/api/session"): {"secret": SECRET},
    ("post", "/v1/completions"): {"prompt": "once upon a time", "max_tokens": 4},
    ("post", "/v1/chat/completions"): {"messages": [{"role": "user", "content": "once"}], "max_tokens": 4},
    ("patch", "/api/config"): {"memory": 900},
    ("post", "/api/training/pause"): {"duration_seconds": 5},
    **RUN_BODIES,
}


@dataclass
class Api:
    """One application, its node and ways to call it."""

    node: FakeNode
    context: ApiContext
    app: FastAPI

    @property
    def secret(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.context.secret}"}

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.context.port}"

    def call(
        self,
        method: str,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        json: object = None,
        content: bytes | None = None,
        sender: str = "127.0.0.1",
    ) -> httpx.Response:

        async def request() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, client=(sender, 50_000))
            async with httpx.AsyncClient(transport=transport, base_url=self.base_url) as client:
                raw = {name: value.encode("latin-1") for name, value in (headers or {}).items()}
                return await client.request(method, path, headers=raw, json=json, content=content)

        return anyio.run(request)

    def get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        return self.call("GET", path, headers=self.secret | (headers or {}))

    def command(self, method: str, path: str, json: object = None) -> httpx.Response:
        return self.call(method, path, headers=self.secret, json=json)


def config_view() -> JsonValue:
    return {"settings": {"port": PORT, "broken": float("nan")}, "sources": {"port": "default"}}


def make_api(
    node: FakeNode,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    limits: ApiLimits | None = None,
    clock: Callable[[], float] = lambda: 1_061.0,
) -> Api:
    tokens = ModelTokens()
    tokens.add("openai", clock())
    context = ApiContext(
        board=node.board,
        commands=node.commands,
        log_ring=LogRing(capacity=1_000),
        secret=SECRET,
        config_view=config_view,
        host=host,
        port=port,
        limits=limits if limits is not None else ApiLimits(),
        clock=clock,
        model_tokens=tokens,
    )
    return Api(node, context, create_app(context))


def events_of(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    buffer = ""
    for text in response.iter_text():
        buffer += text
        while "\n\n" in buffer:
            block, _, buffer = buffer.partition("\n\n")
            fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line and line[0] != ":")
            if fields.get("event"):
                yield fields["event"], json.loads(fields.get("data", "null"))
