"""A fake node that answers commands and trains nothing, its status, and an application around it.

The node has a thread of its own, as the real one does. Functions make snapshots of it in a swarm, in a pipeline and
after rounds. The application is called without a socket; the events of its streams are read here.
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
    SaveCheckpoint,
    Shutdown,
    StatusBoard,
    UpdateSettings,
)
from neuroshard.status.computer import MemoryStatus
from neuroshard.status.data import DataStatus
from neuroshard.status.pipeline import (
    Bottleneck,
    HopTimes,
    MicrobatchTrace,
    PipelineFlow,
    PipelineStage,
    PipelineStatus,
    StageLoad,
    Takeover,
)
from neuroshard.status.rounds import (
    AbandonReason,
    CertificateStatus,
    Contributor,
    MemberPart,
    PhaseSeconds,
    RoundContribution,
    RoundStatus,
    StageRoundsStatus,
)
from neuroshard.status.snapshot import (
    CheckpointGeneration,
    CheckpointStatus,
    ConnectionKind,
    DilocoStatus,
    HeldOutPoint,
    LossPoint,
    ModelStatus,
    NetworkState,
    NetworkStatus,
    NodeState,
    NodeStatus,
    PeerStatus,
    RunStatus,
    StageStatus,
    SwarmStatus,
    TrainingStatus,
)
from neuroshard.telemetry.logs import LogRing
from neuroshard.types import Architecture, JsonValue, LayerRange, NodeId, Role, RunId, ShardId, WalletId
from tests.worlds.run_commands import QUESTIONS, RUN_BODIES, AboutRuns, OwnerCommand, run_result

STARTED = 1_000.0

WORDS = ("a", "list", "of", "names", "is", "returned", "when", "the", "file", "ends")


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


JOIN_LINE = "neuroshard --run abab --peer /ip4/192.0.2.7/tcp/4001/p2p/12D3KooWtest"


def peer(number: int) -> PeerStatus:
    """A peer that trains everything it is asked to, reached directly."""
    return PeerStatus(
        node_id=NodeId(f"12D3KooWpeer{number:04}"),
        wallet_id=WalletId(f"{number:016x}"),
        roles=(Role.DRIVER, Role.VALIDATOR),
        layers=LayerRange(0, 4),
        loss_ema=5.0 + number / 1_000,
        tokens_per_second=1_000.0 + number,
        last_seen=STARTED + 59,
        steps=100 + number,
        tokens=51_200,
        shard=ShardId(number),
        outer_step=2,
        state_hash="aa" * 32,
        state=NodeState.TRAINING,
        started_at=STARTED - 100,
        first_seen=STARTED + 1,
        version="0.0.1",
        connection=ConnectionKind.DIRECT,
        address=f"/ip4/192.0.2.{number % 250}/tcp/4001",
        rtt_seconds=0.012,
        bytes_sent=1_000,
        bytes_received=2_000,
        score=3.0,
    )


def among(count: int) -> NodeStatus:
    """A node that trains with `count` others."""
    network = NetworkStatus(
        state=NetworkState.CONNECTED,
        explanation="Connected.",
        addresses=("/ip4/192.0.2.7/tcp/4001/p2p/12D3KooWtest",),
        connections=count,
        bytes_sent=10_000,
        bytes_received=20_000,
        upload_rate=100.0,
        download_rate=200.0,
        upload_limit=1e6,
        banned_peers=1,
        refused=(("bad_signature", 2), ("oversized", 1)),
        join_line=JOIN_LINE,
    )
    swarm = SwarmStatus(
        nodes=count + 1,
        training_nodes=count + 1,
        global_loss=5.5,
        min_loss=4.5,
        total_steps=9_000,
        total_tokens=4_608_000,
        shards_covered=9,
        tokens_per_second=5_000.0,
        model_hashes=((NodeId("12D3KooWpeer0000"), "aa" * 32),),
    )
    peers = tuple(peer(number) for number in range(count))
    return replace(training_status(), network=network, swarm=swarm, peers=peers)


ME, B, C, D = NodeId("12D3KooWtest"), NodeId("b"), NodeId("c"), NodeId("d")
WALLET = WalletId("0123456789abcdef")

PASSAGE = MicrobatchTrace(
    session=7,
    microbatch=3,
    ended_at=STARTED + 59,
    seconds=2.0,
    tokens=256,
    hops=(
        HopTimes(ME, 0.25, 0.125, 0.0),
        HopTimes(B, 0.5, 0.25, 0.125, 0.125, 4096, 8192),
        HopTimes(D, 0.25, 0.0, 0.0625, 0.0, 4096, 4096),
    ),
    takeovers=(Takeover(1, C, B, is_exact=False),),
    failures=1,
)
FLOW = PipelineFlow(
    window_seconds=60.0,
    microbatches=30,
    tokens=7680,
    bubble_share=0.4375,
    recompute_share=0.125,
    wire_bytes_per_token=80.0,
    loads=(StageLoad(0, 0.25, 0.125, 0.0, 1), StageLoad(1, 0.5, 0.25, 0.125, 2), StageLoad(2, 0.25, 0.0, 0.0625, 1)),
    bottleneck=Bottleneck(1, B, 0.75, 0.5),
    exact_takeovers=2,
    approximate_takeovers=1,
    failures=4,
    given_up=1,
    unanswered=(1,),
    recent=(replace(PASSAGE, microbatch=2, takeovers=(), failures=0), PASSAGE),
)
STAGES = (
    PipelineStage(0, LayerRange(0, 2), ready=(ME,)),
    PipelineStage(1, LayerRange(2, 3), ready=(B, C)),
    PipelineStage(2, LayerRange(3, 4), ready=(D,), joining=(C,)),
)


def in_a_pipeline(stages: tuple[PipelineStage, ...] = STAGES, flow: PipelineFlow | None = FLOW) -> NodeStatus:
    """A node that drives, with the first stage of three."""
    status = training_status()
    assert status.model is not None
    own = StageStatus(0, LayerRange(0, 2), 20, 1, 6.5, 0.5, 3, 8, 2, 1, "ab" * 32, 10)
    missing = "" if not any(stage.is_missing for stage in stages) else "Some layers are missing."
    return replace(
        status,
        model=ModelStatus(status.model.architecture, 123_456, LayerRange(0, 2), (Role.DRIVER,)),
        stages=(own,),
        pipeline=PipelineStatus(stages, missing, flow),
    )


FIRST, SECOND = peer(0), peer(1)
FAR = "its norm is far from the median norm"

COMPLETED = RoundStatus(
    outer_step=3,
    ended_at=STARTED + 50,
    phases=PhaseSeconds(gather=0.25, exchange=1.5, vote=0.25),
    members=(
        RoundContribution(FIRST.node_id, FIRST.wallet_id, MemberPart.ACCEPTED),
        RoundContribution(SECOND.node_id, SECOND.wallet_id, MemberPart.REFUSED, "norm", FAR),
        RoundContribution(ME, WALLET, MemberPart.ACCEPTED),
    ),
    bytes_sent=4_000,
    bytes_received=3_000,
    strategy="streaming",
    part="quarter 4 of 4",
    codec="int8",
    aggregator="trimmed_mean(0.2)",
    views=2,
    skipped_audits=1,
    certificate=CertificateStatus("0123456789abcdef", 3, 3),
)
ABANDONED = replace(
    COMPLETED,
    outer_step=4,
    ended_at=STARTED + 58,
    certificate=None,
    abandoned_for=AbandonReason.NO_ANSWER,
    reason="too few members answered in time",
)
FIRST_STAGE = StageRoundsStatus(
    0,
    LayerRange(0, 4),
    (COMPLETED, ABANDONED),
    completed=4,
    abandoned=((AbandonReason.NO_ANSWER, 1),),
    accepted=8,
    refused=(("norm", 4),),
    bytes_sent=20_000,
    bytes_received=15_000,
    skipped_audits=2,
    contributors=(
        Contributor(SECOND.node_id, SECOND.wallet_id, accepted=0, refused=4),
        Contributor(FIRST.node_id, FIRST.wallet_id, accepted=4),
        Contributor(ME, WALLET, accepted=4),
    ),
)
SECOND_STAGE = StageRoundsStatus(
    1,
    LayerRange(4, 8),
    (replace(COMPLETED, ended_at=STARTED + 55),),
    completed=1,
    abandoned=((AbandonReason.NO_ANSWER, 2), (AbandonReason.NODE, 1)),
    accepted=1,
    refused=(("norm", 1), ("zero", 1)),
    bytes_sent=1_000,
    bytes_received=1_000,
    skipped_audits=1,
    contributors=(Contributor(FIRST.node_id, FIRST.wallet_id, accepted=1, absent=2),),
)


def after_rounds(*stages: StageRoundsStatus) -> NodeStatus:
    """A node among others whose stages had these rounds."""
    root = "aa" * 32
    diloco = DilocoStatus(outer_steps=2, state_root=root, certified_root=root, members=3, rounds=stages)
    return replace(among(2), diloco=diloco)


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
