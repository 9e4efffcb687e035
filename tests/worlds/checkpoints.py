"""Checkpoints of one stage: small ones whose values show their step, and nodes in memory that transfer their state.

Real: the format of the checkpoints, the stage of the donors and the whole transfer. Simulated: the tensors of the small
checkpoints, the network and the clock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import anyio
import torch
import trio
from torch import Tensor
from trio.testing import MockClock

from neuroshard.config.run_parameters import RunParameters
from neuroshard.consensus.committee import ChangeParameters
from neuroshard.consensus.effects import AnyBody
from neuroshard.consensus.foundation import SignedFoundation
from neuroshard.consensus.round_messages import VerifiedBody
from neuroshard.consensus.round_runner import RoundDependencies
from neuroshard.consensus.stage_chain import InMemoryChainStore, StageChain
from neuroshard.consensus.sync_strategies import snapshot_layout
from neuroshard.consensus.vote_log import InMemoryVoteLog
from neuroshard.identity.node_revocations import RevokedPairs
from neuroshard.membership.download_rights import Readers
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import InMemoryNetwork, ScoreReason, Transport
from neuroshard.optim.outer import LineProgress, OuterState
from neuroshard.pipeline.executor import ComputeThread, Precision
from neuroshard.state.checkpoint_manifest import CheckpointMeta
from neuroshard.state.checkpoint_saver import StateCapture
from neuroshard.state.checkpoint_store import Expectation
from neuroshard.state.download import ReceivingOptions, ReplicaClient, StageFile
from neuroshard.state.outer_state import OuterProgress, state_root
from neuroshard.state.receiver import StateReceiver
from neuroshard.state.replica_status import REPLICA_STATUS, STATUS_REQUEST
from neuroshard.state.snapshot_server import DonorLimits, SnapshotServer
from neuroshard.state.stage_tensors import stage_tensors
from neuroshard.state.staging_buffers import StagingBuffers
from neuroshard.state.tensor_file import TensorLayout
from neuroshard.state.transfer_messages import (
    CHUNK,
    CHUNK_REQUEST,
    COPIED,
    COPY_REPORT,
    MANIFEST,
    MANIFEST_REQUEST,
    RECEIVED,
    RECEIVED_NOTICE,
    ChunkRequest,
    StageName,
)
from neuroshard.training.outer_sync import OuterSync
from neuroshard.training.record import Progress, StageIdentity, TrainingRecord, to_meta
from neuroshard.training.stage_checkpoint import Stage
from neuroshard.training.stage_replica import StageReplica
from neuroshard.types import Architecture, DataPosition, LayerRange, NodeId, RunId, ShardId, WalletId
from tests.worlds.clock import at_once
from tests.worlds.stages import PARAMETERS, make_stage

SHAPE = Architecture(8, 2, 2, 1, 16, 100, 32)
LAYERS = LayerRange(0, 2)
EXPECTED = Expectation(WalletId("w" * 16), RunId("r" * 64), SHAPE, LAYERS)


def tensors_at(step: int, size: int = 50) -> dict[str, Tensor]:
    """Values that tell their step; types of every width and shapes of 0 to 3 dimensions."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model/embedding.weight": torch.randn(size, 3, generator=generator),
        "model/layers.0.norm.weight": torch.full((1, 2, 3), float(step)),
        "inner/layers.0.norm.weight/step": torch.tensor(float(step)),
        "inner/layers.0.norm.weight/exp_avg": torch.randn(7, generator=generator).bfloat16(),
        "extra/count": torch.tensor([step, -step], dtype=torch.int64),
        "extra/empty": torch.zeros(0, 4),
        "outer/anchor": torch.randn(size, generator=generator),
    }


def meta_at(step: int, *, outer_step: int = 0, inner_step: int = 0, shape: Architecture = SHAPE) -> CheckpointMeta:
    return CheckpointMeta(
        wallet_id=EXPECTED.wallet_id,
        node_id=NodeId("node"),
        run_id=EXPECTED.run_id,
        architecture=shape,
        layers=LAYERS,
        step=step,
        time=1000.0 + step,
        loss=0.1 + step,
        outer_step=outer_step,
        inner_step=inner_step,
        data_position=DataPosition(1, ShardId(2), 3),
    )


def staged(step: int, size: int = 50) -> StagingBuffers:
    tensors = tensors_at(step, size)
    staging = StagingBuffers(TensorLayout.of(tensors))
    staging.copy_from(tensors)
    return staging


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        value.dtype == second[name].dtype and torch.equal(value, second[name]) for name, value in first.items()
    )


Value = TypeVar("Value")

ARCHITECTURE = Architecture(
    hidden_size=96,
    layer_count=3,
    head_count=2,
    key_value_head_count=1,
    feed_forward_size=512,
    vocabulary_size=512,
    sequence_length=16,
)
RUN = RunId("1" * 64)
DONOR_LAYERS = LayerRange(1, 3)
NAME = StageName(RUN, DONOR_LAYERS)
MODEL: RunParameters = replace(PARAMETERS, architecture=ARCHITECTURE, stage_count=2)
FILE = StageFile(NAME, ARCHITECTURE, snapshot_layout(ARCHITECTURE, DONOR_LAYERS))
NOW = 1_000_000.0
HERE = NodeId("here")


def identity_of(node: str) -> StageIdentity:
    return StageIdentity(WalletId(f"{len(node):016x}"), NodeId(node), RUN, ARCHITECTURE, DONOR_LAYERS, 1)


@dataclass
class DonorNode:
    """A node that trains the stage."""

    name: NodeId
    stage: Stage
    replica: StageReplica
    donor: SnapshotServer
    compute: ComputeThread
    chunks_given: list[int] = field(default_factory=list[int])
    dies_after: int | None = None  # so many chunks
    strangers: set[NodeId] = field(default_factory=set[NodeId])
    reports: list[tuple[NodeId, ScoreReason]] = field(default_factory=list[tuple[NodeId, ScoreReason]])

    @property
    def record(self) -> TrainingRecord:
        return self.replica.record

    @property
    def outer(self) -> OuterSync:
        return self.replica.outer

    async def give_chunk(self, sender: NodeId, frame: Frame) -> Frame:
        """Count, and end the node when its time has come."""
        if self.dies_after is not None and len(self.chunks_given) >= self.dies_after:
            self.network.kill(self.name)
            await anyio.sleep_forever()
        self.chunks_given.append(frame.read(ChunkRequest).index)
        return await self.donor.give_chunk(sender, frame)

    def join(self, network: InMemoryNetwork) -> None:
        """Serve on this network."""
        self.network = network
        transport = network.join(self.name)
        transport.serve(REPLICA_STATUS, self.donor.give_status, STATUS_REQUEST)
        transport.serve(MANIFEST, self.donor.give_manifest, MANIFEST_REQUEST)
        transport.serve(CHUNK, self.give_chunk, CHUNK_REQUEST)
        transport.serve(RECEIVED, self.donor.note_received, RECEIVED_NOTICE)
        transport.serve(COPIED, self.donor.note_copy, COPY_REPORT)

    def save(self, step: int) -> None:
        """Take a checkpoint as if after this step."""
        self.record.progress = replace(self.record.progress, steps=step)
        meta = to_meta(
            self.record,
            outer=self.outer.progress,
            outer_step=self.outer.state.outer_step,
            line=self.outer.state.line,
            identity=identity_of(self.name),
            precision=Precision.FP32,
            time=NOW + anyio.current_time() if _is_in_loop() else NOW,
        )
        tensors = stage_tensors(self.stage.executor.model, self.stage.executor.optimizer, self.outer.state)
        self.compute.submit(lambda: self.stage.keeper.save(lambda: StateCapture(meta, tensors))).result()


def _is_in_loop() -> bool:
    try:
        anyio.get_current_task()
    except RuntimeError:
        return False
    return True


def donor_node(
    compute: ComputeThread,
    folder: Path,
    name: str,
    *,
    weights: int,
    outer: int = 3,
    outer_seed: int = 0,
    peers: Sequence[NodeId] = (),
    readers: Readers | None = None,
) -> DonorNode:
    """`weights` and `outer_seed` make other weights and moments, and another anchor and velocity.

    `peers` are the stage's other replicas, and `readers` wait for a place in the run.
    """
    stage = make_stage(compute, folder / name, MODEL, identity_of(name))
    generator = torch.Generator().manual_seed(weights)
    for tensor in stage_tensors(stage.executor.model, stage.executor.optimizer, stage.outer_state).values():
        if tensor.dim():
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
    agreed = torch.Generator().manual_seed(outer_seed)
    size = stage.outer_state.anchor.shape
    line = LineProgress(1200)
    state = OuterState(torch.rand(size, generator=agreed), torch.rand(size, generator=agreed), outer, line)
    progress = OuterProgress(inner_steps=2, sequences=8, members=2, state_root=state_root(state), since_round=8)
    record = TrainingRecord(Progress(steps=40, tokens=4000, sequences=160, loss_ema=3.25))
    stage = replace(stage, outer_state=state, outer_progress=progress, record=record)

    def now() -> float:
        return NOW + anyio.current_time()

    around = None
    if peers:
        chain = StageChain(lambda: None, InMemoryChainStore())
        around = RoundDependencies(KnownPeers(peers), ReplicaClient(NoRequester()), InMemoryVoteLog(), chain)
    replica = StageReplica(
        compute, stage, identity_of(name), MODEL, 1, versions=lambda _: MODEL, around=around, now=now
    )
    limits = DonorLimits(receivers=2, wait_seconds=5.0)
    strangers, reports = set[NodeId](), list[tuple[NodeId, ScoreReason]]()
    donor = SnapshotServer(
        lambda node: node not in strangers,
        limits,
        now=now,
        offload=at_once,
        report=lambda node, reason: reports.append((node, reason)),
        readers=readers,
    )
    node = DonorNode(NodeId(name), stage, replica, donor, compute, strangers=strangers, reports=reports)
    node.donor.offer(NAME, replica)
    return node


@dataclass(frozen=True)
class KnownPeers:
    """Other replicas of the stage, which this node never looks at; implements RunSwarm."""

    peers: Sequence[NodeId]
    may_meet: bool = True
    word: SignedFoundation | None = None
    changes: tuple[ChangeParameters, ...] = ()

    def replicas(self, stage: int) -> Sequence[NodeId]:
        return self.peers

    def newcomers(self) -> frozenset[NodeId]:
        return frozenset()

    def wallet_of(self, node_id: NodeId) -> WalletId | None:
        return None

    def is_removed(self, wallet: WalletId) -> bool:
        return False

    @property
    def revoked(self) -> RevokedPairs:
        return frozenset()

    def sign(self, body: AnyBody) -> VerifiedBody[AnyBody]:
        raise AssertionError("nothing is signed here")


class NoRequester:
    """No request is sent."""

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        raise AssertionError("no request is expected here")


@dataclass
class World:
    """Everybody joined, with what was reported of peers by the one that needs the state."""

    network: InMemoryNetwork
    transport: Transport
    receiver: StateReceiver
    reports: list[tuple[NodeId, ScoreReason]]


def play(scenario: Callable[[World], Awaitable[Value]], *donors: DonorNode) -> Value:
    """Run a scenario among these donors under a virtual clock that never waits."""
    reports: list[tuple[NodeId, ScoreReason]] = []

    async def main() -> Value:
        with InMemoryNetwork() as network:
            for node in donors:
                node.join(network)
            transport = network.join(HERE)
            asking = ReplicaClient(transport, lambda peer, reason: reports.append((peer, reason)), at_once)
            with anyio.fail_after(10_000):
                return await scenario(
                    World(network, transport, StateReceiver(asking, FILE, ReceivingOptions()), reports)
                )

    try:
        return trio.run(main, clock=MockClock(autojump_threshold=0))
    finally:
        for node in donors:
            node.donor.close()
