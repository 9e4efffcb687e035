"""Branches a run: another run continues from states on this computer. A person decides.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from neuroshard.config.run_parameters import BranchPoint, RunParameters
from neuroshard.config.state_file import make_folder, write_atomically
from neuroshard.consensus.chain import Chain
from neuroshard.consensus.committee import Committee, Seat
from neuroshard.consensus.foundation import StageStart
from neuroshard.consensus.stage_chain import FileChainStore, proven_chain
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
from neuroshard.runs.foundations import StoredFoundations, no_foundations
from neuroshard.runs.offer import OfferChoice, RunOffer, changed_fields
from neuroshard.runs.run_file import RunConfig, apply_config
from neuroshard.runs.stored_passes import StoredPasses
from neuroshard.runs.stored_runs import JoinedRuns
from neuroshard.state.checkpoint_catalogue import SavedStage, moment, saved_stages
from neuroshard.state.checkpoint_store import CheckpointStore, stage_folder
from neuroshard.state.disk_space import StorageLimits, copy_folder, state_folders
from neuroshard.state.kept_states import root_of_file
from neuroshard.state.outer_state import line_from_json
from neuroshard.state.tensor_file import read_layout, residual_path, sha256_of
from neuroshard.training.drive_store import POSITION_FILE, DriveStore
from neuroshard.types import JsonValue, LayerRange, NodeId, RunId

INCOMING = "incoming.part"
PASS_SECONDS = 30 * 86_400.0  # in which a member of the run before can follow
MOMENTS = "inner/"  # begins the names of the inner optimizer's tensors
_ZEROS = 1 << 20  # bytes written at a time


@dataclass(frozen=True)
class BranchWish:
    """The states from which a branch continues, at most one of both, and the settings that it changes."""

    at: float | None = None  # seconds since the epoch: the newest state of each stage at or before it
    outer_step: int | None = None  # the state after this number of outer steps
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
        self._found(branched, stages)
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
        folder = self._folders(offer.run_id, first.saved.layers)[first.is_copy]
        chain = self._chain(offer, 0, folder)
        return applied_parameters(offer.initial, () if chain is None else chain.ledger.versions, outer_step)

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
        folders = self._folders(offer.run_id, layers)
        chain = self._chain(offer, index, folders[0])
        if wish.has_chosen:
            return _chosen(list(self._saved(folders, chain)), layers, wish)
        newest: BranchedStage | None = None
        for stage in self._saved(folders, chain):
            if stage.is_tip:
                return stage
            newest = newest or stage
        if newest is None:
            raise UsageError(
                f"This computer has no saved state of layers {layers_text(layers)} of run {offer.run_id[:16]}.",
                "A member whose computer has all layers can continue the run with `neuroshard run branch`.",
            )
        return newest

    def _saved(self, folders: tuple[Path, Path], chain: Chain | None) -> Iterator[BranchedStage]:
        for folder in folders:
            for saved in saved_stages([folder]):
                if saved.generation.step > 0 and saved.has_tensors:
                    root = _root_of(saved)
                    is_tip = chain is not None and chain.standing.is_state(root, saved.generation.outer_step)
                    yield BranchedStage(saved, root, is_tip, folder == folders[1])

    def _chain(self, offer: RunOffer, index: int, folder: Path) -> Chain | None:
        """The part of the stage's chain that this computer can verify; None without a foundation."""
        foundations = StoredFoundations(self.owner.data_dir).read(offer)
        founding = RunVersions(offer, foundations).founding_of(index)
        return None if founding is None else proven_chain(FileChainStore(folder / ROUNDS_FOLDER), founding)

    def _copy(self, stage: BranchedStage, new: RunOffer) -> None:
        """Copy a state into the folder of the new run, unless an earlier call did. Raises StorageError."""
        saved, data_dir, branch = stage.saved, self.owner.data_dir, new.parameters.branch
        is_fresh = branch is not None and bool(branch.roots)
        folder = self._folders(new.run_id, saved.layers)[stage.is_copy]
        limit = self.limit_mb * 1_000_000
        store = CheckpointStore(
            folder, StorageLimits(limit, all_bytes=limit, counted=state_folders(data_dir)), data_dir
        )
        if any(each.step == saved.generation.step for each in store.generations()):
            return
        store.ensure_room(saved.generation.bytes)
        incoming, digest = folder / INCOMING, saved.manifest.tensors.sha256
        try:
            shutil.copyfile(saved.tensor_file, incoming)
            if sha256_of(incoming) != digest:
                raise CheckpointError(f"{saved.tensor_file} is damaged.", "Start your node: it uses the state before.")
            if is_fresh:
                clear_moments(incoming)
                digest = sha256_of(incoming)
            made = store.adopt(replace(saved.manifest.meta, run_id=new.run_id), incoming, digest)
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

    def _found(self, branched: RunOffer, stages: tuple[BranchedStage, ...]) -> None:
        """Sign where the chains of the new run begin, with this node as the only voter. Raises StorageError."""
        stored = StoredFoundations(self.owner.data_dir)
        if stored.read(branched).known:
            return
        seat = Seat(self.owner.wallet.wallet_id, self.node_id, 0)
        committee = Committee.founded([seat], is_open=branched.parameters.admission != "friends")
        starts = [
            StageStart(index, committee, 0, stage.saved.manifest.meta.outer_step, stage.root)
            for index, stage in enumerate(stages)
        ]
        first = no_foundations(branched)
        stored.write(branched, first.with_statements([first.next(self.owner.wallet, starts)]))


def _root_of(saved: SavedStage) -> str:
    """Root of the outer state in a saved stage. Raises CheckpointError, StorageError."""
    try:
        return root_of_file(Path(saved.generation.path), saved.manifest)
    except OSError as error:
        raise StorageError(f"{saved.tensor_file} cannot be read: {error.strerror or error}.") from error


def _line_of(saved: SavedStage) -> LineProgress:
    return line_from_json(saved.manifest.meta.extra.get("outer"))


def _chosen(states: Sequence[BranchedStage], layers: LayerRange, wish: BranchWish) -> BranchedStage:
    """The wanted one of a stage's saved states. Raises UsageError that names those there are."""
    by_time = sorted(states, key=lambda each: each.saved.generation.time)
    where = f"of layers {layers_text(layers)} on this computer"
    if not by_time:
        raise UsageError(f"There is no saved state {where}.", "Use a computer that has all layers of the run.")
    if wish.outer_step is not None:
        # of several the first one: the later ones have more steps that nobody has certified
        found = next((each for each in by_time if each.saved.generation.outer_step == wish.outer_step), None)
        if found is None:
            steps = sorted({each.saved.generation.outer_step for each in by_time})
            raise UsageError(
                f"No saved state {where} is that after outer step {wish.outer_step:,}.",
                f"Name one of these outer steps: {', '.join(f'{step:,}' for step in steps)}.",
            )
        return found
    before = [each for each in by_time if wish.at is not None and each.saved.generation.time <= wish.at]
    if not before:
        raise UsageError(
            f"The first saved state {where} is of {moment(by_time[0].saved.generation.time)}.",
            "Name that time or a later one. `neuroshard checkpoint list` shows all of them.",
        )
    return before[-1]


def clear_moments(tensors: Path) -> None:
    """Set the moments of the inner optimizer in a checkpoint's tensor file to zero. Raises CheckpointError, OSError."""
    with tensors.open("r+b") as file:
        layout, header = read_layout(file, tensors.stat().st_size)
        for name, spec in layout.specs.items():
            if name.startswith(MOMENTS):
                file.seek(len(header) + spec.start)
                for start in range(spec.start, spec.stop, _ZEROS):
                    file.write(bytes(min(_ZEROS, spec.stop - start)))
        file.flush()
        os.fsync(file.fileno())
