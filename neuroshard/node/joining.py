"""Brings the state of a stage to this node before it trains the stage, and tracks how safe each stage's state is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from neuroshard.consensus.chain import Chain, ForkError
from neuroshard.consensus.foundation import Founding
from neuroshard.consensus.stage_chain import FileChainStore, StageChain, StoredChain, newest_chain, proven_chain
from neuroshard.consensus.sync_strategies import parts_of, snapshot_layout
from neuroshard.consensus.vote_log import KEPT_STEPS, ROUNDS_FOLDER, FileVoteLog
from neuroshard.errors import StorageError
from neuroshard.network import ScoreReason
from neuroshard.network.blocking import BlockingRunner
from neuroshard.network.tasks import accompanied
from neuroshard.node.stage_copies import likely_keepers
from neuroshard.node.stage_swarm import GONE, ReportedCopy, StageSwarm
from neuroshard.runs.exchange import NAMED_BY_INVITATION
from neuroshard.state.backup_copy import BackupCopy
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.download import DownloadProgress, PartialFile, ReceivingOptions, StageFile
from neuroshard.state.outer_state import line_from_json, may_download_averaged, outer_root
from neuroshard.state.receiver import ReceivedState, StateReceiver
from neuroshard.state.replica_status import ReplicaStatus, choose_donor, query_statuses
from neuroshard.state.transfer_messages import ANY, ANY_AGE, DonorError, LyingDonorError, SnapshotManifest, StageName
from neuroshard.training.record import StageIdentity
from neuroshard.training.state_transfer import install
from neuroshard.types import LayerRange, NodeId
from neuroshard.waiting import sleep_to_tick

_LOG = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
HEAR_SECONDS = 0.1
PATIENCE_SECONDS = 5.0
REPORT_SECONDS = 0.5
FRESH_SECONDS = 30.0  # largest age of a donor's snapshot; instead of an older one the donor makes a new one
MOST_DONORS = 4
MOST_ASKED = 16  # nodes that may keep a copy, and candidates without a seat at a time
PARTIAL_FILE, PARTIAL_NAME = "incoming.part", "incoming.snapshot"

ReportWait = Callable[[str], None]


@dataclass
class Joining:
    """Prepares the state of one stage, once. `report` receives the reason for each wait, for the status."""

    swarm: StageSwarm
    identity: StageIdentity
    store: CheckpointStore
    report: ReportWait
    expects_others: bool = True  # whether other nodes may train the run
    may_catch_up: bool = False  # whether it may keep its own state and apply the aggregates of the rounds it missed
    offload: BlockingRunner = anyio.to_thread.run_sync
    report_percent: Callable[[int], None] = lambda _: None  # receives the part of the state fetched, 0..100
    options: ReceivingOptions = field(default_factory=ReceivingOptions)
    _liars: set[NodeId] = field(default_factory=set[NodeId])
    _failed: set[NodeId] = field(default_factory=set[NodeId])  # donors whose state did not come
    _turns: int = 0  # candidates that have had their turn to be asked
    _waits_since: float | None = None  # start of the wait for the next averaged step
    _chain: Chain | None = None  # the newest that any node proved; None while the stage has no foundation here
    _has_followed: bool = False  # whether the disk has certified values of the present line

    def __post_init__(self) -> None:
        layers = self.identity.layers
        self._layout = snapshot_layout(self.identity.architecture, layers, self.swarm.outer, self.swarm.inner)
        file = StageFile(self.swarm.name_of(layers), self.identity.architecture, self._layout)
        self._stage = file.stage
        self._receiver = StateReceiver(self.swarm.asking, file, self.options)

    async def prepare(self) -> bool:
        """Wait until this node may train the stage: from its own state, a fetched one, or from the start of a new run.

        Returns whether a stored state must be restored. Waits while the stage was trained but no node sends its state:
        beginning again would lose that training. Raises StorageError.
        """
        own = await self.offload(self._own_status)
        if own is None and self.expects_others:
            await self._hear_of_others()
        while True:
            statuses = await query_statuses(self.swarm.asking, self._stage, self._to_ask())
            statuses |= local_copy(self.swarm, self._stage)
            await self._learn_chain(list(statuses))
            missing = self._missing_tip()
            best = None if missing else self._choose_donor(self._on_chain(statuses), own)
            if best is None:
                if own is not None or not (missing or was_trained(self.swarm)):
                    return own is not None
                absent = f"{_named(self.identity.layers)} were trained, but no node that answers has them: waiting."
                self.report(missing or absent)
            elif await self._may_go_on(own, statuses[best]) or (
                self._may_begin(statuses[best], statuses.values()) and await self._joined(best, statuses)
            ):
                return True
            await anyio.sleep(LOOK_SECONDS)

    def _missing_tip(self) -> str:
        """The reason why no line that is known here can be the one of the invitation; "" if one can.

        Donors that are behind, or on another line, are refused in the same way: they do not prove the tip.
        """
        founding, chain = self._founding(), self._chain
        if self.swarm.versions.lacks_tip:
            missing = "foundation"
        else:
            points = () if founding is None else founding.points
            certified = 0 if chain is None else chain.standing.height
            named = [point.milestone.height for point in points if point.named_by == NAMED_BY_INVITATION]
            if all(height <= certified for height in named):
                return ""
            missing = f"value of height {max(named):,}"
        return (
            f"No node that answers has the {missing} from your invitation: the nodes are behind, or follow another "
            "chain. Waiting for other nodes. If this does not change, ask for a new invitation and start with it."
        )

    def _to_ask(self) -> list[NodeId]:
        """The seats of the stage and some other candidates, different ones each time."""
        nodes, founding, chain = candidates(self.swarm, self.identity.layers), self._founding(), self._chain
        if founding is None:
            return nodes
        committee = founding.start.committee if chain is None else chain.ledger.committee
        seats = {seat.node_id for seat in committee.seats}
        others, start = [node for node in nodes if node not in seats], self._turns
        self._turns += MOST_ASKED
        others = others[start % max(1, len(others)) :] + others[: start % max(1, len(others))]
        return [*(node for node in nodes if node in seats), *others[:MOST_ASKED]]

    def _choose_donor(self, statuses: Mapping[NodeId, ReplicaStatus], own: ReplicaStatus | None) -> NodeId | None:
        """A donor that has not failed since all were tried: an established member if possible, as others may be names
        that cost nothing. A node with a state of its own does not insist on a donor that has failed for long.
        """
        doubted = frozenset[NodeId]() if own is None else self.swarm.asking.failed.doubted(anyio.current_time())
        established = frozenset[NodeId]() if self._chain is None else self._chain.ledger.established
        honest = {node: status for node, status in statuses.items() if node not in self._liars | doubted}
        live = {node: status for node, status in honest.items() if status.is_live and status.steps > 0}
        for failed in (self._failed, ()):
            left = {node: status for node, status in (live or honest).items() if node not in failed}
            first = {node: status for node, status in left.items() if node in established}
            best = choose_donor(first or left, own)
            best = choose_donor(left) if best is None and own is None else best
            if best is not None:
                return best
            self._failed.clear()
        return None

    async def _learn_chain(self, peers: Sequence[NodeId]) -> None:
        """Ask for the newest certified state, starting from the one that this disk knows. A fork is only reported.

        Without a foundation nothing can be proven: then the stage's first steps are under way. The naming of an heir
        does not show whether it was the last one, so this also asks for the other lines of the stage.
        """
        known, founding = await self._own_chain(), self._founding()
        if known is None:
            return
        lines = () if founding is None or known.statement != founding.statement else self._rival_lines(founding)
        try:
            self._chain = await newest_chain(self.swarm.asking, self._stage, known, peers)
            for line in lines:
                chain = await newest_chain(self.swarm.asking, self._stage, Chain.founded(line), peers)
                if chain.tip is not None and founding is not None and chain.line_in(founding) is line:
                    await self.offload(partial(self._chain_store.write, StoredChain(chain.statement, chain.proof())))
                    self._chain = chain
                    return
        except ForkError as error:
            self.report(f"{error.message} {error.action}")

    def _rival_lines(self, founding: Founding) -> tuple[Founding, ...]:
        """The lines that may show that an heir's line is void; none if this node has followed it, or its inviter."""
        tip = self.swarm.versions.tip
        invited = None if tip is None else founding.line(tip.foundation.hex())
        is_known = self._has_followed or (invited is not None and invited.heir is not None)
        return () if is_known else founding.others

    async def _own_chain(self) -> Chain | None:
        """The chain that this node knows, also of an older line if no heir replaces it."""
        founding, known = self._founding(), self._chain
        if founding is None:
            return known
        if known is not None and founding.line(known.statement) in (founding, known.line_in(founding)):
            return known
        stored = [await self.offload(partial(proven_chain, store, founding)) for store in self._chain_stores()]
        best = max(stored, key=lambda chain: (chain.statement != founding.statement, chain.standing.height))
        self._has_followed = best.tip is not None
        return best

    def _on_chain(self, statuses: Mapping[NodeId, ReplicaStatus]) -> dict[NodeId, ReplicaStatus]:
        """The nodes whose state is certified. Before the first value, those of the first interval.

        It need not be the newest state: a fast node has continued since it reported its state. A seat may be a step
        ahead of the chain: it makes steps alone, and the certificate of a step comes after the step. A download of such
        a state is refused while the certificate is missing.
        """
        chain = self._chain
        if chain is None:
            return dict(statuses)
        seats, following = {seat.node_id for seat in chain.ledger.committee.seats}, chain.standing.outer_step + 1
        return {
            node: status
            for node, status in statuses.items()
            if not status.is_live
            or chain.place_of(status.root, status.outer_step) is not None
            or (node in seats and status.outer_step == following)
        }

    def _founding(self) -> Founding | None:
        return self.swarm.versions.founding_of(list(self.swarm.plan).index(self.identity.layers))

    def _chain_stores(self) -> list[FileChainStore]:
        """The stage's own chain, and the one next to the copy that this node has kept of the stage."""
        local = self.swarm.donor.local(self._stage)
        copied = [FileChainStore(local.folder / ROUNDS_FOLDER)] if isinstance(local, BackupCopy) else []
        return [self._chain_store, *copied]

    @property
    def _chain_store(self) -> FileChainStore:
        return FileChainStore(self.store.folder / ROUNDS_FOLDER, self.store.data_dir)

    async def _may_go_on(self, own: ReplicaStatus | None, best: ReplicaStatus) -> bool:
        """Whether this node can keep its own state and catch up with the rounds between it and the best state.

        This requires that the rounds after those on this disk are still kept by other nodes, and that a certificate in
        the vote log here leads to or from the own state. Otherwise the node downloads the best state.
        """
        if own is None or not self.may_catch_up or not best.is_live or best.outer_step <= own.outer_step:
            return False
        ended = await self.offload(FileVoteLog(self.store.folder / ROUNDS_FOLDER).ended)
        root, reached = own.root, own.outer_step
        for value in (each.value for each in ended):
            if value.root == root and value.round_id is not None:
                root, reached = value.next_root, value.outer_step
        kept = max(KEPT_STEPS * parts_of(self.swarm.versions.offer.parameters.outer), best.kept)
        if best.outer_step - reached > kept:
            return False
        stored = StageChain(self._founding, self._chain_store, self.offload)
        await stored.load()
        is_tip = stored.is_newest(own)
        return is_tip or any(own.root in (each.value.root, each.value.next_root) for each in ended)

    def _may_begin(self, best: ReplicaStatus, statuses: Iterable[ReplicaStatus]) -> bool:
        """Whether to download the best state now, or only after the next step of averaged gradients.

        Such a step changes the whole state, so a state fetched just before it would be outdated. A lone node's state
        is downloaded at once, because its steps wait for the receiver.
        """
        outer, on_line = (
            self.swarm.outer,
            [status for status in statuses if status.is_live and status.line == best.line],
        )
        if outer.strategy != "averaging" or len(on_line) < 2:
            return True
        now = anyio.current_time()
        self._waits_since = now if self._waits_since is None else self._waits_since
        counted = sum(status.sequences for status in on_line)
        if may_download_averaged(counted, outer.averaged_sequences, now - self._waits_since):
            return True
        self.report(f"{_named(self.identity.layers)} will be downloaded after the next step of their replicas.")
        return False

    async def _hear_of_others(self) -> None:
        """Wait up to PATIENCE_SECONDS for the first report of another node."""
        with anyio.move_on_after(PATIENCE_SECONDS):
            while len(self.swarm.membership.view.members.keys() - {self.swarm.node_id}) == 0:
                await anyio.sleep(HEAR_SECONDS)

    async def _joined(self, first: NodeId, statuses: Mapping[NodeId, ReplicaStatus]) -> bool:
        """Fetch and install the state. Returns False after a failure, so that the caller tries again."""
        try:
            await self.offload(partial(self.store.ensure_room, self._layout.file_bytes))
            received = await self._fetched(first, statuses)
            await self.offload(partial(install, received, self.identity, self.store))
        except LyingDonorError as error:
            self._liars.add(first)
            self.swarm.asking.failed.note(first, anyio.current_time())
            _LOG.warning("Node %s sent an unusable state of %s: %s", first, _named(self.identity.layers), error)
        except DonorError as error:
            self._failed.add(first)
            self.swarm.asking.failed.note(first, anyio.current_time())
            self.report(f"{_named(self.identity.layers)} cannot be downloaded now: {error.message}")
            _LOG.info("Retrying the download of %s: %s", _named(self.identity.layers), error)
        else:
            self.swarm.asking.failed.forget(first)
            step = received.manifest.meta.step
            _LOG.info("%s were downloaded from node %s at step %s.", _named(self.identity.layers), first, f"{step:,}")
            return True
        return False

    async def _fetched(self, first: NodeId, statuses: Mapping[NodeId, ReplicaStatus]) -> ReceivedState:
        preferred, name = ANY, self.store.folder / PARTIAL_NAME
        with suppress(OSError):
            preferred = await self.offload(partial(name.read_text, encoding="ascii"))
        if first == self.swarm.node_id:
            manifests = {first: await self.swarm.donor.own_manifest(self._stage)}
        else:
            manifests = {first: await self._receiver.manifest(first, FRESH_SECONDS, preferred)}
        await self._check_age(first, statuses[first], manifests[first])
        await self.offload(partial(_note, name, manifests[first].snapshot))
        line = statuses[first].line
        others = [node for node, status in statuses.items() if status.line == line and status.is_live and node != first]
        if self._chain is not None:  # the whole download would wait for the manifests of silent names
            others = list(self._chain.ledger.established.intersection(others))
        async with anyio.create_task_group() as tasks:
            for node in sorted(others)[: MOST_DONORS - 1]:
                tasks.start_soon(self._add_manifest, node, manifests)
        into = PartialFile(self.store.folder / PARTIAL_FILE, self._layout.file_bytes)
        reuse = await self.offload(self._own_files)
        received = await accompanied(partial(self._receiver.fetch, first, manifests, into, reuse), self._keep_telling)
        await self._receiver.report_received(manifests)
        await self.offload(partial(_note, name, None))
        await self._check_root(first, statuses[first], received)
        return received

    async def _check_age(self, first: NodeId, reported: ReplicaStatus, manifest: SnapshotManifest) -> None:
        """Refuse a state before its download if a newer one is certified. Raises DonorError.

        The certificate of the state is fetched before a long download, in which others may follow it.
        """
        chain, outer_step = self._chain, manifest.meta.outer_step
        if chain is None or not reported.is_live:
            return
        if outer_step > chain.standing.outer_step:
            await self._learn_chain([first])
            chain = self._chain or chain
        if outer_step < chain.standing.outer_step:
            raise DonorError("Its newest saved state is older than the newest certified one")

    async def _check_root(self, first: NodeId, reported: ReplicaStatus, received: ReceivedState) -> None:
        """Refuse a state that is not the one that the donor named, or not certified. Raises DonorError."""
        # The donor may have made an outer step since it reported its status; only states of one step can be compared.
        outer_step = received.manifest.meta.outer_step
        if reported.root and outer_step == reported.outer_step and received.root != reported.root:
            self.swarm.asking.report(first, ScoreReason.DIGEST_MISMATCH)
            raise LyingDonorError("Its state does not have the root that it named.")
        chain = self._chain
        if chain is None:
            return
        if not reported.is_live:  # a copy may be older than the newest certified state
            if first == self.swarm.node_id:
                await self.offload(lambda: self._chain_store.write(StoredChain(chain.statement, chain.proof())))
            return
        if outer_step != chain.standing.outer_step:
            await self._learn_chain([first])
            chain = self._chain or chain
        if not chain.standing.is_state(received.root, outer_step):
            raise DonorError("Its state is not the newest certified one")
        await self.offload(lambda: self._chain_store.write(StoredChain(chain.statement, chain.proof())))

    async def _add_manifest(self, node: NodeId, manifests: dict[NodeId, SnapshotManifest]) -> None:
        """Add a further donor if it answers; it can send the chunks that it has in common with the first one."""
        with suppress(DonorError):
            manifests[node] = await self._receiver.manifest(node, ANY_AGE)

    async def _keep_telling(self) -> None:
        while True:
            progress = self._receiver.progress
            self.report(_progress_text(self.identity.layers, progress))
            self.report_percent(100 * progress.bytes_done // max(1, progress.bytes_total))
            await anyio.sleep(REPORT_SECONDS)

    def _own_status(self) -> ReplicaStatus | None:
        """Status of the newest checkpoint; None if it has no steps. Blocks on the disk."""
        generations = self.store.generations()
        if not generations or generations[0].step == 0:
            return None
        newest = generations[0]
        manifest = self.store.read_manifest(Path(newest.path))
        tensors = Path(newest.path).with_name(manifest.tensors.file)
        try:
            line = line_from_json(manifest.meta.extra.get("outer"))
            root = outer_root(tensors, self._layout, newest.outer_step, line)
        except OSError:
            root = ""  # the restore will report the defect
        return ReplicaStatus(is_live=True, steps=newest.step, outer_step=newest.outer_step, root=root)

    def _own_files(self) -> list[Path]:
        """Tensor files on this computer that may contain some of the chunks. Blocks on the disk."""
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
    """Return whether the run has made steps. A step needs all stages, so then every stage has a trained state."""
    view = swarm.membership.view
    reports = [member.report for member in view.members.values()]
    return view.total_steps > 0 or any(report.steps > 0 or report.outer_step > 0 for report in reports)


async def is_obtainable(swarm: StageSwarm, stage: int) -> bool:
    """Return whether a node that answers has the stage's state, or the run has no trained state yet."""
    name = swarm.name_of(stage)
    statuses = await query_statuses(swarm.asking, name, candidates(swarm, name.layers)) | local_copy(swarm, name)
    return choose_donor(statuses) is not None or not was_trained(swarm)


def local_copy(swarm: StageSwarm, stage: StageName) -> dict[NodeId, ReplicaStatus]:
    """Status of the copy that this node keeps of a stage trained elsewhere, keyed by its own id; empty without one."""
    status = swarm.donor.replica_status(stage)
    return {} if status is None or status.is_live else {swarm.node_id: status}


def candidates(swarm: StageSwarm, layers: LayerRange) -> list[NodeId]:
    """Nodes to ask for a stage's state: all its holders, then the nodes that most likely keep a copy."""
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
    """Record the snapshot in transfer, so that a start after a kill continues it; None removes the record."""
    with suppress(OSError):
        if snapshot is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(snapshot, encoding="ascii")


def _named(layers: LayerRange) -> str:
    return f"Layers {layers.start + 1}-{layers.stop}"


def _progress_text(layers: LayerRange, progress: DownloadProgress) -> str:
    done, total = progress.bytes_done / 1e6, progress.bytes_total / 1e6
    what = f"Downloading layers {layers.start + 1}-{layers.stop} from other nodes"
    if total == 0:
        return f"{what}."
    digits = 0 if total >= 10 else 1
    return f"{what}: {done:.{digits}f} of {max(total, 0.1):.{digits}f} MB."


SAFETY_INTERVAL_SECONDS = 10.0


@dataclass
class StageSafety:
    """Asks the holders of stages about copies and obtainable states, and stores the answers in the swarm's view."""

    swarm: StageSwarm
    has_state: Callable[[int], bool] = lambda _: False  # whether this disk has a stage's state

    async def run(self) -> None:
        """Look every SAFETY_INTERVAL_SECONDS until cancelled."""
        while True:
            await self.look()
            await sleep_to_tick(SAFETY_INTERVAL_SECONDS)

    async def look(self) -> None:
        """Ask once about every stage, and wait for the answers."""
        coverage = self.swarm.coverage()
        reported = dict[int, ReportedCopy]()

        async def ask(stage: int, holder: NodeId) -> None:
            answers = await query_statuses(self.swarm.asking, self.swarm.name_of(stage), [holder])
            if holder in answers:
                reported[stage] = ReportedCopy(holder, answers[holder].copied_seconds, anyio.current_time())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._find_unobtainable, coverage.missing)
            for stage in range(coverage.stage_count):
                holder = self.swarm.sole_holder(stage)
                if holder is not None and holder != self.swarm.node_id:
                    tasks.start_soon(ask, stage, holder)
        self.swarm.note_copies(reported)

    async def _find_unobtainable(self, missing: Iterable[int]) -> None:
        self.swarm.note_unobtainable(await unobtainable(self.swarm, missing, self.has_state))


async def unobtainable(swarm: StageSwarm, stages: Iterable[int], has_state: Callable[[int], bool]) -> frozenset[int]:
    """Return the stages whose state is neither on this disk nor at any node that answers."""
    return frozenset([stage for stage in stages if not (has_state(stage) or await is_obtainable(swarm, stage))])
