"""Branches a run: another run continues from states on this computer. A person decides.

The states are those that this node has saved, copies of other nodes' stages, and those that `checkpoint assemble` has
collected from the nodes of the run.

    which states                           moments                    for
    the newest certified ones              stay                       a run whose owner, deputies and quorum are gone
    those of a time or of an outer step    zero, 20 warm-up steps     another attempt, with other settings if wanted

A rollback is a branch that the owner names as the successor of the run: its members follow. The files of the first run
stay as they are. The states are copied into the new run's folders, and its foundation names the roots of the copies, so
a node that joins takes no other state.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from neuroshard.config.run_parameters import BranchPoint, RunParameters
from neuroshard.config.state_file import make_folder, read_bounded, write_atomically
from neuroshard.consensus.chain import Chain
from neuroshard.consensus.committee import ADMISSION_SECONDS, Candidate, Committee, Seat
from neuroshard.consensus.foundation import StageStart
from neuroshard.consensus.stage_chain import FileChainStore, certified_states, proven_chain
from neuroshard.consensus.sync_strategies import snapshot_layout
from neuroshard.consensus.vote_log import ROUNDS_FOLDER
from neuroshard.errors import CheckpointError, StorageError, UsageError
from neuroshard.identity import SignedRunParameters
from neuroshard.identity.invitations import InvitationTerms, InvitedPlaces
from neuroshard.membership.run_members import Papers
from neuroshard.membership.stage_coverage import layers_text
from neuroshard.model.architecture import plan_of
from neuroshard.node.stage_versions import applied_parameters
from neuroshard.optim.outer import LineProgress
from neuroshard.runs.creation import Owner, newest_offer, sign_version
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.foundations import StoredFoundations, merged, no_foundations
from neuroshard.runs.offer import OfferChoice, RunOffer, changed_fields
from neuroshard.runs.run_file import RunConfig, apply_config
from neuroshard.runs.stored_passes import StoredPasses
from neuroshard.runs.stored_runs import JoinedRuns
from neuroshard.state.checkpoint_catalogue import SavedStage, moment, saved_stages
from neuroshard.state.checkpoint_store import CheckpointStore, search_stage_folders, stage_folder
from neuroshard.state.disk_space import StorageLimits, copy_folder, state_folders
from neuroshard.state.kept_states import CERTIFICATE_FILE, MAX_CERTIFICATE_BYTES, root_of_file
from neuroshard.state.outer_state import line_from_json
from neuroshard.state.tensor_file import TensorLayout, read_layout, residual_path, sha256_of, write_tensor_file
from neuroshard.training.drive_store import POSITION_FILE, DriveStore
from neuroshard.types import JsonValue, LayerRange, NodeId, RunId

INCOMING = "incoming.part"
PASS_SECONDS = 30 * 86_400.0  # in which a member of the run before can follow
MOMENTS = "inner/"  # begins the names of the inner optimizer's tensors
_PART_BYTES = 1 << 20  # written at a time


@dataclass(frozen=True)
class BranchWish:
    """The states from which a branch continues, at most one of both, and the settings that it changes."""

    at: float | None = None  # seconds since the epoch: the newest state of each stage at or before it
    outer_step: int | None = None  # the state after this number of outer steps
    states: Path | None = None  # folder with certified states that `checkpoint assemble` has collected
    changes: RunConfig = field(default_factory=dict[str, JsonValue])

    @property
    def has_chosen(self) -> bool:
        """Whether certain states are wanted, instead of the newest ones."""
        return self.at is not None or self.outer_step is not None


NEWEST = BranchWish()
# Settings on which the saved tensors, or the division of the text, depend.
_KEPT = ("architecture", "stage_count", "stage_layers", "genesis", "initial_weights_seed", "inner.optimizer")


@dataclass(frozen=True)
class BranchedStage:
    """The state of one stage from which the new run continues."""

    saved: SavedStage  # in the folder of the first run
    root: str  # of its outer state
    is_tip: bool  # whether it is the newest state that the first run's chain certifies here
    is_copy: bool  # of a stage that another node trained
    chain: Chain | None = None  # the newest one of the stage that this computer can verify; None without a foundation


@dataclass(frozen=True)
class Branch:
    """A new run and the states from which it continues."""

    choice: OfferChoice
    stages: tuple[BranchedStage, ...]


@dataclass(frozen=True)
class RunBrancher:
    """Makes a branch of one run. No node may run on the data folder meanwhile."""

    owner: Owner  # of the new run
    node_id: NodeId  # gets the first seat
    limit_mb: int  # of all saved states on this computer

    def branch(self, offer: RunOffer, *, force: bool, wish: BranchWish = NEWEST) -> Branch:
        """Sign and store a run that continues this one. The same states and changes give the same run.

        Raises UsageError if the state of a stage is missing here, or is not the newest certified one without `force`
        and without a choice, or if a change does not fit the states. Raises StorageError; a repeated call then
        completes what is missing.
        """
        return self._make(offer, *self._plan(offer, wish, force=force))

    def _plan(
        self, offer: RunOffer, wish: BranchWish, *, force: bool = False
    ) -> tuple[RunOffer, tuple[BranchedStage, ...]]:
        """The new run and the states from which it continues. Nothing is stored."""
        stages = tuple(self._stage(offer, index, wish) for index in range(len(plan_of(offer.parameters))))
        older = [stage for stage in stages if not stage.is_tip]
        if older and not force and not wish.has_chosen:
            raise UsageError(
                f"The saved state of layers {layers_text(older[0].saved.layers)} is not the newest one that the "
                "members certified.",
                "Start your node and stop it again, so that it follows, or continue from this state with --force.",
            )
        return self._signed(offer, stages, wish), stages

    def _make(self, offer: RunOffer, branched: RunOffer, stages: tuple[BranchedStage, ...]) -> Branch:
        for stage in stages:
            self._copy(stage, branched)
        self._copy_position(offer.run_id, branched.run_id)
        self._found(offer, branched, stages)
        return Branch(JoinedRuns(self.owner.data_dir).keep(branched), stages)

    def rollback(self, offer: RunOffer, wish: BranchWish) -> Branch:
        """Continue the owner's run from an earlier state, and name the new run as its successor.

        Raises UsageError if the wallet does not own the run, or if the run has another successor. Raises like `branch`.
        """
        newest = newest_offer(self.owner, offer)
        new, stages = self._plan(newest, wish)
        successor = newest.parameters.successor
        if successor not in {"", new.run_id}:
            raise UsageError(
                f"The owner continues run {offer.run_id[:16]} as run {successor[:16]} already, and its members follow.",
                f"Roll that one back: `neuroshard run rollback {successor}`.",
            )
        made = self._make(newest, new, stages)
        self._admit_members(newest, new)
        if not successor:
            number = newest.parameters.version + 1
            sign_version(self.owner, newest, replace(newest.parameters, version=number, successor=new.run_id))
        return made

    def _admit_members(self, offer: RunOffer, new: RunOffer) -> None:
        """Make a pass of the new run for each member of a run of friends. They get it from this node."""
        stored = StoredPasses(self.owner.data_dir, new)
        members = [each.statement.wallet for each in StoredPasses(self.owner.data_dir, offer).register().passes()]
        known = {each.statement.wallet for each in stored.register().passes()}
        missing = [wallet for wallet in members if wallet not in known]
        if offer.parameters.admission == "strangers" or not missing:
            return
        now = time.time()
        label = f"members of {offer.run_id[:8]}, {len(stored.issued().issued) + 1}"
        terms = InvitationTerms(now + PASS_SECONDS, len(missing), label)
        invitation = stored.issue(self.owner.wallet, terms, InvitedPlaces(""))
        old = tuple(each.encoded for each in stored.register().passes())
        stored.keep_papers(Papers((*old, *(invitation.pass_for(wallet, now) for wallet in missing))))

    def _signed(self, offer: RunOffer, stages: tuple[BranchedStage, ...], wish: BranchWish) -> RunOffer:
        outer_step = stages[0].saved.manifest.meta.outer_step
        before = replace(
            self._parameters(offer, stages[0], outer_step),
            version=1,
            holds_from_outer_step=0,
            seeds=(),
            successor="",
            branch=BranchPoint(offer.run_id, outer_step, offer.data_run_id),
        )
        parameters = replace(apply_config(before, wish.changes), version=1, holds_from_outer_step=0)
        kept = [name for name in changed_fields(before, parameters) if name.startswith(_KEPT)]
        averaging = {each.outer.strategy == "averaging" for each in (before, parameters)}
        if kept or len(averaging) > 1:
            names = ", ".join(kept) or "outer.strategy"
            raise UsageError(f"A branch cannot change {names}: the saved states would not fit.", "Make a new run.")
        if wish.has_chosen and not averaging.pop():  # averaged gradients have their moments in the certified state
            sequences = tuple(_line_of(stage.saved).sequences for stage in stages)
            roots = tuple(stage.root for stage in stages)
            branch = BranchPoint(offer.run_id, outer_step, offer.data_run_id, roots, sequences)
            parameters = replace(parameters, branch=branch)
        return RunOffer.of_new_run(SignedRunParameters.sign(self.owner.wallet, parameters))

    def _parameters(self, offer: RunOffer, first: BranchedStage, outer_step: int) -> RunParameters:
        """The parameters that apply at an outer step, by the values of the first stage that are on this computer."""
        versions = () if first.chain is None else first.chain.ledger.versions
        return applied_parameters(offer.initial, versions, outer_step)

    def _folders(self, run_id: RunId, layers: LayerRange) -> tuple[Path, Path]:
        """The folders of this node's own states of a stage, and of its copy of another node's."""
        data_dir = self.owner.data_dir
        return (
            stage_folder(data_dir, self.owner.wallet.wallet_id, run_id, layers),
            copy_folder(data_dir, run_id, layers),
        )

    def _stage(self, offer: RunOffer, index: int, wish: BranchWish) -> BranchedStage:
        """The wanted state of a stage. Without a wish it is the certified one, otherwise the newest one that is whole.

        Raises UsageError, StorageError.
        """
        layers = plan_of(offer.parameters)[index]
        own, copied = self._folders(offer.run_id, layers)
        collected = _collected(wish.states, offer.run_id, layers)
        chain = self._chain(offer, index, (own, copied, *collected), wish.states)
        states = [*_saved(own, chain, is_copy=False), *_saved(copied, chain, is_copy=True)]
        if wish.has_chosen:
            is_held = any(not stage.is_copy for stage in states)
            certified = {} if chain is None else certified_states(chain, _certificates(collected))
            found = (stage for folder in collected for stage in _saved(folder, chain, is_copy=not is_held))
            states += [each for each in found if (each.saved.generation.outer_step, each.root) in certified]
            return _chosen(states, offer.run_id, layers, wish)
        newest: BranchedStage | None = None
        for stage in states:
            if stage.is_tip:
                return stage
            newest = newest or stage
        if newest is None:
            raise UsageError(
                f"This computer has no saved state of layers {layers_text(layers)} of run {offer.run_id[:16]}.",
                "A member whose computer has all layers can continue the run with `neuroshard run branch`.",
            )
        return newest

    def _chain(self, offer: RunOffer, index: int, folders: Sequence[Path], states: Path | None) -> Chain | None:
        """The newest chain of a stage that a folder proves; None without a foundation. Raises DataError."""
        foundations = StoredFoundations(self.owner.data_dir).read(offer)
        if states is not None:
            foundations = merged(foundations, StoredFoundations(states).read(offer))
        founding = RunVersions(offer, foundations).founding_of(index)
        if founding is None:
            return None
        chains = [proven_chain(FileChainStore(folder / ROUNDS_FOLDER), founding) for folder in folders]
        return max(chains, key=lambda chain: chain.standing.height)

    def _copy(self, stage: BranchedStage, new: RunOffer) -> None:
        """Copy a state into the folder of the new run, unless an earlier call did. Raises StorageError."""
        saved, data_dir, branch = stage.saved, self.owner.data_dir, new.parameters.branch
        folder = self._folders(new.run_id, saved.layers)[stage.is_copy]
        limit = self.limit_mb * 1_000_000
        store = CheckpointStore(
            folder, StorageLimits(limit, all_bytes=limit, counted=state_folders(data_dir)), data_dir
        )
        if any(each.step == saved.generation.step for each in store.generations()):
            return
        is_fresh = branch is not None and bool(branch.roots)
        incoming, digest = folder / INCOMING, saved.manifest.tensors.sha256
        meta = replace(
            saved.manifest.meta, run_id=new.run_id, wallet_id=self.owner.wallet.wallet_id, node_id=self.node_id
        )
        try:
            layout = fresh_layout(saved, new.parameters) if is_fresh else None
            store.ensure_room(saved.generation.bytes if layout is None else layout.file_bytes)
            if layout is None:
                shutil.copyfile(saved.tensor_file, incoming)
            if sha256_of(incoming if layout is None else saved.tensor_file) != digest:
                raise CheckpointError(f"{saved.tensor_file} is damaged.", "Start your node: it uses the state before.")
            if layout is not None:
                digest = write_fresh(saved, layout, incoming)
            made = store.adopt(meta, incoming, digest)
            residual = residual_path(saved.tensor_file)
            if residual.exists() and not is_fresh:
                adopted = store.read_manifest(Path(made.path)).tensors.file
                shutil.copyfile(residual, residual_path(folder / adopted))
        except OSError as error:
            raise StorageError(f"{folder} cannot be written: {error.strerror or error}.", "Free some space.") from error
        finally:
            incoming.unlink(missing_ok=True)

    def _copy_position(self, before: RunId, after: RunId) -> None:
        """Continue with the data after those that this node has sent for the first run. Raises StorageError."""
        source, target = (
            DriveStore(self.owner.data_dir, self.owner.wallet.wallet_id, self.node_id, run).folder / POSITION_FILE
            for run in (before, after)
        )
        try:
            if source.exists() and not target.exists():
                make_folder(target.parent, self.owner.data_dir)
                write_atomically(target, source.read_bytes())
        except OSError as error:
            raise StorageError(f"{target} cannot be written: {error.strerror or error}.") from error

    def _found(self, offer: RunOffer, branched: RunOffer, stages: tuple[BranchedStage, ...]) -> None:
        """Sign where the chains of the new run begin, with this node as the only voter. Raises StorageError.

        If the run keeps its owner, its deputies and named wallets stay, and its voters need no new probation.
        """
        stored = StoredFoundations(self.owner.data_dir)
        if stored.read(branched).known:
            return
        keeps_owner = offer.owner == self.owner.wallet.wallet_id
        before = stored.read(offer) if keeps_owner else no_foundations(offer)
        seat = Seat(self.owner.wallet.wallet_id, self.node_id, 0)
        committee = Committee.founded([seat], is_open=branched.parameters.admission != "friends")
        starts = [
            StageStart(
                *(index, committee, 0, stage.saved.manifest.meta.outer_step, stage.root),
                candidates=self._former_voters(offer, stage) if keeps_owner else (),
            )
            for index, stage in enumerate(stages)
        ]
        first = no_foundations(branched)
        statement = first.next(self.owner.wallet, starts, before.deputies, before.trusted)
        stored.write(branched, first.with_statements([statement]))

    def _former_voters(self, offer: RunOffer, stage: BranchedStage) -> tuple[Candidate, ...]:
        """The wallets that had a seat at the state of a stage, as candidates that have worked for long enough.

        A wallet that the owner has removed since, or that has voted twice, is not among them.
        """
        chain = stage.chain
        if chain is None:
            return ()
        members, strangers = StoredPasses(self.owner.data_dir, offer).register(), chain.ledger.strangers
        return tuple(
            Candidate(seat.wallet_id, seat.node_id, ADMISSION_SECONDS)
            for seat in seats_at(chain, stage.saved.manifest.meta.outer_step)
            if seat.wallet_id != offer.owner
            and not members.is_removed(seat.wallet_id)
            and (strangers is None or seat.wallet_id not in strangers.expelled)
        )


def _root_of(saved: SavedStage) -> str:
    """Root of the outer state in a saved stage. Raises CheckpointError, StorageError."""
    try:
        return root_of_file(Path(saved.generation.path), saved.manifest)
    except OSError as error:
        raise StorageError(f"{saved.tensor_file} cannot be read: {error.strerror or error}.") from error


def seats_at(chain: Chain, outer_step: int) -> tuple[Seat, ...]:
    """The seats after the last value of an outer step; none if the chain begins later."""
    if outer_step < chain.start.outer_step:
        return ()
    committees = [each.value.next_committee for each in chain.changes if each.value.outer_step <= outer_step]
    last = committees[-1] if committees else None
    return (last or chain.start.committee).seats


def _line_of(saved: SavedStage) -> LineProgress:
    return line_from_json(saved.manifest.meta.extra.get("outer"))


def _saved(folder: Path, chain: Chain | None, *, is_copy: bool) -> Iterator[BranchedStage]:
    """The whole states in the folder of a stage, the newest first. Raises StorageError."""
    for saved in saved_stages([folder]):
        if saved.generation.step > 0 and saved.has_tensors:
            root = _root_of(saved)
            is_tip = chain is not None and chain.standing.is_state(root, saved.generation.outer_step)
            yield BranchedStage(saved, root, is_tip, is_copy, chain)


def _collected(states: Path | None, run_id: RunId, layers: LayerRange) -> list[Path]:
    """The folders of a stage that `checkpoint assemble` has filled. Raises UsageError for a folder without the run."""
    if states is None:
        return []
    found = [folder for folder in search_stage_folders(states) if folder.parent.name == run_id]
    if not found:
        action = "Name the folder that `checkpoint assemble --out` has filled."
        raise UsageError(f"{states} has no states of run {run_id[:16]}.", action)
    return [folder for folder in found if any(stage.layers == layers for stage in saved_stages([folder]))]


def _certificates(folders: Iterable[Path]) -> list[bytes]:
    """The certificates next to collected states. Raises StorageError."""
    found = (read_bounded(folder / CERTIFICATE_FILE, MAX_CERTIFICATE_BYTES) for folder in folders)
    return [data for data in found if data is not None]


def _chosen(states: Sequence[BranchedStage], run_id: RunId, layers: LayerRange, wish: BranchWish) -> BranchedStage:
    """The wanted one of a stage's states. Raises UsageError that names those there are, and how to get others."""
    by_time = sorted(states, key=lambda each: each.saved.generation.time)
    where = f"of layers {layers_text(layers)} on this computer"
    collect = _how_to_collect(run_id, wish)
    if not by_time:
        raise UsageError(f"There is no saved state {where}.", collect)
    if wish.outer_step is not None:
        # of several the first one: the later ones have more steps that nobody has certified
        found = next((each for each in by_time if each.saved.generation.outer_step == wish.outer_step), None)
        if found is None:
            steps = sorted({each.saved.generation.outer_step for each in by_time})
            raise UsageError(
                f"No saved state {where} is that after outer step {wish.outer_step:,}.",
                f"Name one of these outer steps: {', '.join(f'{step:,}' for step in steps)}. {collect}",
            )
        return found
    before = [each for each in by_time if wish.at is not None and each.saved.generation.time <= wish.at]
    if not before:
        raise UsageError(
            f"The first saved state {where} is of {moment(by_time[0].saved.generation.time)}.",
            f"Name that time or a later one. `neuroshard checkpoint list` shows all of them. {collect}",
        )
    return before[-1]


def _how_to_collect(run_id: RunId, wish: BranchWish) -> str:
    """The command that gets the wanted states from the nodes of the run, as a sentence."""
    if wish.states is not None:
        return "The folder of --states has no other certified state of them."
    which = f"--outer-step {wish.outer_step}" if wish.at is None else f"--at {moment(wish.at)}"
    return (
        f"Nodes of the run may have it: `neuroshard checkpoint assemble --run {run_id} {which} --out FOLDER` collects "
        "the states while they run; then add `--states FOLDER`."
    )


def fresh_layout(saved: SavedStage, parameters: RunParameters) -> TensorLayout:
    """The layout of a state for a branch. A collected state has no moments: they are added. Raises CheckpointError."""
    meta = saved.manifest.meta
    with saved.tensor_file.open("rb") as source:
        held, _ = read_layout(source, saved.manifest.tensors.bytes)
    if any(name.startswith(MOMENTS) for name in held.specs):
        return held
    return snapshot_layout(meta.architecture, meta.layers, parameters.outer, parameters.inner)


def write_fresh(saved: SavedStage, layout: TensorLayout, target: Path) -> str:
    """Write the tensors of a state with the moments of the inner optimizer at zero; return the file's digest.

    Raises CheckpointError, OSError.
    """
    with saved.tensor_file.open("rb") as source, target.open("wb") as file:
        held, header = read_layout(source, saved.manifest.tensors.bytes)
        digest = write_tensor_file(file, layout, _fresh_bytes(source, held, len(header), layout))
        file.flush()
        os.fsync(file.fileno())
    return digest


def _fresh_bytes(source: IO[bytes], held: TensorLayout, start: int, layout: TensorLayout) -> Iterator[memoryview]:
    """The bytes of a layout: zeros for moments, and those of the source for all others."""
    for name, spec in layout.specs.items():
        known = held.specs.get(name)
        is_moment, size = name.startswith(MOMENTS), spec.stop - spec.start
        if not is_moment and (known is None or known.stop - known.start != size):
            raise CheckpointError(f"A collected state has another {name} than this run.", "Collect it again.")
        if known is not None:
            source.seek(start + known.start)
        for done in range(0, size, _PART_BYTES):
            part = min(_PART_BYTES, size - done)
            yield memoryview(bytes(part) if is_moment else source.read(part))
