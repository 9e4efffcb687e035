"""Branches a run: another run, of another owner, continues from the state on this computer.

This is for a run whose owner, deputies and quorum are gone, so that nobody can found it again. A person decides; the
files of the first run stay as they are. The state is copied into the new run's folders, and its foundation names the
roots of the copies, so a node that joins takes no other state.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from neuroshard.config.run_parameters import BranchPoint
from neuroshard.config.state_file import make_folder, write_atomically
from neuroshard.consensus.chain import Chain
from neuroshard.consensus.committee import Committee, Seat
from neuroshard.consensus.foundation import StageStart
from neuroshard.consensus.stage_chain import FileChainStore, proven_chain
from neuroshard.consensus.vote_log import ROUNDS_FOLDER
from neuroshard.errors import CheckpointError, StorageError, UsageError
from neuroshard.identity import SignedRunParameters
from neuroshard.membership.stage_coverage import layers_text
from neuroshard.model.architecture import plan_of
from neuroshard.runs.creation import Owner
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.foundations import StoredFoundations, no_foundations
from neuroshard.runs.offer import OfferChoice, RunOffer
from neuroshard.runs.stored_runs import JoinedRuns
from neuroshard.state.checkpoint_catalogue import SavedStage, saved_stages
from neuroshard.state.checkpoint_store import CheckpointStore, stage_folder
from neuroshard.state.disk_space import StorageLimits, copy_folder, state_folders
from neuroshard.state.outer_state import line_from_json, outer_root
from neuroshard.state.tensor_file import read_layout, residual_path, sha256_of
from neuroshard.training.drive_store import POSITION_FILE, DriveStore
from neuroshard.types import LayerRange, NodeId, RunId

INCOMING = "incoming.part"


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

    def branch(self, offer: RunOffer, *, force: bool) -> Branch:
        """Sign and store a run that continues this one. The same state gives the same run.

        Raises UsageError if the state of a stage is missing here, or is not the newest certified one without `force`.
        Raises StorageError; a repeated call then completes what is missing.
        """
        stages = tuple(self._stage(offer, index) for index in range(len(plan_of(offer.parameters))))
        older = [stage for stage in stages if not stage.is_tip]
        if older and not force:
            raise UsageError(
                f"The saved state of layers {layers_text(older[0].saved.layers)} is not the newest one that the "
                "members certified.",
                "Start your node and stop it again, so that it follows, or continue from this state with --force.",
            )
        branched = self._signed(offer, stages[0].saved.manifest.meta.outer_step)
        for stage in stages:
            self._copy(stage, branched.run_id)
        self._copy_position(offer.run_id, branched.run_id)
        self._found(branched, stages)
        return Branch(JoinedRuns(self.owner.data_dir).keep(branched), stages)

    def _signed(self, offer: RunOffer, outer_step: int) -> RunOffer:
        parameters = replace(
            offer.parameters_at(outer_step),
            version=1,
            holds_from_outer_step=0,
            seeds=(),
            branch=BranchPoint(offer.run_id, outer_step, offer.data_run_id),
        )
        return RunOffer.of_new_run(SignedRunParameters.sign(self.owner.wallet, parameters))

    def _folders(self, run_id: RunId, layers: LayerRange) -> tuple[Path, Path]:
        """The folders of this node's own states of a stage, and of its copy of another node's."""
        data_dir = self.owner.data_dir
        return (
            stage_folder(data_dir, self.owner.wallet.wallet_id, run_id, layers),
            copy_folder(data_dir, run_id, layers),
        )

    def _stage(self, offer: RunOffer, index: int) -> BranchedStage:
        """The certified state of a stage, otherwise the newest one that is whole. Raises UsageError, StorageError."""
        layers = plan_of(offer.parameters)[index]
        folders = self._folders(offer.run_id, layers)
        chain = self._chain(offer, index, folders[0])
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

    def _copy(self, stage: BranchedStage, run_id: RunId) -> None:
        """Copy a state into the folder of the new run, unless an earlier call did. Raises StorageError."""
        saved, data_dir = stage.saved, self.owner.data_dir
        folder = self._folders(run_id, saved.layers)[stage.is_copy]
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
            made = store.adopt(replace(saved.manifest.meta, run_id=run_id), incoming, digest)
            residual = residual_path(saved.tensor_file)
            if residual.exists():
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
    path = saved.tensor_file
    try:
        with path.open("rb") as file:
            layout, _ = read_layout(file, path.stat().st_size)
        line = line_from_json(saved.manifest.meta.extra.get("outer"))
        return outer_root(path, layout, saved.generation.outer_step, line)
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}.") from error
