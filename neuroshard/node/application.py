"""Life of a running node on its event loop: start up, train, obey commands, stop; one task tree."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import anyio
import trio

from neuroshard.errors import NeuroShardError, StorageError
from neuroshard.identity import Wallet
from neuroshard.node.assembly import Assembly
from neuroshard.node.command_loop import CommandLoop
from neuroshard.node.configuration import Configuration
from neuroshard.node.demo import DemoOptions
from neuroshard.node.drive_training import begin_driving
from neuroshard.node.holder_watch import HolderWatch
from neuroshard.node.identity import node_identity
from neuroshard.node.local_swarm import Invitation, LocalSwarm
from neuroshard.node.observation import Observer
from neuroshard.node.own_run import OwnRun
from neuroshard.node.pipeline_status import tell_stages
from neuroshard.node.placing import Placing
from neuroshard.node.publisher import Publisher
from neuroshard.node.relocating import Relocating
from neuroshard.node.society import Society
from neuroshard.node.stage_training import Ground, RunningNode, StageTraining
from neuroshard.node.stopping import StopRequest
from neuroshard.node.tasks import accompanied
from neuroshard.status.board import StatusBoard
from neuroshard.status.commands import CommandChannel
from neuroshard.status.snapshot import NodeState
from neuroshard.swarm.stage_coverage import StageRange
from neuroshard.telemetry.counters import Counters

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExitReport:
    """How a node ended."""

    exit_code: int
    message: str


class Application:
    """One node, from nothing to the end."""

    def __init__(
        self,
        *,
        configuration: Configuration,
        wallet: Wallet,
        board: StatusBoard,
        commands: CommandChannel,
        counters: Counters,
        stop: StopRequest,
        demo: DemoOptions | None,
        is_trainer: bool,
    ) -> None:
        """A trainer drives the layers of others and holds none."""
        self._configuration = configuration
        self._wallet = wallet
        self._board = board
        self._commands = commands
        self._counters = counters
        self._demo = demo
        self._is_trainer = is_trainer
        self._publisher = Publisher(board)
        self._stop = stop

    def run(self) -> ExitReport:
        """Run until stopped. Raises NeuroShardError when the node cannot go on."""
        return trio.run(self._main)  # pyright: ignore[reportUnknownMemberType]

    async def _main(self) -> ExitReport:
        loop = CommandLoop(self._commands, self._board, self._configuration, self._stop.ask)
        identity = node_identity(self._wallet, self._configuration.settings.data_dir)
        self._publisher.change(node_id=identity.node_id, wallet_id=identity.wallet_id)
        society = Society.of(self._configuration.settings, identity)
        await accompanied(partial(self._live, loop, society), loop.run, society.networking.run)
        return ExitReport(0, f"Stopped: {self._stop.reason or 'all steps are done'}.")

    async def _live(self, loop: CommandLoop, society: Society) -> None:
        """Start up and train. A stop during the start-up cancels it; nothing was trained yet, so nothing is lost."""
        assembly = Assembly(
            configuration=self._configuration,
            wallet=self._wallet,
            identity=society.identity,
            publisher=self._publisher,
            finder=society.finder,
            enter=partial(self._enter, society),
            demo=self._demo,
            holds_layers=not self._is_trainer,
        )
        training = StageTraining(
            self._configuration.settings,
            society.identity,
            self._publisher,
            assembly.startup,
            is_demo=self._demo is not None,
        )

        async def begin() -> RunningNode:
            if self._is_trainer:
                settings = self._configuration.settings
                ground = await assembly.lay_to_drive()
                return begin_driving(ground, settings, society.identity, self._publisher, assembly.startup)
            return await training.begin(*await assembly.lay())

        try:
            node = await self._start_up(begin)
            if node is not None:
                companions = [
                    partial(self._further_nodes, node.ground, society),
                    society.exchange.look_on_shelf,
                    HolderWatch(node.ground.swarm).run,
                ]
                if training.copies is not None:
                    companions.append(training.copies.run)
                await accompanied(partial(self._train_on, node, training, loop, society), *companions)
        except NeuroShardError as error:
            self._publisher.state(NodeState.FAILED, str(error))
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await assembly.close()

    async def _start_up(
        self, begin: Callable[[], Awaitable[RunningNode]], nothing_lost: str = "nothing was trained since the start"
    ) -> RunningNode | None:
        """The running parts, or None when a stop came first."""
        with anyio.CancelScope() as scope:

            def give_up() -> None:
                self._publisher.state(NodeState.STOPPING, f"Stopping; {nothing_lost}.")
                scope.cancel()

            self._stop.react(give_up)
            return await begin()
        return None

    async def _train_on(self, node: RunningNode, training: StageTraining, loop: CommandLoop, society: Society) -> None:
        """Train, also other stages when the swarm needs them more."""
        begun: RunningNode | None = node
        while begun is not None:
            loop.attach(begun)
            stages = await self._train(begun, training, society)
            if stages is None or self._stop.reason is not None:
                return
            begin = partial(training.begin, begun.ground, stages)
            begun = await self._start_up(begin, "everything that was trained is saved")

    async def _train(self, node: RunningNode, training: StageTraining, society: Society) -> StageRange | None:
        """Train until a stop was asked for, or the demo's steps are done, or stages are to be begun anew: those then.

        That is when the swarm needs other ones more, or when the others went on from another state of these.

        Raises NeuroShardError, also when the final checkpoint was not saved: whoever stopped the node must not believe
        that all is safe.
        """
        observer = Observer(node, society, self._publisher, self._counters)
        trainer = node.trainer
        self._stop.react(trainer.stop)
        wanted = None if self._demo is None else self._demo.steps
        last_step = None if wanted is None else trainer.record.progress.steps + wanted
        elsewhere = list[StageRange]()

        async def look_for_need() -> None:
            has_state = partial(training.has_checkpoint, node.ground)
            elsewhere.append(await Relocating(node.ground.swarm, node.ground.windows, has_state=has_state).wanted())
            trainer.stop()

        async def follow_others() -> None:
            elsewhere.append(await node.must_follow())
            trainer.stop()

        companions = [observer.run]
        if node.stages is not None:
            companions += [look_for_need, follow_others]
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

    def _enter(self, society: Society, run: OwnRun) -> Placing:
        """Become one of the run's nodes; which layers this one takes is chosen next."""
        is_swarm = self._demo is not None and self._demo.nodes > 1
        swarm = society.serve(run.offer, self._board.current, is_shared=is_swarm or run.is_joined)
        society.networking.attach(partial(tell_stages, swarm, self._publisher, self._board.current))
        return Placing(swarm, society.networking)

    async def _further_nodes(self, ground: Ground, society: Society) -> None:
        """The other nodes of `demo --nodes N`, which join the first one's run."""
        if self._demo is None or self._demo.nodes < 2:
            return
        network = await society.networking.up()
        invitation = Invitation(
            run_id=ground.run.run_id,
            peer=network.transport.addresses()[0],
            genesis=ground.fetcher.source.description,
            max_stages=self._demo.stages_a_node,
        )
        swarm = LocalSwarm(self._configuration.settings.data_dir, self._demo.nodes, ground.threads)
        await swarm.run(invitation)
