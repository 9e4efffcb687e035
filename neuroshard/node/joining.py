"""Brings the state of a stage to this node before it trains the stage, and tracks how safe each stage's state is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from neuroshard.consensus.sync_strategies import parts_of, snapshot_layout
from neuroshard.consensus.vote_log import KEPT_STEPS, ROUNDS_FOLDER, FileVoteLog
from neuroshard.errors import StorageError
from neuroshard.network import ScoreReason
from neuroshard.network.blocking import BlockingRunner
from neuroshard.network.tasks import accompanied
from neuroshard.node.stage_copies import likely_keepers
from neuroshard.node.stage_swarm import GONE, ReportedCopy, StageSwarm
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.download import DownloadProgress, PartialFile, StageFile
from neuroshard.state.outer_state import may_download_averaged, outer_root
from neuroshard.state.receiver import ReceivedState, StateReceiver
from neuroshard.state.replica_status import ReplicaStatus, choose_donor, query_statuses
from neuroshard.state.transfer_messages import ANY, ANY_AGE, DonorError, LyingDonorError, SnapshotManifest, StageName
from neuroshard.training.record import StageIdentity
from neuroshard.training.state_transfer import install
from neuroshard.types import LayerRange, NodeId

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
HEAR_SECONDS = 0.1
PATIENCE_SECONDS = 5.0
TELL_SECONDS = 0.5
FRESH_SECONDS = 30.0  # a donor's snapshot may be so old; of an older one a new one is made
MOST_DONORS = 4
MOST_ASKED = 16  # of those that may keep a copy
PARTIAL_FILE, PARTIAL_NAME = "incoming.part", "incoming.snapshot"

Tell = Callable[[str], None]


@dataclass
class Joining:
    """For one stage, once. `tell` shows people what is waited for."""

    swarm: StageSwarm
    identity: StageIdentity
    store: CheckpointStore
    tell: Tell
    expects_others: bool = True  # a run that this node was invited to
    may_catch_up: bool = False  # with rounds that ended while it was away, by their aggregates
    offload: BlockingRunner = anyio.to_thread.run_sync
    tell_percent: Callable[[int], None] = lambda _: None  # of the state that is fetched
    _liars: set[NodeId] = field(default_factory=set[NodeId])
    _waits_since: float | None = None  # for a young step

    def __post_init__(self) -> None:
        layers = self.identity.layers
        self._layout = snapshot_layout(self.identity.architecture, layers, self.swarm.outer)
        file = StageFile(self.swarm.name_of(layers), self.identity.architecture, self._layout)
        self._stage = file.stage
        self._receiver = StateReceiver(self.swarm.asking, file)

    async def prepare(self) -> bool:
        """Return when this node may train: with a state of its own that is good, or one it has fetched, or a new run.

        Whether there is a state that must be restored. Waits while somebody has trained the stage and nobody gives its
        state. Raises StorageError.
        """
        own = await self.offload(self._own_standing)
        if own is None and self.expects_others:
            await self._hear_of_others()
        while True:
            asked = candidates(self.swarm, self.identity.layers)
            standings = await query_statuses(self.swarm.asking, self._stage, asked)
            standings |= local_copy(self.swarm, self._stage)
            best = choose_donor({node: told for node, told in standings.items() if node not in self._liars}, own)
            if best is None:
                if own is not None or not was_trained(self.swarm):
                    return own is not None
                self.tell(f"{_named(self.identity.layers)} were trained, but nobody who answers has them: waiting.")
            elif await self._may_go_on(own, standings[best]) or (
                self._may_begin(standings[best], standings.values()) and await self._joined(best, standings)
            ):
                return True
            await anyio.sleep(LOOK_SECONDS)

    async def _may_go_on(self, own: ReplicaStatus | None, best: ReplicaStatus) -> bool:
        """Whether the rounds between the own state and the best are few, and the first can be asked for.

        This node knows its end, or its voters by the certificate before. Then it trains on from its own state and takes
        over how they have ended; if nobody tells that, it follows.
        """
        if own is None or not self.may_catch_up or not best.is_live:
            return False
        kept = KEPT_STEPS * parts_of(self.swarm.versions.at(own.outer_step).outer)
        if not 0 < best.outer_step - own.outer_step <= kept:
            return False
        ended = await self.offload(FileVoteLog(self.store.folder / ROUNDS_FOLDER).ended)
        return any(own.root in (certificate.value.root, certificate.value.next_root) for certificate in ended)

    def _may_begin(self, best: ReplicaStatus, standings: Iterable[ReplicaStatus]) -> bool:
        """Whether to fetch the best state now: averaged gradients change all of it at every step.

        That of a lone node at once: its steps wait for whoever fetches it.
        """
        outer, on_line = self.swarm.outer, [told for told in standings if told.is_live and told.line == best.line]
        if outer.strategy != "averaging" or len(on_line) < 2:
            return True
        now = anyio.current_time()
        self._waits_since = now if self._waits_since is None else self._waits_since
        counted = sum(told.sequences for told in on_line)
        if may_download_averaged(counted, outer.averaged_sequences, now - self._waits_since):
            return True
        self.tell(f"{_named(self.identity.layers)} are fetched after the next step of those who train them.")
        return False

    async def _hear_of_others(self) -> None:
        """Wait a little for the first word of anybody."""
        with anyio.move_on_after(PATIENCE_SECONDS):
            while len(self.swarm.membership.view.members.keys() - {self.swarm.node_id}) == 0:
                await anyio.sleep(HEAR_SECONDS)

    async def _joined(self, first: NodeId, standings: Mapping[NodeId, ReplicaStatus]) -> bool:
        """Fetch and install the state; whether it worked."""
        try:
            await self.offload(partial(self.store.ensure_room, self._layout.file_bytes))
            received = await self._fetched(first, standings)
            await self.offload(partial(install, received, self.identity, self.store))
        except LyingDonorError as error:
            self._liars.add(first)
            log.warning("What node %s gives of %s is not used: %s", first, _named(self.identity.layers), error)
        except DonorError as error:
            self.tell(f"{_named(self.identity.layers)} cannot be fetched at the moment: {error.message}")
            log.info("Fetching %s is tried again: %s", _named(self.identity.layers), error)
        else:
            step = received.manifest.meta.step
            log.info("%s came from node %s as of step %s.", _named(self.identity.layers), first, f"{step:,}")
            return True
        return False

    async def _fetched(self, first: NodeId, standings: Mapping[NodeId, ReplicaStatus]) -> ReceivedState:
        preferred, name = ANY, self.store.folder / PARTIAL_NAME
        with suppress(OSError):
            preferred = await self.offload(partial(name.read_text, encoding="ascii"))
        if first == self.swarm.node_id:
            manifests = {first: await self.swarm.donor.own_manifest(self._stage)}
        else:
            manifests = {first: await self._receiver.manifest(first, FRESH_SECONDS, preferred)}
        await self.offload(partial(_note, name, manifests[first].snapshot))
        line = standings[first].line
        others = [node for node, told in standings.items() if told.line == line and told.is_live and node != first]
        async with anyio.create_task_group() as tasks:
            for node in sorted(others)[: MOST_DONORS - 1]:
                tasks.start_soon(self._add_manifest, node, manifests)
        into = PartialFile(self.store.folder / PARTIAL_FILE, self._layout.file_bytes)
        reuse = await self.offload(self._own_files)
        received = await accompanied(partial(self._receiver.fetch, first, manifests, into, reuse), self._keep_telling)
        await self.offload(partial(_note, name, None))
        told, meta = standings[first], received.manifest.meta
        if told.root and meta.outer_step == told.outer_step and received.root != told.root:
            self.swarm.asking.report(first, ScoreReason.DIGEST_MISMATCH)
            raise LyingDonorError("Its state is not the one whose root it named.")
        return received

    async def _add_manifest(self, node: NodeId, manifests: dict[NodeId, SnapshotManifest]) -> None:
        """A further donor, for the chunks that are the same at it."""
        with suppress(DonorError):
            manifests[node] = await self._receiver.manifest(node, ANY_AGE)

    async def _keep_telling(self) -> None:
        while True:
            progress = self._receiver.progress
            self.tell(_told(self.identity.layers, progress))
            self.tell_percent(100 * progress.bytes_done // max(1, progress.bytes_total))
            await anyio.sleep(TELL_SECONDS)

    def _own_standing(self) -> ReplicaStatus | None:
        """Of the newest checkpoint, if steps were made; blocks."""
        generations = self.store.generations()
        if not generations or generations[0].step == 0:
            return None
        newest = generations[0]
        manifest = self.store.read_manifest(Path(newest.path))
        tensors = Path(newest.path).with_name(manifest.tensors.file)
        try:
            root = outer_root(tensors, self._layout, newest.outer_step)
        except OSError:
            root = ""  # the restore will tell what is wrong with it
        return ReplicaStatus(is_live=True, steps=newest.step, outer_step=newest.outer_step, root=root)

    def _own_files(self) -> list[Path]:
        """Files that may hold some of the chunks already; blocks."""
        local = self.swarm.donor.local(self._stage)
        newest = [*self.store.generations()[:1], None if local is None else local.newest()]
        files = list[Path]()
        for generation in newest:
            with suppress(StorageError):
                if generation is not None:
                    path = Path(generation.path)
                    files.append(path.with_name(self.store.read_manifest(path).tensors.file))
        return files


def was_trained(swarm: StageSwarm) -> bool:
    """Whether any stage of the run has made steps: then all have, because a step needs all of them."""
    view = swarm.membership.view
    reports = [member.report for member in view.members.values()]
    return view.total_steps > 0 or any(report.steps > 0 or report.outer_step > 0 for report in reports)


async def is_obtainable(swarm: StageSwarm, stage: int) -> bool:
    """Whether somebody who answers has a stage's state, or it does not exist yet."""
    name = swarm.name_of(stage)
    standings = await query_statuses(swarm.asking, name, candidates(swarm, name.layers)) | local_copy(swarm, name)
    return choose_donor(standings) is not None or not was_trained(swarm)


def local_copy(swarm: StageSwarm, stage: StageName) -> dict[NodeId, ReplicaStatus]:
    """The copy of the stage that this node keeps itself."""
    standing = swarm.donor.standing(stage)
    return {} if standing is None or standing.is_live else {swarm.node_id: standing}


def candidates(swarm: StageSwarm, layers: LayerRange) -> list[NodeId]:
    """Whom to ask for a stage's state: all that hold it, and those others that most likely keep a copy."""
    holders = [
        node
        for node, member in swarm.membership.view.members.items()
        if node != swarm.node_id
        and node not in swarm.lost
        and member.report.state not in GONE
        and (held := member.report.layers) is not None
        and held.start <= layers.start
        and layers.stop <= held.stop
    ]
    keepers = likely_keepers(swarm, layers, MOST_ASKED + len(holders))
    return [*holders, *[node for node in keepers if node not in holders][:MOST_ASKED]]


def _note(file: Path, snapshot: str | None) -> None:
    """Which snapshot is on its way, for a start after a kill; None: none is. Without it that start fetches another."""
    with suppress(OSError):
        if snapshot is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(snapshot, encoding="ascii")


def _named(layers: LayerRange) -> str:
    return f"Layers {layers.start + 1}-{layers.stop}"


def _told(layers: LayerRange, progress: DownloadProgress) -> str:
    done, total = progress.bytes_done / 1e6, progress.bytes_total / 1e6
    what = f"Fetching layers {layers.start + 1}-{layers.stop} from others"
    if total == 0:
        return f"{what}."
    digits = 0 if total >= 10 else 1
    return f"{what}: {done:.{digits}f} of {max(total, 0.1):.{digits}f} MB."


SAFETY_INTERVAL_SECONDS = 10.0


@dataclass
class StageSafety:
    """One for a node: asks the others for what only they know, and keeps it in the swarm for whoever tells people."""

    swarm: StageSwarm
    has_state: Callable[[int], bool] = lambda _: False  # of a stage, on this disk

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await anyio.sleep(SAFETY_INTERVAL_SECONDS)

    async def look(self) -> None:
        """Ask about all stages."""
        coverage = self.swarm.coverage()
        told = dict[int, ReportedCopy]()

        async def ask(stage: int, holder: NodeId) -> None:
            answers = await query_statuses(self.swarm.asking, self.swarm.name_of(stage), [holder])
            if holder in answers:
                told[stage] = ReportedCopy(holder, answers[holder].copied_seconds, anyio.current_time())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._find_unobtainable, coverage.missing)
            for stage in range(coverage.stage_count):
                holder = self.swarm.sole_holder(stage)
                if holder is not None and holder != self.swarm.node_id:
                    tasks.start_soon(ask, stage, holder)
        self.swarm.told_copies = told

    async def _find_unobtainable(self, missing: Iterable[int]) -> None:
        self.swarm.unobtainable = await unobtainable(self.swarm, missing, self.has_state)


async def unobtainable(swarm: StageSwarm, stages: Iterable[int], has_state: Callable[[int], bool]) -> frozenset[int]:
    """Those of the stages of which neither this disk nor anybody who answers has the state."""
    return frozenset([stage for stage in stages if not (has_state(stage) or await is_obtainable(swarm, stage))])
