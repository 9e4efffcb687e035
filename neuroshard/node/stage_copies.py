"""Keeps copies of stages that only one other node trains, so that no stage is lost with one computer."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial

import anyio
import anyio.to_thread

from neuroshard.config.run_parameters import InnerOptimization, OuterOptimization
from neuroshard.config.settings import Settings
from neuroshard.consensus.stage_chain import FileChainStore, StageChain
from neuroshard.consensus.sync_strategies import snapshot_layout
from neuroshard.consensus.vote_log import ROUNDS_FOLDER
from neuroshard.errors import StorageError
from neuroshard.identity import hash_parts
from neuroshard.network.blocking import BlockingRunner
from neuroshard.node.stage_swarm import HOLDING, StageSwarm
from neuroshard.state.backup_copy import PARTIAL_FILE, BackupCopy
from neuroshard.state.disk_space import check_space, copy_folder
from neuroshard.state.download import PartialFile, ReceivingOptions, StageFile
from neuroshard.state.receiver import StateReceiver
from neuroshard.state.replica_status import query_statuses
from neuroshard.state.transfer_messages import DonorError, SnapshotManifest, StageName
from neuroshard.types import Architecture, LayerRange, NodeId, WalletId
from neuroshard.waiting import sleep_to_tick

RANKS = 4  # number of nodes, in order of rank, that may keep a copy of one stage
MOST_OF_A_WALLET = 8  # nodes of one wallet among the first to be asked for a copy


def rank_of(swarm: StageSwarm, stage: int, holder: NodeId) -> int:
    """This node's rank, from 0, among the nodes that may keep the copy of this holder's stage.

    A node that is lost, or that reports layers it does not hold, has no place.
    """
    members = swarm.membership.view.members
    able = {
        node: member.wallet_id
        for node, member in members.items()
        if member.report.layers is not None and member.report.state in HOLDING and node not in swarm.lost
    }
    able[swarm.node_id] = swarm.wallet_id
    wallet = members[holder].wallet_id if holder in members else None
    order = _in_order(swarm, swarm.plan[stage], able.keys() - {holder})
    order.sort(key=lambda node: able[node] == wallet)  # stable: computers of one owner are often switched off together
    return order.index(swarm.node_id)


def likely_keepers(swarm: StageSwarm, layers: LayerRange, most: int) -> list[NodeId]:
    """Other nodes that most likely keep a copy of a stage, the likeliest first; its holder may be unknown.

    `rank_of` puts nodes of the holder's wallet last. Here the holder's wallet is not known, so each wallet has at
    most MOST_OF_A_WALLET of the first places.
    """
    members = swarm.membership.view.members
    able = [
        node
        for node, member in members.items()
        if node != swarm.node_id and node not in swarm.lost and member.report.layers is not None
    ]
    asked, later = list[NodeId](), list[NodeId]()
    counts = Counter[WalletId]()
    for node in _in_order(swarm, layers, able):
        wallet = members[node].wallet_id
        counts[wallet] += 1
        (asked if counts[wallet] <= MOST_OF_A_WALLET else later).append(node)
    return [*asked, *later][:most]


def _in_order(swarm: StageSwarm, layers: LayerRange, nodes: Iterable[NodeId]) -> list[NodeId]:
    """Order nodes by rendezvous hashing, so that every node computes the same order without a message."""
    return sorted(
        nodes, key=lambda node: hash_parts("neuroshard/second-copy", swarm.run_id, layers.start, layers.stop, node)
    )


@dataclass(frozen=True)
class CopyTimes:
    """How often a copy is renewed, and the share of the holder's bandwidth that this may use."""

    every_seconds: float = 30.0  # target age of a copy, if bandwidth and write budget allow it
    lead_seconds: float = 8.0  # a renewal begins this long before the target age
    fresh_seconds: float = 10.0  # instead of a snapshot older than this the holder makes a new one, if it may
    look_seconds: float = 1.0
    retry_seconds: float = 5.0  # between tries of rank 0 while its copy is missing or old
    stale_seconds: float = 90.0  # age of another node's copy at which the next rank makes one too
    turn_seconds: float = 20.0  # each rank waits this long for the rank before it
    ranks: int = RANKS
    share: float = 0.5  # of the holder's bandwidth


def copy_is_due(
    times: CopyTimes, rank: int, age_seconds: float | None, *, single_seconds: float, waited: float | None
) -> bool:
    """Decide whether to ask the holder for its state now.

    `age_seconds` is the age of the copy here (None: no copy), `single_seconds` the time since the stage has had a
    single holder, and `waited` the time since the last try (None: no try).
    """
    if rank >= times.ranks or single_seconds < rank * times.turn_seconds:
        return False
    pause = times.retry_seconds if rank == 0 else times.every_seconds
    is_old = age_seconds is None or age_seconds >= times.every_seconds - times.lead_seconds
    return is_old and (waited is None or waited >= pause)


_LOG = logging.getLogger(__name__)


@dataclass
class _Duty:
    """State of the copy that this node keeps, or may have to keep, of one stage."""

    copy: BackupCopy
    chain: StageChain  # next to the copy: with it this wallet can show that it is the stage's heir
    stage: StageName
    architecture: Architecture
    outer: OuterOptimization
    inner: InnerOptimization
    single_since: float | None = None  # when its holder became the only one, by the event loop's clock
    tried_at: float | None = None
    has_trouble: bool = False
    is_ahead: bool = False  # whether the copy has more work than the holder's state

    @property
    def name(self) -> str:
        """The stage's layers, for log messages."""
        return f"layers {self.stage.layers.start + 1}-{self.stage.layers.stop}"

    @cached_property
    def file(self) -> StageFile:
        """Layout that a received state must have."""
        layout = snapshot_layout(self.architecture, self.stage.layers, self.outer, self.inner)
        return StageFile(self.stage, self.architecture, layout)


@dataclass
class StageCopies:
    """Keeps this node's copies of all stages. `run` continues while the node moves between stages."""

    swarm: StageSwarm
    settings: Callable[[], Settings]
    architecture: Architecture
    times: CopyTimes = field(default_factory=CopyTimes)
    now: Callable[[], float] = time.time
    offload: BlockingRunner = anyio.to_thread.run_sync

    def __post_init__(self) -> None:
        data_dir, run_id = self.settings().data_dir, self.swarm.run_id
        self._fetching = defaultdict[NodeId, anyio.Lock](anyio.Lock)  # at most one download per holder
        self._duties = [
            _Duty(
                BackupCopy(copy_folder(data_dir, run_id, layers), self.now),
                StageChain(
                    partial(self.swarm.versions.founding_of, stage),
                    FileChainStore(copy_folder(data_dir, run_id, layers) / ROUNDS_FOLDER, data_dir),
                    self.offload,
                ),
                self.swarm.name_of(layers),
                self.architecture,
                self.swarm.outer,
                self.swarm.inner,
            )
            for stage, layers in enumerate(self.swarm.plan)
        ]

    def kept(self, stage: int) -> BackupCopy:
        """Return this node's copy of a stage, which may be empty."""
        return self._duties[stage].copy

    async def load(self) -> None:
        """Load the copies that an earlier start stored, and offer them to other nodes."""
        for duty in self._duties:
            await self.offload(duty.copy.load)
            await duty.chain.load()
            self.swarm.rounds.add_copied(duty.stage, duty.chain)
            if duty.copy.meta is not None:
                self.swarm.donor.keep(duty.stage, duty.copy)

    async def run(self) -> None:
        """Maintain the copies until cancelled, each in its own task, so that a slow one delays no other."""
        async with anyio.create_task_group() as tasks:
            for stage in range(len(self._duties)):
                tasks.start_soon(self._keep_looking_after, stage)

    async def _keep_looking_after(self, stage: int) -> None:
        while True:
            await self._look_after(stage)
            await sleep_to_tick(self.times.look_seconds)

    async def _look_after(self, stage: int) -> None:
        """Renew a copy when it is this node's turn; drop it when this node trains the stage itself."""
        duty, now = self._duties[stage], anyio.current_time()
        held = self.swarm.held
        if held is not None and stage in held:
            duty.single_since = None
            await self._drop_overtaken(duty)
            return
        holder = self._single_holder(stage)
        if holder is None:
            duty.single_since = None
            return
        duty.single_since = now if duty.single_since is None else duty.single_since
        rank = rank_of(self.swarm, stage, holder)
        age = duty.copy.age_seconds
        waited = None if duty.tried_at is None else now - duty.tried_at
        if copy_is_due(self.times, rank, age, single_seconds=now - duty.single_since, waited=waited):
            duty.tried_at = now
            await self._renew(duty, holder, is_first=rank == 0)

    async def _renew(self, duty: _Duty, holder: NodeId, *, is_first: bool) -> None:
        try:
            status = (await query_statuses(self.swarm.asking, duty.stage, [holder])).get(holder)
            if status is None or not status.is_live or status.steps == 0:
                return
            others_copy = status.copied_seconds
            if not is_first and others_copy is not None and others_copy < self.times.stale_seconds:
                return  # the node whose turn it is renews it
            if self._is_overtaken(duty, status.work, holder):
                async with self._fetching[holder]:
                    await self._pull(duty, holder)
        except DonorError as error:
            _LOG.debug("The copy of %s is not renewed: %s", duty.name, error)
        except StorageError as error:
            if not duty.has_trouble:
                _LOG.warning("No copy of %s is kept here: %s", duty.name, error)
            duty.has_trouble = True

    async def _pull(self, duty: _Duty, holder: NodeId) -> None:
        options = ReceivingOptions(chunks_at_once=1, share=self.times.share)
        receiver = StateReceiver(self.swarm.asking, duty.file, options)
        manifest = await receiver.manifest(holder, self.times.fresh_seconds)
        kept_at: float | None = None
        try:
            if await self._copy(duty, receiver, holder, manifest):
                kept_at = manifest.meta.time
        finally:  # also of a copy that failed: otherwise the holder keeps this node's place for minutes
            with suppress(DonorError):
                await receiver.report_copied(holder, kept_at)
        if kept_at is not None:
            await duty.chain.learn_from(self.swarm.asking, duty.stage, [holder])

    async def _copy(self, duty: _Duty, receiver: StateReceiver, holder: NodeId, manifest: SnapshotManifest) -> bool:
        """Download a holder's state and keep it, unless the copy has as much work. Raises DonorError, StorageError."""
        file_bytes = duty.file.layout.file_bytes
        taken_at = self.now() - manifest.age_seconds  # converted to this computer's clock
        work = manifest.meta.outer_step, manifest.meta.step
        if work == duty.copy.work or not self._is_overtaken(duty, work, holder):
            return False
        limit = self.settings().max_checkpoint_storage * 1_000_000
        data_dir = self.settings().data_dir
        await self.offload(partial(check_space, duty.copy.folder, file_bytes, data_dir, limit))
        into = PartialFile(duty.copy.folder / PARTIAL_FILE, file_bytes)
        present = duty.copy.tensor_file
        received = await receiver.fetch(holder, {holder: manifest}, into, () if present is None else (present,))
        with anyio.CancelScope(shield=True):
            await self.offload(partial(duty.copy.keep, received, taken_at))
        self.swarm.donor.keep(duty.stage, duty.copy)
        duty.has_trouble = False
        _LOG.debug("Copy of %s of step %d kept.", duty.name, manifest.meta.step)
        return True

    def _is_overtaken(self, duty: _Duty, work: tuple[int, int], holder: NodeId) -> bool:
        """Whether the holder's state may replace the copy: not if it has less work, which would be lost."""
        kept = duty.copy.work
        was_ahead, duty.is_ahead = duty.is_ahead, kept is not None and work < kept
        if duty.is_ahead and not was_ahead:
            _LOG.warning(
                "This node's copy of %s has more steps than node %s. It is kept until that node has caught up.",
                duty.name,
                holder,
            )
        return not duty.is_ahead

    async def _drop_overtaken(self, duty: _Duty) -> None:
        """Delete the copy of a stage that this node trains once its own state has at least as much work."""
        own, kept = self.swarm.donor.replica_status(duty.stage), duty.copy.work
        if kept is not None and own is not None and own.is_live and own.work >= kept:
            self.swarm.donor.drop(duty.stage)
            await self.offload(duty.copy.forget)

    def _single_holder(self, stage: int) -> NodeId | None:
        """The only other node that holds the stage; None if there are several or none, or if it is this node."""
        holder = self.swarm.sole_holder(stage)
        return None if holder == self.swarm.node_id else holder
