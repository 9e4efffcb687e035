"""Start-up before PyTorch is loaded: enters the run that this node joins, and lists the start-up steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from neuroshard.config.settings import Settings
from neuroshard.model.architecture import parameter_count
from neuroshard.runs.finding import FoundRun, NoRun, RunFinder
from neuroshard.runs.offer import RunOffer
from neuroshard.status.board import Publisher, StartupProgress
from neuroshard.status.snapshot import ModelStatus, NodeState, RunStatus
from neuroshard.types import WalletId

LOADING = "Loading PyTorch"
HARDWARE = "Measuring this computer"
DEMO_DATA = "Building the demo data"
OWN_TEXT = "Reading your text"
RUN = "Finding the run"
DATA = "Opening the training data"
MODEL = "Building the model"
CHECKPOINT = "Looking for a checkpoint"
FIRST_STEP = "Making the first step"


def begins_with_run(settings: Settings, *, is_demo: bool) -> bool:
    """Whether the run decides about the data: it was named or chosen, or there are no data of this computer's own."""
    return settings.run is not None or (settings.genesis is None and settings.text is None and not is_demo)


def startup_steps(settings: Settings, *, is_demo: bool, holds_layers: bool) -> tuple[str, ...]:
    """List the steps of one start in order. A run to join comes first: the search begins before PyTorch loads."""
    is_first = begins_with_run(settings, is_demo=is_demo)
    own_text = settings.text is not None and not is_first
    named = (RUN,) if is_first else ()
    demo = (DEMO_DATA,) if is_demo else (OWN_TEXT,) if own_text else ()
    suggested = () if is_first or is_demo or own_text else (RUN,)
    holding = (MODEL, CHECKPOINT) if holds_layers else ()
    return (*named, LOADING, HARDWARE, *demo, DATA, *suggested, *holding, FIRST_STEP)


@dataclass
class RunArrival:
    """Finds the run to join, once per start. `enter` makes this node known to the nodes of the run."""

    finder: RunFinder
    publisher: Publisher
    startup: StartupProgress
    wallet_id: WalletId
    enter: Callable[[RunOffer], None]
    _found: FoundRun | None = field(default=None, init=False)
    _done: anyio.Event = field(default_factory=anyio.Event, init=False)

    async def run(self) -> None:
        """Wait until the run is found, and show the wait in the status. Raises NeuroShardError if it cannot be."""
        with self.startup.stage(RUN):

            def report(reason: str) -> None:
                self.startup.report(RUN, reason)
                self.publisher.state(NodeState.STARTING, reason)

            found = await self.finder.first(report)
        publish_run_status(self.publisher, found.offer, found, self.wallet_id)
        self.enter(found.offer)
        self._found = found
        self._done.set()

    async def found(self) -> FoundRun:
        """Wait for the run."""
        await self._done.wait()
        assert self._found is not None
        return self._found


def publish_run_status(
    publisher: Publisher, offer: RunOffer, found: FoundRun | NoRun, wallet_id: WalletId, *, is_demo: bool = False
) -> None:
    """Publish the run and its model, without this node's layers, which are chosen later."""
    architecture = offer.parameters.architecture
    publisher.change(
        model=ModelStatus(architecture, parameter_count(architecture), None, ()),
        run=RunStatus(
            run_id=offer.run_id,
            is_own=offer.owner == wallet_id,
            is_demo=is_demo,
            explanation=found.explanation,
        ),
    )
