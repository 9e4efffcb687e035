"""Nodes of one run that train stages of a tiny model in one process.

Real: the stages, the training, the data and the clock. Simulated: the network, and the reports, which arrive at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import time

import anyio
import trio

from neuroshard.config.run_parameters import RunParameters
from neuroshard.config.settings import Settings
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.source import open_source
from neuroshard.data.source_monitor import SourceMonitor
from neuroshard.host.resources import Device
from neuroshard.identity import SignedRunParameters, TokenSecret, Wallet
from neuroshard.membership.claim_intake import Statement
from neuroshard.membership.connectivity import Networking
from neuroshard.membership.reports import TrainingReport
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.membership.swarm_view import Membership
from neuroshard.network import InMemoryNetwork, Network
from neuroshard.node.data_sharing import open_data_store
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.node.stage_training import CHECKPOINT, FIRST_STEP, NodeContext, RunningNode, StageTraining
from neuroshard.pipeline.control import RequestedPause
from neuroshard.pipeline.executor import ComputeThread
from neuroshard.runs.data_opening import open_joined_data, pins_of_source
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.proposal import HardwareBudget
from neuroshard.runs.stored_runs import LocalRun
from neuroshard.status.board import Publisher, StartupProgress, StatusBoard
from neuroshard.status.computer import MemoryStatus
from neuroshard.status.snapshot import NodeState, NodeStatus
from neuroshard.types import Architecture, NodeId
from tests.worlds.claims import identity_of

STAGES = 2
LARGEST_TOKENIZER = 1 << 20
REPORT_SECONDS = 0.05


@dataclass(eq=False)
class RealNode:
    """One node. `training` makes its parts; `node` are the present ones."""

    swarm: StageSwarm
    membership: Membership
    networking: Networking
    training: StageTraining
    ground: NodeContext
    board: StatusBoard
    publisher: Publisher
    data_dir: Path
    settings: Settings  # that hold now
    requested_pause: RequestedPause
    node: RunningNode | None = None
    sequence: int = 0

    def report(self, run_id: str) -> TrainingReport:
        self.sequence += 1
        held, node = self.swarm.held, self.node
        layers = None if held is None else held.layers(self.swarm.plan)
        state = NodeState.STARTING if node is None else node.trainer.snapshot().state
        return TrainingReport(
            run_id=self.swarm.run_id,
            sequence=self.sequence,
            steps=0 if node is None else node.trainer.steps,
            tokens=0,
            loss_ema=None,
            shard=None,
            shards_seen=0,
            roles=() if layers is None else layers.roles(STAGES),
            layers=layers,
            outer_step=0,
            state_hash="",
            successful_syncs=0,
            failed_syncs=0,
            tokens_per_second=1.0,
            state=NodeState.TRAINING if state is NodeState.STARTING and node is not None else state,
            started_at=time(),
            interval_seconds=10.0,
        )

    async def begin(self, stage: int) -> RunningNode:
        """Hold a stage of the run from now on."""
        self.node = None
        self.node = await self.training.begin(self.ground, StageRange(stage, stage + 1))
        return self.node

    async def live(self) -> None:
        """Be reachable until cancelled."""
        self.networking.attach(self.swarm.live)
        await self.networking.run()


@dataclass
class RealWorld:
    """All nodes of the run, which hear of each other many times a second."""

    genesis: Path
    folder: Path
    run: LocalRun
    network: InMemoryNetwork
    compute: ComputeThread
    nodes: dict[NodeId, RealNode] = field(default_factory=dict[NodeId, RealNode])

    async def node(self, number: int, data_dir: Path | None = None) -> RealNode:
        """A node that holds nothing yet; one with the same number takes its place."""
        data_dir = data_dir or self.folder / f"node-{number}"
        identity = identity_of(number)
        name = identity.node_id
        membership = Membership(name, identity.wallet_id)
        networking = Networking(name, partial(self._open, name), peers_file=data_dir / "peers", loopback_only=True)
        swarm = StageSwarm(identity, RunVersions(self.run.offer), membership, networking)
        board = StatusBoard(NodeStatus("test", time(), time()))
        publisher = Publisher(board)
        startup = StartupProgress(publisher, (CHECKPOINT, FIRST_STEP))
        settings = Settings(data_dir=data_dir, cpu_threads=1, max_storage=100)
        fetcher = Fetcher(open_source(str(self.genesis)))
        shelf = open_data_store(settings)
        data = await open_joined_data(fetcher, shelf.store, self.run, LARGEST_TOKENIZER)
        memory = MemoryStatus(500, 500, "given", 0, 0, 0)
        room, device = HardwareBudget(500, "cpu", None, 1e9), Device("cpu", "test")
        watch = SourceMonitor(data.genesis, self.run.parameters.genesis)
        ground = NodeContext(self.run, data, fetcher, self.compute, device, 1, room, memory, swarm, shelf, watch, ())
        requested_pause = RequestedPause()
        training = StageTraining(
            lambda: made.settings, identity, publisher, startup, requested_pause=requested_pause, is_demo=False
        )
        made = RealNode(
            swarm, membership, networking, training, ground, board, publisher, data_dir, settings, requested_pause
        )
        self.nodes[name] = made
        return made

    async def keep_reporting(self) -> None:
        while True:
            for name, node in self.nodes.items():
                report = node.report(self.run.run_id)
                node.membership.count_own_report(report, b"", time())
                said = Statement(name, node.swarm.wallet_id, time(), time() + 1e6, report)
                for other in self.nodes.values():
                    if other is not node:
                        other.membership.hear_report(said, time())
            await anyio.sleep(REPORT_SECONDS)

    @asynccontextmanager
    async def _open(self, name: NodeId) -> AsyncGenerator[Network]:
        self.network.join(name)
        try:
            yield self.network.network_of(name)
        finally:
            self.network.kill(name)


def play(genesis: Path, folder: Path, scenario: Callable[[RealWorld], Awaitable[None]], **changes: int) -> None:
    """Run a scenario; `changes` of the run's parameters."""

    async def main() -> None:
        pins = await pins_of_source(
            str(genesis), folder / "look", wanted=None, max_tokenizer_bytes=LARGEST_TOKENIZER, seconds=10
        )
        shape = Architecture(32, STAGES, 2, 1, 64, pins.next_merge_id, 32)
        values = {"batch_size": 1, "sequences_per_step": 4, **changes}
        parameters = RunParameters(
            "test", 1, shape, STAGES, values["batch_size"], values["sequences_per_step"], 7, pins
        )
        owner = Wallet.from_secret(TokenSecret("hex", bytes(32)))
        run = LocalRun.of(RunOffer.of_new_run(SignedRunParameters.sign(owner, parameters)), is_joined=True)
        compute = ComputeThread(1)
        try:
            with InMemoryNetwork() as network, anyio.fail_after(30):
                await scenario(RealWorld(genesis, folder, run, network, compute))
        finally:
            compute.close()

    trio.run(main)
