"""Tiny stages, alone or in a chain, with a feed of made-up text and trainers built from them.

Real: the model, the optimizer, the compute thread, the stage servers, checkpoints and text generation. Simulated: the
data, which a generator makes in memory, and the network, because every stage is in this process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.lowlevel
import pytest
import torch
import trio
from torch import Tensor
from trio.testing import MockClock, wait_all_tasks_blocked

from neuroshard.config.run_parameters import GenesisPins, InnerOptimization, OuterOptimization, RunParameters
from neuroshard.data.feed import HeldOut
from neuroshard.data.tokenizer import Tokenizer, learn_merges
from neuroshard.data.windows import Batch
from neuroshard.model.subspace import Subspace
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import initialise
from neuroshard.optim.inner_optimizer import make_inner_optimizer
from neuroshard.pipeline.driver import Feed
from neuroshard.pipeline.executor import ComputeThread, Precision, Priority, StageExecutor
from neuroshard.pipeline.microbatch import MicrobatchKey, StageBusyError
from neuroshard.pipeline.routing import FixedRouting
from neuroshard.pipeline.stage_client import LocalStageClient
from neuroshard.pipeline.stage_server import ServiceLimits, StageServer
from neuroshard.state.checkpoint_saver import CheckpointPolicy
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.stage_tensors import stage_tensors
from neuroshard.status.board import Generate, GeneratedText
from neuroshard.status.data import DataStatus
from neuroshard.status.snapshot import NodeState
from neuroshard.training.parts import DriverParts, TrainerParts
from neuroshard.training.record import StageIdentity
from neuroshard.training.site.site import Site
from neuroshard.training.stage_checkpoint import Stage, build_stage
from neuroshard.training.stage_replica import StageReplica
from neuroshard.training.text_generation import SLICE_SECONDS, LocalInferenceSession, TextGenerator, allowed_ids
from neuroshard.training.trainer import Trainer
from neuroshard.types import Architecture, DataPosition, LayerRange, NodeId, RunId, ShardId, WalletId

T = TypeVar("T")

ARCHITECTURE = Architecture(
    hidden_size=32,
    layer_count=3,
    head_count=2,
    key_value_head_count=1,
    feed_forward_size=64,
    vocabulary_size=64,
    sequence_length=16,
)
PARAMETERS = RunParameters(
    name="tiny",
    version=1,
    architecture=ARCHITECTURE,
    stage_count=1,
    batch_size=2,
    sequences_per_step=4,
    initial_weights_seed=7,
    genesis=GenesisPins("00", 16, None, "00", 64),
    inner=InnerOptimization(learning_rate=3e-3, warmup_steps=5, decay_steps=200),
    outer=OuterOptimization(inner_steps=5, interval="fixed"),
)
IDENTITY = StageIdentity(
    WalletId("0" * 16), NodeId("node"), RunId("1" * 64), ARCHITECTURE, LayerRange(0, ARCHITECTURE.layer_count), 1
)
SHARD_WINDOWS = 64


def windows(shard: int, count: int = SHARD_WINDOWS) -> Tensor:
    """(count, T+1) ids of a language with little surprise: each id follows from the one before, mostly."""
    generator = torch.Generator().manual_seed(1000 + shard)
    width, size = ARCHITECTURE.sequence_length + 1, ARCHITECTURE.vocabulary_size
    rows = torch.randint(0, size, (count, width), generator=generator)
    surprises = torch.rand((count, width), generator=generator) < 0.2
    for column in range(1, width):
        follower = (rows[:, column - 1] * 5 + 3) % size
        rows[:, column] = torch.where(surprises[:, column], rows[:, column], follower)
    return rows


class MemoryFeed:
    """Batches from generated shards, with the resume rule of the real feed."""

    def __init__(self, start: DataPosition | None = None, batch_seconds: float = 0.0) -> None:
        self.position = start or DataPosition(0, ShardId(0), 0)
        self.batch_seconds = batch_seconds  # the time that a batch takes
        self.noted: list[tuple[float, float | None, int]] = []
        self.gate = anyio.Event()  # batches wait for it
        self.gate.set()

    async def next_batch(self, sequences: int, *, step: int | None = None) -> Batch:
        """The next windows; a shard's end starts the next shard."""
        await self.gate.wait()
        if self.batch_seconds:
            await anyio.sleep(self.batch_seconds)
        rows = windows(self.position.order)[self.position.window : self.position.window + sequences]
        following = replace(self.position, window=self.position.window + len(rows))
        if following.window >= SHARD_WINDOWS:
            following = DataPosition(self.position.order + 1, ShardId(self.position.order + 1), 0)
        self.position = following
        return Batch(rows[:, :-1], rows[:, 1:], following, rows[:, 1:].numel())

    async def held_out(self, count: int = 32) -> HeldOut:
        """Windows of two shards that are never trained on."""
        return HeldOut(torch.cat([windows(-1, 32), windows(-2, 32)])[:count], 4.0)

    def note_evaluation(self, train_loss: float, held_out_loss: float | None, step: int) -> None:
        """Remember what was told."""
        self.noted.append((train_loss, held_out_loss, step))

    def rewind(self, position: DataPosition) -> None:
        """Go on from an earlier position."""
        self.position = position

    def status(self) -> DataStatus:
        """Nothing much."""
        return DataStatus(source="memory", verified=False, explanation="Made up.")


async def paused_after(trainer: Trainer, steps: int) -> None:
    """Let it make so many steps, then pause it and wait until it is."""
    while trainer.steps < steps:
        await anyio.sleep(0.001)
    trainer.pause()
    await trainer.wait_until_paused()


async def tensors_dropped(trainer: Trainer) -> None:
    """Wait until the tensors of a paused trainer have left the memory."""
    with anyio.fail_after(60):
        while not has_no_tensors(trainer):
            await anyio.sleep(0.001)


def has_no_tensors(trainer: Trainer) -> bool:
    """Whether no weight, moment or anchor has memory of its own."""
    tensors = list[Tensor]()
    for held in trainer.parts.stages:
        named = stage_tensors(held.executor.model, held.executor.optimizer, held.outer.state)
        tensors += [tensor for tensor in named.values() if tensor.dim()]
    return all(tensor.untyped_storage().nbytes() <= 4 and bool(tensor.isnan().all()) for tensor in tensors)


async def state_becomes(trainer: Trainer, state: NodeState) -> None:
    """Wait until the trainer is in this state."""
    while trainer.snapshot().state is not state:
        await anyio.sleep(0.001)


def make_stage(
    compute: ComputeThread,
    folder: Path,
    parameters: RunParameters = PARAMETERS,
    identity: StageIdentity = IDENTITY,
    policy: CheckpointPolicy = CheckpointPolicy(every_steps=10, min_seconds=1e9),  # noqa: B008 - frozen
    *,
    site: Site | None = None,
) -> Stage:
    """Built on the compute thread, restored when the folder holds a checkpoint."""
    store = CheckpointStore(folder)
    cpu, fp32 = torch.device("cpu"), Precision.FP32
    return compute.submit(
        lambda: build_stage(parameters, identity, cpu, store, policy=policy, precision=fp32, site=site)
    ).result()


def make_replica(
    compute: ComputeThread,
    stage: Stage,
    parameters: RunParameters = PARAMETERS,
    identity: StageIdentity = IDENTITY,
    number: int = 0,
    *,
    versions: Callable[[int], RunParameters] | None = None,
) -> StageReplica:
    """A stage without other replicas. Without `versions`, `parameters` apply at every outer step."""
    return StageReplica(compute, stage, identity, parameters, number, versions=versions or (lambda _step: parameters))


def make_trainer(
    compute: ComputeThread,
    stage: Stage,
    feed: Feed | None = None,
    parameters: RunParameters = PARAMETERS,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    seconds_before_drop: float = 10.0,
    versions: Callable[[int], RunParameters] | None = None,
) -> Trainer:
    """A trainer that is a group of one and holds the whole model."""
    held = make_replica(compute, stage, parameters, versions=versions)
    feed = feed or MemoryFeed(stage.record.progress.position)
    driving = DriverParts(IDENTITY.node_id, feed, FixedRouting([LocalStageClient(held.service, IDENTITY.node_id)]))
    parts = TrainerParts(parameters, (held,), driving)
    return Trainer(parts, monotonic=monotonic, seconds_before_drop=seconds_before_drop)


def train(compute: ComputeThread, folder: Path, last_step: int, parameters: RunParameters = PARAMETERS) -> Trainer:
    """Start or resume in a folder, train up to a step, save, and give back the ended trainer."""
    trainer = make_trainer(compute, make_stage(compute, folder, parameters), parameters=parameters)
    trio.run(trainer.run, last_step)
    return trainer


def state_digest(trainer: Trainer) -> str:
    """SHA-256 over every tensor of every stage."""
    digest = sha256()
    for held in trainer.parts.stages:
        executor, outer = held.executor, held.outer.state
        digest.update(str(outer.outer_step).encode())
        for name, tensor in stage_tensors(executor.model, executor.optimizer, outer).items():
            digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


SEED = 11
ROWS = windows(3, 8)
INPUTS, LABELS = ROWS[:, :-1], ROWS[:, 1:]
HIDDEN = ARCHITECTURE.hidden_size
DRIVER = NodeId("driver")
OTHER = NodeId("other")


def key(microbatch: int, session: int = 1, driver: NodeId = DRIVER) -> MicrobatchKey:
    return MicrobatchKey(driver, session, microbatch)


def executor_of(start: int, stop: int, architecture: Architecture = ARCHITECTURE) -> StageExecutor:
    subspace = Subspace(architecture, SEED) if architecture.subspace_rank else None
    model = StageModel(architecture, LayerRange(start, stop), subspace)
    initialise(model, SEED)
    optimizer = make_inner_optimizer(model, PARAMETERS.inner)
    return StageExecutor(model, optimizer, torch.device("cpu"))


def executor_around(model: StageModel) -> StageExecutor:
    """An executor of a model that a test also reads and writes itself."""
    return StageExecutor(model, make_inner_optimizer(model, PARAMETERS.inner), torch.device("cpu"))


def service_of(
    compute: ComputeThread,
    start: int,
    stop: int,
    *,
    sequences_per_step: int = 8,
    limits: ServiceLimits | None = None,
    kept_graphs: int | None = None,
    is_open: bool = True,
    architecture: Architecture = ARCHITECTURE,
) -> StageServer:
    service = StageServer(
        compute,
        executor_of(start, stop, architecture),
        sequences_per_step=sequences_per_step,
        batch_size=4,
        limits=limits,
        kept_graphs=kept_graphs,
    )
    if is_open:
        service.open()
    return service


def chain_of(
    compute: ComputeThread,
    cuts: Sequence[int],
    *,
    kept_graphs: int | None = None,
    architecture: Architecture = ARCHITECTURE,
) -> list[StageServer]:
    return [service_of(compute, a, b, kept_graphs=kept_graphs, architecture=architecture) for a, b in pairwise(cuts)]


def gradients(services: Sequence[StageServer]) -> dict[str, Tensor]:
    named = [pair for service in services for pair in service.executor.model.named_parameters()]
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


def whole_model() -> tuple[StageModel, Tensor]:
    """The model in one piece after one backward pass over all rows, and its summed loss."""
    whole = StageModel(ARCHITECTURE)
    initialise(whole, SEED)
    loss = whole.loss_sum(whole(INPUTS), LABELS)
    loss.backward()
    return whole, loss.detach()


def assert_gradients_of_the_whole(services: Sequence[StageServer]) -> None:
    whole, _ = whole_model()
    found = gradients(services)
    assert found.keys() == {name for name, _ in whole.named_parameters()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-5)


def activations(sequences: int = 1, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sequences, ARCHITECTURE.sequence_length, HIDDEN, generator=generator)


def play(scenario: Callable[[MockClock], Awaitable[None]]) -> None:
    """Run a scenario with a clock that only it moves."""
    clock = MockClock()

    async def main() -> None:
        with anyio.fail_after(10_000):
            await scenario(clock)

    trio.run(main, clock=clock)


async def refused_in_the_end(clock: MockClock, service: StageServer, name: MicrobatchKey) -> str:
    """Why a microbatch that waits for a place is refused when its time is over."""
    reasons = list[str]()

    async def ask() -> None:
        with pytest.raises(StageBusyError) as refusal:
            await service.forward(name, activations())
        reasons.append(str(refusal.value))

    async with trio.open_nursery() as tasks:
        tasks.start_soon(ask)
        await wait_all_tasks_blocked()
        assert not reasons
        clock.jump(ServiceLimits().wait_seconds + 1)
    return reasons[0]


TOKENIZER = Tokenizer(learn_merges(["the theory of the other thing is the thing of the theory"], 20))
TEXT_SHAPE = replace(ARCHITECTURE, vocabulary_size=TOKENIZER.size + 30)  # a run's vocabulary may exceed the table


@dataclass
class Pieces:
    """Collects what a sink is given."""

    pieces: list[GeneratedText] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def __call__(self, piece: GeneratedText) -> None:
        self.pieces.append(piece)
        self.threads.add(threading.current_thread().name)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


def model_of(start: int = 0, stop: int = TEXT_SHAPE.layer_count, seed: int = 3) -> StageModel:
    model = StageModel(TEXT_SHAPE, LayerRange(start, stop))
    initialise(model, seed)
    return model


def text_service_of(compute: ComputeThread, model: StageModel, limits: ServiceLimits | None = None) -> StageServer:
    executor = StageExecutor(model, make_inner_optimizer(model, PARAMETERS.inner), torch.device("cpu"))
    service = StageServer(compute, executor, sequences_per_step=4, batch_size=2, limits=limits)
    service.open()
    return service


def generator_of(
    compute: ComputeThread, models: Sequence[StageModel], slice_seconds: float = SLICE_SECONDS
) -> TextGenerator:
    """Of a node that holds all stages."""
    texts = [text_service_of(compute, model).texts for model in models]
    return TextGenerator(
        TEXT_SHAPE,
        TOKENIZER,
        lambda: LocalInferenceSession(compute, texts, NodeId("node"), slice_seconds=slice_seconds),
    )


def request(
    sink: Callable[[GeneratedText], None], prompt: str | tuple[int, ...] = "the th", **changes: object
) -> Generate:
    base = Generate(prompt, 12, 1.0, 1.0, (), 5, sink, threading.Event())
    return replace(base, **changes)  # type: ignore[arg-type]


def continuation(model: StageModel, ids: Sequence[int], count: int) -> list[int]:
    """Greedy continuation that reads the whole text for every token, or its end beyond the context."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(next_logits(model, ids).argmax()))
    return ids[-count:]


@torch.no_grad()
def next_logits(model: StageModel, ids: Sequence[int]) -> Tensor:
    """Of what may follow a text."""
    logits = model.logits(model(torch.tensor([list(ids)[-TEXT_SHAPE.sequence_length :]])))[0, -1]
    return torch.where(allowed_ids(TOKENIZER.size, TEXT_SHAPE.vocabulary_size), logits, -torch.inf)


def prompt_ids(prompt: str = "the th") -> list[int]:
    return TOKENIZER.encode(prompt, bos=True).tolist()


class ComputeInPlace(ComputeThread):
    """Computes on the loop's own thread, which the virtual clock waits for: it leaps while other threads work."""

    def __init__(self) -> None:
        super().__init__()
        self.close()  # the thread

    async def run(self, work: Callable[[], T], priority: Priority = Priority.TRAINING) -> T:
        await anyio.lowlevel.checkpoint()
        return work()

    def submit(self, work: Callable[[], T], priority: Priority = Priority.TRAINING) -> Future[T]:
        done = Future[T]()
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - carried to the caller
            done.set_exception(error)
        return done

    async def finish(self, result: Future[T]) -> T:
        await anyio.lowlevel.checkpoint()
        return result.result()
