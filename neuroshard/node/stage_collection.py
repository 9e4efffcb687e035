"""Collects one certified state of every stage of a run from its nodes, on a computer that holds no stage.

The folder gets a checkpoint per stage in the form of a data folder, so that `checkpoint export` reads it, with the
certificate of each state. Only the outer state is fetched: its root is certified, and nothing proves the other numbers
of a donor's checkpoint. The folder also keeps what has arrived, so that the same command continues.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import anyio.to_thread
import msgspec
import trio
from msgspec import Meta, Struct, structs

from neuroshard import __version__
from neuroshard.config.folders import NodePaths, prepare_data_dir
from neuroshard.config.instance_lock import AlreadyRunningError, InstanceLock
from neuroshard.config.loading import LoadedSettings
from neuroshard.config.state_file import StateFile, make_folder, write_atomically
from neuroshard.consensus.chain import Chain, ChainError
from neuroshard.consensus.stage_chain import CertifiedState, FileChainStore, StageChain, certified_states
from neuroshard.consensus.sync_strategies import certified_lead, snapshot_layout
from neuroshard.consensus.vote_log import ROUNDS_FOLDER
from neuroshard.data.manifest import archived_tokenizer_name
from neuroshard.data.storage import METADATA_FOLDER, MetadataStore, tokenizer_copy
from neuroshard.errors import DataError, NetworkRefusedError, StoppedError, StorageError, UsageError
from neuroshard.host.identity import node_identity, wallet_of
from neuroshard.identity import NodeIdentity
from neuroshard.membership.stage_coverage import layers_text
from neuroshard.model.transformer import StageModel
from neuroshard.model.weights import TensorSchema
from neuroshard.network import ScoreReason
from neuroshard.network.tasks import accompanied, first_cause
from neuroshard.node.data_sharing import DataSharing, open_data_store
from neuroshard.node.joining import candidates
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.node.stage_versions import applied_parameters
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.runs.invited_settings import invited_settings
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stored_runs import JoinedRuns
from neuroshard.state.checkpoint_catalogue import saved_stages
from neuroshard.state.checkpoint_store import CheckpointStore, search_stage_folders, stage_folder
from neuroshard.state.download import PartialFile, StageFile
from neuroshard.state.kept_states import CERTIFICATE_FILE, StatesRequest, query_states, root_of_file
from neuroshard.state.outer_state import line_from_json
from neuroshard.state.receiver import ReceivedState, StateReceiver
from neuroshard.state.tensor_file import sha256_of
from neuroshard.state.transfer_messages import ANY_AGE, Count, DonorError, LyingDonorError, SnapshotManifest
from neuroshard.status.snapshot import ModelStatus, NodeState, NodeStatus
from neuroshard.telemetry.logs import configure_logging
from neuroshard.training.record import StageIdentity
from neuroshard.training.state_transfer import Certified, store_certified
from neuroshard.types import HexDigest, LayerRange, NamedRun, NodeId, RunId, UnixSeconds

_LOG = logging.getLogger(__name__)

RECORD_FILE = "assembly.json"
PARTIAL_FILE = "incoming.part"
LOOK_SECONDS = 2.0
REPORT_SECONDS = 1.0
MOST_DONORS = 4
MOST_ASKED = 32  # nodes that may keep a state of a stage
STAGES_AT_ONCE = 4
MAX_RECORD_BYTES = 200_000


@dataclass(frozen=True)
class Limit:
    """The newest state that is wanted: by time (seconds since the epoch), by outer step, or without a limit."""

    at: float | None = None
    outer_step: int | None = None


class CollectedStage(Struct, frozen=True, forbid_unknown_fields=True):
    """A stage whose certified state is in the folder."""

    layers: LayerRange
    outer_step: Count
    root: HexDigest
    height: Count  # of the value that certifies it
    certified_at: UnixSeconds


class CollectedStates(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file that says what a folder is for, and which stages it has."""

    run_id: NamedRun
    at: UnixSeconds | None = None  # newest state at or before this time
    outer_step: Count | None = None  # or at or before this outer step; neither: the newest that nodes keep
    stages: Annotated[tuple[CollectedStage, ...], Meta(max_length=128)] = ()

    def with_stage(self, stage: CollectedStage) -> CollectedStates:
        """The collection with one more stage."""
        others = [each for each in self.stages if each.layers != stage.layers]
        return structs.replace(self, stages=tuple(sorted((*others, stage), key=lambda each: each.layers)))


@dataclass(frozen=True)
class StageMissing:
    """A stage that did not come, and the reason."""

    layers: LayerRange
    reason: str


def record_of(folder: Path) -> StateFile[CollectedStates]:
    """The file in a folder that names its run, its time and its stages."""
    remedy = "Name a new folder with --out."
    return StateFile(folder / RECORD_FILE, CollectedStates, "fail", remedy, max_bytes=MAX_RECORD_BYTES)


def begin_collection(folder: Path, wanted: CollectedStates) -> CollectedStates:
    """Read which of the wanted states the folder has; a damaged one counts as missing. Blocks.

    Raises UsageError if it is for other states, and StorageError.
    """
    found = record_of(folder).read()
    if found is None:
        if folder.exists() and any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty.", "Name a new folder with --out.")
        return wanted
    if structs.replace(found, stages=()) != wanted:
        raise UsageError(
            f"{folder} is for other states: of run {found.run_id[:16]}, {_limit_words(found)}.",
            "Name a new folder with --out, or repeat the command that began this one.",
        )
    sound = set[tuple[LayerRange, str]]()
    for saved in saved_stages(search_stage_folders(folder)):
        with suppress(OSError, StorageError):
            if sha256_of(saved.tensor_file) == saved.manifest.tensors.sha256:
                sound.add((saved.layers, root_of_file(Path(saved.generation.path), saved.manifest)))
    return structs.replace(found, stages=tuple(each for each in found.stages if (each.layers, each.root) in sound))


def _limit_words(wanted: CollectedStates) -> str:
    if wanted.at is not None:
        return f"at or before {time_text(wanted.at)}"
    return "the newest" if wanted.outer_step is None else f"at or before outer step {wanted.outer_step:,}"


def time_text(seconds: float) -> str:
    """A local time for people."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def choose_state(
    wanted: CollectedStates, offered: Iterable[tuple[int, str]], certified: Mapping[tuple[int, str], CertifiedState]
) -> CertifiedState | None:
    """The newest certified state that is offered and not newer than wanted; None if there is none."""
    fitting = [
        state
        for place in offered
        if (state := certified.get(place)) is not None
        and (wanted.at is None or state.certified_at <= wanted.at)
        and (wanted.outer_step is None or place[0] <= wanted.outer_step)
    ]
    return max(fitting, key=lambda state: state.certificate.value.height, default=None)


class StageCollector:
    """Collects the state of one stage. Belongs to the event loop."""

    def __init__(
        self,
        swarm: StageSwarm,
        index: int,
        identity: StageIdentity,
        folder: Path,
        *,
        wanted: CollectedStates,
        report: Callable[[str], None],
    ) -> None:
        layers = swarm.plan[index]
        self._swarm = swarm
        self._index = index
        self._identity = identity
        self._wanted = wanted
        self._report = report
        self._store = CheckpointStore(stage_folder(folder, identity.wallet_id, identity.run_id, layers))
        layout = snapshot_layout(identity.architecture, layers, swarm.outer, swarm.inner)
        self._file = StageFile(swarm.name_of(layers), identity.architecture, layout)
        self._receiver = StateReceiver(swarm.asking, self._file)
        self._chain = StageChain(
            partial(swarm.versions.founding_of, index),
            FileChainStore(self._store.folder / ROUNDS_FOLDER),
            swarm.asking.offload,
        )
        self._doubts: dict[NodeId, str] = {}  # reasons why nodes are not used
        self._offers: dict[NodeId, list[tuple[int, str]]] = {}
        self._reason = ""
        self._moved_at = anyio.current_time()

    @property
    def layers(self) -> LayerRange:
        """The layers of the stage."""
        return self._identity.layers

    async def collect(self, patience_seconds: float) -> CollectedStage | StageMissing:
        """Fetch the state, and try again until nothing has arrived for this time. Raises StorageError."""
        await self._chain.load()
        said = ""
        while True:
            chosen = await self._choice()
            if chosen is not None:
                collected = await self._fetched(*chosen)
                if collected is not None:
                    return collected
            if anyio.current_time() - self._moved_at > patience_seconds:
                return StageMissing(self.layers, self._why_missing())
            if self._reason and self._reason != said:
                said = self._reason
                self._report(f"Layers {layers_text(self.layers)}: waiting. {said}")
            await anyio.sleep(LOOK_SECONDS)

    async def _choice(self) -> tuple[CertifiedState, list[NodeId]] | None:
        """Ask the nodes for chain and states; return the state to fetch, with the nodes that offer it."""
        name = self._file.stage
        peers = [node for node in self._to_ask() if node not in self._doubts]
        await self._chain.learn_from(self._swarm.asking, name, peers)
        request = StatesRequest(name, self._wanted.outer_step, self._wanted.at)
        answers = await query_states(self._swarm.asking, request, peers)
        chain = self._chain.chain
        if chain is None:
            self._reason = "No node that answers has the foundation of these layers."
            return None
        if self._chain.fork is not None:
            self._reason = str(self._chain.fork)
            return None
        certified = certified_states(chain)
        for node, states in answers.items():
            try:
                certified |= certified_states(chain, [data for _, data in states if data])
            except ChainError as error:
                self._doubt(node, f"a certificate of it is not valid: {error.message}")
        self._offers = {
            node: [(state.outer_step, state.root) for state, _ in states if (state.outer_step, state.root) in certified]
            for node, states in answers.items()
            if node not in self._doubts
        }
        chosen = choose_state(self._wanted, {place for places in self._offers.values() for place in places}, certified)
        if chosen is None:
            self._reason = self._why_none(chain, certified)
            return None
        return chosen, sorted(node for node, places in self._offers.items() if chosen.place in places)

    def _to_ask(self) -> list[NodeId]:
        """The holders, the nodes that may keep a copy, and others, which may have an archive."""
        nodes = candidates(self._swarm, self.layers)
        members = self._swarm.membership.view.members
        others = [node for node in members if node not in nodes and node != self._swarm.node_id]
        return [*nodes, *others][:MOST_ASKED]

    async def _fetched(self, state: CertifiedState, donors: Sequence[NodeId]) -> CollectedStage | None:
        """Fetch a state from the nodes that offer it, and store it; None after a failure. Raises StorageError."""
        manifests = dict[NodeId, SnapshotManifest]()
        for donor in donors:
            if len(manifests) < MOST_DONORS:
                await self._add_manifest(donor, state, manifests)
        if not manifests:
            return None
        first, before = next(iter(manifests)), self._receiver.progress.bytes_done
        into = PartialFile(self._store.folder / PARTIAL_FILE, self._file.layout.file_bytes)
        fetch = partial(self._receiver.fetch_outer, first, manifests, into)
        try:
            received = await accompanied(fetch, self._keep_telling)
        except LyingDonorError as error:
            self._doubt(first, error.message)
            return None
        except DonorError as error:
            self._reason = error.message
            if self._receiver.progress.bytes_done > before:
                self._moved_at = anyio.current_time()
            return None
        finally:
            for donor in manifests:  # it would otherwise keep this node's place for minutes
                with suppress(DonorError):
                    await self._receiver.report_copied(donor, None)
        if (received.manifest.meta.outer_step, received.root) != state.place:
            into.remove()
            self._swarm.asking.report(first, ScoreReason.DIGEST_MISMATCH)
            self._doubt(first, "its state does not have the certified root")
            return None
        return await self._stored(state, received, into)

    async def _add_manifest(
        self, donor: NodeId, state: CertifiedState, manifests: dict[NodeId, SnapshotManifest]
    ) -> None:
        try:
            manifest = await self._receiver.manifest(donor, ANY_AGE, root=state.place[1])
        except LyingDonorError as error:
            self._doubt(donor, error.message)
        except DonorError as error:
            self._reason = error.message
        else:
            manifests[donor] = manifest

    async def _stored(self, state: CertifiedState, received: ReceivedState, into: PartialFile) -> CollectedStage:
        value, swarm = state.certificate.value, self._swarm
        parameters = applied_parameters(swarm.versions.offer.initial, self._chain.versions, value.outer_step - 1)
        line = line_from_json(received.manifest.meta.extra.get("outer"))
        lead = certified_lead(value, line, parameters, self._schema())
        certified = Certified(state.certified_at, lead, parameters.sequences_per_step)
        await swarm.asking.offload(
            partial(store_certified, received, self._file.layout, certified, self._identity, self._store)
        )
        await swarm.asking.offload(partial(self._finish, state, into))
        return CollectedStage(self.layers, value.outer_step, value.next_root, value.height, state.certified_at)

    def _finish(self, state: CertifiedState, into: PartialFile) -> None:
        """Store the certificate next to its state, and remove the partial file. Raises StorageError."""
        path = self._store.folder / CERTIFICATE_FILE
        try:
            write_atomically(path, msgspec.msgpack.encode(state.certificate))
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}.", "Free some space.") from error
        into.remove()

    def _schema(self) -> TensorSchema:
        import torch

        with torch.device("meta"):
            return TensorSchema.of(StageModel(self._identity.architecture, self.layers))

    async def _keep_telling(self) -> None:
        done = -1
        while True:
            progress = self._receiver.progress
            if progress.bytes_done != done:
                done, self._moved_at = progress.bytes_done, anyio.current_time()
                total = max(progress.bytes_total, 1) / 1e6
                self._report(f"Layers {layers_text(self.layers)}: {done / 1e6:.1f} of {total:.1f} MB.")
            await anyio.sleep(REPORT_SECONDS)

    def _doubt(self, node: NodeId, reason: str) -> None:
        """Use nothing more of a node whose data are false."""
        self._doubts[node] = f"Node {node} is not used: {reason.removesuffix('.')}."
        _LOG.warning("Layers %s: node %s is not used: %s", layers_text(self.layers), node, reason)

    def _why_none(self, chain: Chain, certified: Mapping[tuple[int, str], CertifiedState]) -> str:
        """The reason why no offered state fits."""
        offered = [certified[place] for places in self._offers.values() for place in places]
        if not offered:
            return "No node that answers keeps a certified state of them."
        oldest = min(offered, key=lambda state: state.certificate.value.height)
        first = next(iter(chain.recent), None)
        is_first = first is not None and first.value.height == chain.start.height + 1
        begins = "" if not is_first or first is None else f" The run's first step is of {_at(CertifiedState(first))}."
        return f"The oldest state that a node keeps is outer step {oldest.place[0]:,} of {_at(oldest)}.{begins}"

    def _why_missing(self) -> str:
        reason = self._reason or "No node of the run answers."
        return " ".join(filter(None, (reason, *self._doubts.values(), self._last_holder())))

    def _last_holder(self) -> str:
        """The nodes that hold the stage, or held it last, as a sentence; "" if none is known."""
        membership = self._swarm.membership
        members = membership.view.members
        present = [node for node, each in members.items() if _covers(each.report.layers, self.layers)]
        if present:
            return f"Node {', '.join(sorted(present))} reports these layers."
        announced = membership.announcements
        left = [node for node, each in announced.items() if _covers(each.layers, self.layers)]
        chain = self._chain.last
        seats = [] if chain is None else [seat.node_id for seat in chain.ledger.committee.seats]
        known = sorted(left or seats)
        return f"Last held by node {', '.join(known)}." if known else ""


def _covers(held: LayerRange | None, layers: LayerRange) -> bool:
    return held is not None and held.start <= layers.start and layers.stop <= held.stop


def _at(state: CertifiedState) -> str:
    return time_text(state.certified_at)


@dataclass
class Collector:
    """Collects all stages of a run into a folder, as a member without parameters."""

    network: PeerNetwork
    folder: Path
    collected: CollectedStates  # what is in the folder, and the limit for the rest
    report: Callable[[str], None]
    patience_seconds: float
    missing: list[StageMissing] = field(default_factory=list[StageMissing], init=False)

    async def run(self) -> None:
        """Collect until every stage is here or counts as missing. Raises NeuroShardError."""
        await accompanied(self._collect, self.network.networking.run, _interrupt)

    async def _collect(self) -> None:
        offer = await self._found()
        swarm = self.network.serve(offer, partial(_status, offer, time.time()), is_shared=True)
        swarm.versions.note_held(range(len(swarm.plan)))  # so that it asks for the foundation
        make_folder(self.folder, None)
        await anyio.to_thread.run_sync(record_of(self.folder).write, self.collected)
        slots = anyio.CapacityLimiter(STAGES_AT_ONCE)
        done = {stage.layers for stage in self.collected.stages}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_tokenizer, offer)
            for index, layers in enumerate(swarm.plan):
                if layers not in done:
                    tasks.start_soon(self._collect_stage, swarm, index, offer, slots)
        # the run and its foundations prove the states to another program
        await anyio.to_thread.run_sync(JoinedRuns(self.folder).keep, swarm.versions.offer)
        await anyio.to_thread.run_sync(StoredFoundations(self.folder).write, offer, swarm.versions.foundations)

    async def _found(self) -> RunOffer:
        """The run. A wait for the organiser's queue may be long, one for nodes that answer may not."""
        said = ""

        def report(words: str) -> None:
            nonlocal said
            if words != said:
                said = words
                self.report(words)

        run_id = RunId(self.collected.run_id)
        if self.network.exchange.store.find(run_id) is None:
            with anyio.move_on_after(self.patience_seconds) as waiting:
                await self.network.finder.fetch(run_id, report)
            if waiting.cancelled_caught:
                raise NetworkRefusedError(
                    f"No node of run {run_id[:16]} answered within {self.patience_seconds:g} s. {said}".strip(),
                    "Name the address of one: --peer ADDRESS.",
                )
        return (await self.network.finder.first(report)).offer

    async def _collect_stage(
        self, swarm: StageSwarm, index: int, offer: RunOffer, slots: anyio.CapacityLimiter
    ) -> None:
        async with slots:
            identity = _identity(self.network.identity, offer, swarm.plan[index])
            collector = StageCollector(swarm, index, identity, self.folder, wanted=self.collected, report=self.report)
            found = await collector.collect(self.patience_seconds)
        if isinstance(found, StageMissing):
            self.missing.append(found)
            self.report(f"Layers {layers_text(found.layers)} did not come. {found.reason}")
            return
        self.collected = self.collected.with_stage(found)
        await anyio.to_thread.run_sync(record_of(self.folder).write, self.collected)
        when = time_text(found.certified_at)
        self.report(f"Layers {layers_text(found.layers)}: outer step {found.outer_step:,}, certified {when}.")

    async def _keep_tokenizer(self, offer: RunOffer) -> None:
        """Fetch the table that the run pins, for exports. Without it, an export names the missing file."""
        digest, data = offer.parameters.genesis.tokenizer_sha256, b""
        copies = MetadataStore(NodePaths.below(self.folder).data_cache / METADATA_FOLDER)
        if copies.read(tokenizer_copy(digest), digest) is not None:
            return
        sharing = DataSharing(self.network, open_data_store(self.network.settings))
        with anyio.move_on_after(self.patience_seconds):
            while not data:
                try:
                    async with sharing.open(archived_tokenizer_name(digest), digest) as opened:
                        data = b"".join([part async for part in opened.chunks])
                except DataError as error:
                    _LOG.info("The tokenizer does not come: %s", error)
                    await anyio.sleep(LOOK_SECONDS)
            (self.folder / "data_cache").mkdir(mode=0o700, exist_ok=True)
            copies.keep(tokenizer_copy(digest), data)


def collect_run(
    loaded: LoadedSettings,
    folder: Path,
    limit: Limit,
    report: Callable[[str], None],
    patience_seconds: float,
) -> tuple[CollectedStates, list[StageMissing]]:
    """Collect the states of the run in the settings into a folder; return those that are there, and the missing ones.

    Raises NeuroShardError if the run cannot be entered or the folder cannot be used, and StoppedError after Ctrl+C.
    """
    invited = invited_settings(loaded)
    settings = invited.loaded.settings
    wallet = wallet_of(invited.loaded)[0]
    if settings.run is None:
        raise UsageError("No run is named.", "Name it: --run RUN_ID, or --invite LINK.")
    wanted = begin_collection(folder, CollectedStates(RunId(settings.run), limit.at, limit.outer_step))
    prepare_data_dir(settings.data_dir)
    with ExitStack() as stack:
        stack.callback(_lock(settings.data_dir).release)
        stack.enter_context(
            configure_logging(verbose=settings.verbose, as_json=settings.log_json, folder=settings.paths.logs)
        )
        identity = node_identity(wallet, settings.data_dir)
        network = PeerNetwork.of(settings, identity, invitation=invited.invitation, holds_layers=False)
        collector = Collector(network, folder, wanted, report, patience_seconds)
        try:
            trio.run(collector.run)  # pyright: ignore[reportUnknownMemberType]
        except BaseException as error:
            if isinstance(first_cause(error), KeyboardInterrupt):
                raise StoppedError("Stopped.", "The same command continues with the rest.") from None
            raise
    return collector.collected, sorted(collector.missing, key=lambda each: each.layers)


async def _interrupt() -> None:
    """Raise KeyboardInterrupt after Ctrl+C. Python's own handler raises it anywhere, also where it is then ignored."""
    with trio.open_signal_receiver(signal.SIGINT) as received:
        async for _ in received:
            raise KeyboardInterrupt


def _lock(folder: Path) -> InstanceLock:
    try:
        return InstanceLock.acquire(folder)
    except AlreadyRunningError as running:
        raise UsageError(
            f"Another program uses {folder} (process {running.owner.pid}).", "Name another folder with --data-dir."
        ) from None


def _identity(node: NodeIdentity, offer: RunOffer, layers: LayerRange) -> StageIdentity:
    shape = offer.parameters.architecture
    seed = offer.parameters.initial_weights_seed if shape.subspace_rank else None
    return StageIdentity(node.wallet_id, node.node_id, offer.run_id, shape, layers, 1, subspace_seed=seed)


def _status(offer: RunOffer, began: float) -> NodeStatus:
    from neuroshard.model.architecture import parameter_count

    architecture = offer.parameters.architecture
    model = ModelStatus(architecture, parameter_count(architecture), None, ())
    return NodeStatus(__version__, began, time.time(), NodeState.NOT_TRAINING, model=model)
