"""Trains as long as the node lives: one set of stages after the other, and nothing stays of the one before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import anyio

from neuroshard.errors import StorageError
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.node.command_loop import CommandLoop
from neuroshard.node.publisher import Publisher
from neuroshard.node.relocating import Relocating
from neuroshard.node.stage_training import Ground, RunningNode, StageTraining
from neuroshard.node.stopping import StopRequest
from neuroshard.node.tasks import Companion, accompanied
from neuroshard.status.snapshot import NodeState

OTHER_LAYERS = "Saving what it has learned, before it goes on with what the swarm needs now."


class Observed(Protocol):
    """Tells others what the running parts do: an Observer."""

    async def run(self) -> None:
        """Until cancelled."""
        ...

    def publish(self) -> None:
        """Now."""
        ...


@dataclass
class TrainingLife:
    """Used once a start. Whatever else refers to a RunningNode lets it go when this does: its weights are large."""

    training: StageTraining
    loop: CommandLoop
    stop: StopRequest
    publisher: Publisher
    observer: Callable[[RunningNode], Observed]
    steps: int | None = None  # to make from now on; None: as many as there is time for
    _node: RunningNode | None = field(default=None, init=False)

    async def run(
        self, begin: Callable[[], Awaitable[RunningNode]], companions: Callable[[Ground], Sequence[Companion]]
    ) -> None:
        """Start up and train until a stop; companions run beside the training. Raises NeuroShardError.

        A stop during a start-up cancels it.
        """
        if await self._began(begin, "nothing was trained since the start"):
            ground = self._present().ground
            await accompanied(partial(self._go_on, ground), *companions(ground))

    async def _began(self, begin: Callable[[], Awaitable[RunningNode]], nothing_lost: str) -> bool:
        """Whether the parts run; they do not when a stop came first."""
        with anyio.CancelScope() as scope:

            def give_up() -> None:
                self.publisher.state(NodeState.STOPPING, f"Stopping; {nothing_lost}.")
                scope.cancel()

            self.stop.react(give_up)
            self._node = await begin()
            return True
        return False

    async def _go_on(self, ground: Ground) -> None:
        """Train, also other stages when the swarm needs them more."""
        while True:
            stages = await self._train()
            if stages is None or self.stop.reason is not None:
                ground.swarm.go_to(None)
                return
            self._node = None
            self.loop.detach()
            if not await self._began(partial(self.training.begin, ground, stages), "everything trained is saved"):
                return

    async def _train(self) -> StageRange | None:
        """Train until a stop was asked for, or all steps are done, or stages are to be begun anew: those then.

        That is when the swarm needs other ones more, or when the others went on from another state of these.

        Raises NeuroShardError, also when the final checkpoint was not saved: whoever stopped the node must not believe
        that all is safe.
        """
        node = self._present()
        trainer, observer = node.trainer, self.observer(node)
        self.loop.attach(node)
        self.stop.react(trainer.stop)
        last_step = None if self.steps is None else trainer.record.progress.steps + self.steps
        elsewhere = list[StageRange]()

        async def leave_for(wanted: Callable[[], Awaitable[StageRange]]) -> None:
            elsewhere.append(await wanted())
            node.ground.swarm.go_to(elsewhere[-1])  # while it saves what it has, the others count on it there
            trainer.stop(OTHER_LAYERS)

        companions: list[Companion] = [observer.run, node.samples.run]
        if node.stages is not None:
            companions += [
                partial(leave_for, partial(self._needed, node)),
                partial(leave_for, partial(_followed, node)),
            ]
        if node.is_driving:
            companions.append(node.feed.run)
        if node.keeper is not None:
            companions.append(node.keeper.run)
        try:
            await accompanied(partial(trainer.run, last_step), *companions)
        finally:
            observer.publish()
        if node.keeper is not None:
            await node.keeper.save_in_the_end()
        if trainer.last_save_failed:
            raise StorageError(
                "The final checkpoint could not be saved; the steps since the one before it are lost.",
                "The log says why. Older checkpoints are still there: `neuroshard checkpoint list`.",
            )
        return elsewhere[0] if elsewhere else None

    async def _needed(self, node: RunningNode) -> StageRange:
        """Wait until the swarm needs other stages more, and this node is not paused; those."""
        ground, trainer = node.ground, node.trainer
        has_state = partial(self.training.has_checkpoint, ground)
        relocating = Relocating(
            ground.swarm, ground.windows, has_state=has_state, may_go=lambda: not trainer.is_pause_wanted
        )
        return await relocating.wanted()

    def _present(self) -> RunningNode:
        if self._node is None:
            raise AssertionError("nothing has begun")
        return self._node


async def _followed(node: RunningNode) -> StageRange:
    """Wait until the others went on from another state of these stages, and this node is not paused."""
    stages = await node.must_follow()
    await node.trainer.until_no_pause_is_wanted()
    return stages
