"""Nodes of one run in memory that hold stages, report, keep copies and take over from each other by a virtual clock.

Real: placement, joining, backup copies, checkpoints and all that brings state from one node to another. Simulated: the
network, the clock and the training, which is a count of steps; the weights are made from that count.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import torch
import trio
from anyio.abc import TaskGroup
from trio.testing import MockClock

from neuroshard.config.run_parameters import GenesisPins, InnerOptimization, OuterOptimization, RunParameters
from neuroshard.config.settings import Settings
from neuroshard.consensus.sync_strategies import snapshot_layout
from neuroshard.identity import SignedRunParameters, TokenSecret, Wallet
from neuroshard.membership.announcements import Announcement
from neuroshard.membership.claim_intake import Statement
from neuroshard.membership.connectivity import Networking
from neuroshard.membership.reports import TrainingReport
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.membership.swarm_view import Membership
from neuroshard.network import InMemoryNetwork, Network, ScoreReason
from neuroshard.node.holder_monitor import HolderMonitor
from neuroshard.node.joining import Joining, StageSafety
from neuroshard.node.peer_network import report_of_stages
from neuroshard.node.stage_copies import StageCopies
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.node.training_life import Relocating
from neuroshard.optim.outer import LineProgress
from neuroshard.pipeline.executor import Precision
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.offer import RunOffer
from neuroshard.state.backup_copy import BackupCopy
from neuroshard.state.checkpoint_manifest import CheckpointMeta
from neuroshard.state.checkpoint_store import CheckpointStore, stage_folder
from neuroshard.state.download import ReplicaClient
from neuroshard.state.kept_states import KeptState, kept_states
from neuroshard.state.outer_state import OuterProgress, line_from_json, outer_root
from neuroshard.state.replica_status import ReplicaStatus
from neuroshard.state.snapshot_server import SnapshotServer
from neuroshard.state.staging_buffers import StagingBuffers
from neuroshard.status.snapshot import CheckpointGeneration, NodeState
from neuroshard.training.record import Progress, StageIdentity, TrainingRecord, to_meta
from neuroshard.types import Architecture, NodeId
from tests.worlds.claims import identity_of
from tests.worlds.clock import at_once


class IdleService:
    """Computes nothing."""

    most_open = open_of_driver = 1  # microbatches
    needs_ids = False

    def __init__(self) -> None:
        self.kept: list[tuple[float, Container[NodeId]]] = []

    def keep_only(self, nodes: Container[NodeId]) -> None:
        """Remember who counts as present, and when."""
        self.kept.append((anyio.current_time(), nodes))


Value = TypeVar("Value")

EPOCH = 1_700_000_000.0
SHAPE = Architecture(64, 3, 2, 1, 128, 512, 8)
PINS = GenesisPins("ab" * 32, 16, "cd" * 32, "ef" * 32, 64)
OWNER = Wallet.from_secret(TokenSecret("hex", bytes(32)))
REPORT_SECONDS = 10.0
SINGLE = tuple(StageRange(index, index + 1) for index in range(3))
SAVE_STEPS = 10


def offer_of(shape: Architecture, inner: InnerOptimization, outer: OuterOptimization) -> RunOffer:
    """A run of this model in three stages."""
    parameters = RunParameters("test", 1, shape, 3, 1, 4, 7, PINS, inner, outer)
    return RunOffer.of_new_run(SignedRunParameters.sign(OWNER, parameters))


OFFER = offer_of(SHAPE, InnerOptimization(), OuterOptimization())


def now() -> float:
    return EPOCH + anyio.current_time()


@dataclass
class HeldStage:
    """A stage that a node trains: a count of steps, and checkpoints made from it. See Snapshots."""

    index: int
    identity: StageIdentity
    store: CheckpointStore
    clock: Callable[[], float]
    save_steps: int = SAVE_STEPS
    outer: OuterOptimization | None = None
    inner: InnerOptimization | None = None
    steps: int = 0
    outer_step: int = 0
    kept: int = 0  # aggregates before its state
    is_wanted: bool = False
    copied_at: float | None = None
    may_be_taken: Callable[[float], bool] = lambda _waited_seconds: True

    def __post_init__(self) -> None:
        layout = snapshot_layout(self.identity.architecture, self.identity.layers, self.outer, self.inner)
        self._staging = StagingBuffers(layout)
        self._saved = 0

    def restore(self) -> None:
        """Go on from the newest checkpoint."""
        if (generation := self.newest()) is not None:
            self.steps = self._saved = generation.step
            self.outer_step = generation.outer_step

    def step(self) -> None:
        """One step; saved when it is due or somebody needs it."""
        self.steps += 1
        if self.is_wanted or self.steps - self._saved >= self.save_steps:
            self.save()

    def save(self) -> None:
        tensors = {
            name: torch.full(spec.shape, float(self.outer_step if "outer/" in name else self.steps))
            for name, spec in self._staging.layout.specs.items()
        }
        self._staging.copy_from(tensors)
        self.store.write(self._meta(), self._staging)
        self._saved, self.is_wanted = self.steps, False

    def _meta(self) -> CheckpointMeta:
        record = TrainingRecord(Progress(steps=self.steps, tokens=100 * self.steps, sequences=4 * self.steps))
        return to_meta(
            record,
            outer=OuterProgress(),
            outer_step=self.outer_step,
            line=LineProgress(),
            identity=self.identity,
            precision=Precision.FP32,
            time=self.clock(),
        )

    def replica_status(self) -> ReplicaStatus:
        copied = None if self.copied_at is None else self.clock() - self.copied_at
        root = f"{self.outer_step:064x}"
        return ReplicaStatus(True, self.steps, self.outer_step, root, copied_seconds=copied, kept=self.kept)

    def newest(self) -> CheckpointGeneration | None:
        generations = self.store.generations()
        return generations[0] if generations else None

    def states(self) -> Sequence[KeptState]:
        return list(kept_states(self.store))

    def want(self) -> float:
        self.is_wanted = True
        return 0.0

    def copied(self, _peer: NodeId, taken_at: float) -> None:
        self.copied_at = max(taken_at, self.copied_at or 0.0)


@dataclass(eq=False)
class StageNode:
    """One node."""

    number: int
    world: StageWorld
    data_dir: Path
    stages: tuple[HeldStage, ...] = ()
    state: NodeState = NodeState.STARTING
    told: list[str] = field(default_factory=list[str])
    wanted: StageRange | None = None  # the stages it gets ready for
    began_steps: list[int] = field(default_factory=list[int])  # of the stages that it took
    clock_is_ahead: float = 0.0  # seconds
    windows: tuple[StageRange, ...] = SINGLE  # the longest runs that fit its memory
    may_catch_up: bool = False  # with missed rounds, by their aggregates
    news_seconds: float = 0.0  # from a change of its stages to its report

    def __post_init__(self) -> None:
        identity = self.identity = identity_of(self.number)
        self.name = identity.node_id
        self.data_dir.mkdir(exist_ok=True)  # the start of a node creates it
        self.sequence = 0
        self.spoken_at = -REPORT_SECONDS
        self.membership = Membership(identity.node_id, identity.wallet_id)
        self.networking = Networking(self.name, self._open, peers_file=self.data_dir / "peers", loopback_only=True)
        self.swarm = StageSwarm(identity, RunVersions(self.world.offer), self.membership, self.networking)
        self.swarm.donor = SnapshotServer(self.membership.knows, now=self.now, offload=at_once)
        self.swarm.asking = ReplicaClient(self.swarm, lambda *event: self.blamed.append(event), offload=at_once)
        self.service = IdleService()
        self.blamed: list[tuple[NodeId, ScoreReason]] = []
        self.settings = Settings(data_dir=self.data_dir)
        self.copies = StageCopies(self.swarm, lambda: self.settings, self.world.shape, now=self.now, offload=at_once)
        self.scope = anyio.CancelScope()

    @asynccontextmanager
    async def _open(self) -> AsyncGenerator[Network]:
        self.world.network.join(self.name)
        try:
            yield self.world.network.network_of(self.name)
        finally:
            if self in self.world.alive():  # and not started again meanwhile
                self.world.network.kill(self.name)

    @property
    def stage(self) -> HeldStage | None:
        """The first that it holds."""
        return next(iter(self.stages), None)

    @property
    def held(self) -> tuple[int, ...]:
        return tuple(stage.index for stage in self.stages)

    async def live(self, stage: int | StageRange | None = None, *, moves: bool = True) -> None:
        """From the start to the kill."""
        self.swarm.windows = () if self.windows == SINGLE else self.windows
        with self.scope:
            self.networking.attach(self.swarm.live)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.networking.run)
                await self.networking.up()
                await self.copies.load()
                tasks.start_soon(self._keep_reporting)
                tasks.start_soon(self._report_news)
                tasks.start_soon(HolderMonitor(self.swarm, now=now).run)
                tasks.start_soon(StageSafety(self.swarm, self._has_state).run)
                for other in self.world.alive():
                    other.spoken_at = -REPORT_SECONDS  # who comes is told soon how far the others are
                while True:
                    if stage is not None:
                        await self.take(stage)
                    stage = await self._train(moves=moves)
                    self.state = NodeState.STOPPING
                    self.swarm.go_to(stage)
                    await anyio.sleep(self.world.leave_seconds)

    def now(self) -> float:
        """By the clock of this computer."""
        return now() + self.clock_is_ahead

    def allow_megabytes(self, megabytes: int) -> None:
        """Of checkpoints and copies."""
        self.settings = Settings(data_dir=self.data_dir, max_checkpoint_storage=megabytes)

    def kill(self) -> None:
        """Without a word."""
        self.world.network.kill(self.name)
        self.scope.cancel()

    async def take(self, wanted: int | StageRange) -> None:
        """Get the state of stages and hold them."""
        for stage in self.stages:
            stage.save()
        self.swarm.release()
        self.wanted = StageRange(wanted, wanted + 1) if isinstance(wanted, int) else wanted
        self.stages, self.state = (), NodeState.STARTING
        self.swarm.go_to(None)
        self.stages = tuple([await self._brought_up(index) for index in self.wanted])
        self.state = NodeState.TRAINING
        for stage in self.stages:
            self.swarm.hold(stage.index, cast("Any", self.service), lambda: "", lambda stage=stage: stage.outer_step)
            self.swarm.donor.offer(self.swarm.name_of(stage.index), stage)
        self.speak()

    async def _brought_up(self, index: int) -> HeldStage:
        layers = self.swarm.plan[index]
        run_id, shape = self.swarm.run_id, self.world.shape
        identity = StageIdentity(self.identity.wallet_id, self.name, run_id, shape, layers, 1)
        store = CheckpointStore(stage_folder(self.data_dir, self.identity.wallet_id, run_id, layers))
        is_invited = self.number != 0
        joining = Joining(self.swarm, identity, store, self.told.append, is_invited, self.may_catch_up, offload=at_once)
        await joining.prepare()
        world = self.world
        stage = HeldStage(index, identity, store, self.now, world.save_steps, world.outer, world.inner)
        stage.restore()
        self.began_steps.append(stage.steps)
        return stage

    def speak(self) -> None:
        """Report to everybody who can be reached."""
        self.spoken_at = anyio.current_time()
        self.sequence += 1
        report = self.own_report()
        self.membership.count_own_report(report, b"", now())
        said = Statement(self.name, self.identity.wallet_id, now(), now() + 1e6, report)
        for other in self.world.alive():
            if other is not self and (other in self.world.cut_off) == (self in self.world.cut_off):
                other.membership.hear_report(said, now())
                address = Announcement(
                    self.swarm.run_id,
                    1,
                    report.layers,
                    None,
                    EPOCH,
                    500,
                    False,
                    "1",
                    addresses=(f"/memory/p2p/{self.name}",),
                )
                other.membership.hear_announcement(
                    Statement(self.name, self.identity.wallet_id, now(), now() + 1e6, address)
                )

    async def _keep_reporting(self) -> None:
        while True:
            if anyio.current_time() - self.spoken_at >= REPORT_SECONDS:
                self.speak()
            self.membership.forget_silent(now())
            await anyio.sleep(1)

    async def _report_news(self) -> None:
        news = self.membership.own_news
        reported = news.count
        while True:
            await news.wait(after=reported)
            reported = news.count
            await anyio.sleep(self.news_seconds)
            self.speak()

    async def _train(self, *, moves: bool) -> StageRange:
        """Train until other stages are to be held."""
        elsewhere: list[StageRange] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.copies.run)
            if moves:
                elsewhere.append(
                    (await Relocating(self.swarm, self.windows, has_state=self._has_state).wanted()).stages
                )
            else:
                tasks.start_soon(anyio.sleep_forever)
                await anyio.sleep_forever()
            tasks.cancel_scope.cancel()
        return elsewhere[0]

    def _has_state(self, stage: int) -> bool:
        folder = stage_folder(self.data_dir, self.identity.wallet_id, self.swarm.run_id, self.swarm.plan[stage])
        return any(folder.glob("step-*.json"))

    def own_report(self) -> TrainingReport:
        layers = None if self.wanted is None else self.wanted.layers(self.swarm.plan)
        said = TrainingReport(
            run_id=self.swarm.run_id,
            sequence=self.sequence,
            steps=0 if self.stage is None else self.stage.steps,
            tokens=0,
            loss_ema=None,
            shard=None,
            shards_seen=0,
            roles=() if layers is None else layers.roles(3),
            layers=layers,
            outer_step=0 if self.stage is None else self.stage.outer_step,
            state_hash="",
            successful_syncs=0,
            failed_syncs=0,
            tokens_per_second=1.0,
            state=self.state,
            started_at=EPOCH,
            interval_seconds=REPORT_SECONDS,
        )
        return report_of_stages(said, self.swarm)


@dataclass
class StageWorld:
    """All nodes, and the training: a step a second while every stage has a holder."""

    network: InMemoryNetwork
    folder: Path
    shape: Architecture = SHAPE
    save_steps: int = SAVE_STEPS  # a checkpoint, when nobody asks for one
    inner: InnerOptimization = field(default_factory=InnerOptimization)
    outer: OuterOptimization = field(default_factory=OuterOptimization)
    leave_seconds: float = 0.0  # from the decision to go elsewhere until everything is saved and let go
    nodes: list[StageNode] = field(default_factory=list[StageNode])
    cut_off: set[StageNode] = field(default_factory=set["StageNode"])  # these hear only each other

    def __post_init__(self) -> None:
        self.tasks: TaskGroup
        self.offer = offer_of(self.shape, self.inner, self.outer)

    def add_again(self, node: StageNode) -> StageNode:
        """The same node, started again on its disk."""
        again = StageNode(node.number, self, node.data_dir)
        again.sequence = node.sequence
        self.nodes.append(again)
        return again

    def add(self) -> StageNode:
        number = len({node.number for node in self.nodes})
        node = StageNode(number, self, self.folder / f"node-{number}")
        self.nodes.append(node)
        return node

    def alive(self) -> list[StageNode]:
        newest = {node.number: node for node in self.nodes}  # a node that was started again counts once
        return [node for node in newest.values() if node.name in self.network.nodes()]

    def holders(self, stage: int) -> list[StageNode]:
        return [node for node in self.alive() if stage in node.held]

    async def train(self) -> None:
        while True:
            await anyio.sleep(1)
            if all(self.holders(stage) for stage in range(3)):
                for node in self.alive():
                    for stage in node.stages:
                        stage.step()


def play(folder: Path, scenario: Callable[[StageWorld], Awaitable[None]], **changes: Any) -> None:
    """Run a scenario under a virtual clock that never waits; `changes` are fields of the world."""

    async def main() -> None:
        with InMemoryNetwork() as network, anyio.fail_after(100_000):
            await scenario(StageWorld(network, folder, **changes))

    trio.run(main, clock=MockClock(autojump_threshold=0))


def root_on_disk(stage: HeldStage) -> str:
    """Of the newest checkpoint's outer state."""
    (newest,) = stage.store.generations()[:1]
    path = Path(newest.path)
    manifest = stage.store.read_manifest(path)
    tensors, line = path.with_name(manifest.tensors.file), line_from_json(manifest.meta.extra.get("outer"))
    layout = snapshot_layout(stage.identity.architecture, stage.identity.layers)
    return outer_root(tensors, layout, newest.outer_step, line)


@asynccontextmanager
async def living(
    world: StageWorld, stages: Sequence[int | None], *, moves: bool = True
) -> AsyncGenerator[list[StageNode]]:
    """Nodes that begin with these stages, while the world trains."""
    nodes = [world.add() for _ in stages]
    async with anyio.create_task_group() as tasks:
        world.tasks = tasks
        tasks.start_soon(world.train)
        for node, stage in zip(nodes, stages, strict=True):
            tasks.start_soon(lambda node=node, stage=stage: node.live(stage, moves=moves))
        yield nodes
        tasks.cancel_scope.cancel()


def copies_of(nodes: Sequence[StageNode], stage: int) -> list[BackupCopy]:
    return [node.copies.kept(stage) for node in nodes if node.copies.kept(stage).meta is not None]


def steps_of(node: StageNode) -> int:
    assert node.stage is not None
    return node.stage.steps


async def until_held(world: StageWorld, stage: int) -> float:
    """Seconds until somebody trains the stage."""
    began = anyio.current_time()
    while not world.holders(stage):
        await anyio.sleep(0.5)
    return anyio.current_time() - began
