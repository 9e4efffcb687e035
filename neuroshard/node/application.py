"""Life of a running node on its event loop: start up, train, obey commands, stop; one task tree."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

import anyio
import trio

from neuroshard.errors import NeuroShardError
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
from neuroshard.node.society import Society
from neuroshard.node.stage_safety import StageSafety
from neuroshard.node.stage_training import Ground, RunningNode, StageTraining
from neuroshard.node.stopping import StopRequest
from neuroshard.node.tasks import Companion, accompanied
from neuroshard.node.training_life import TrainingLife
from neuroshard.status.board import StatusBoard
from neuroshard.status.commands import CommandChannel
from neuroshard.status.snapshot import NodeState
from neuroshard.telemetry.counters import Counters
from neuroshard.training.control import PauseWish

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
        self._wish = PauseWish()

    def run(self) -> ExitReport:
        """Run until stopped. Raises NeuroShardError when the node cannot go on."""
        return trio.run(self._main)  # pyright: ignore[reportUnknownMemberType]

    async def _main(self) -> ExitReport:
        if not self._configuration.settings.training:
            self._wish.begin("Started without training: resume to train.")
        loop = CommandLoop(self._commands, self._board, self._configuration, self._stop.ask, self._wish)
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
        wish = self._wish
        training = StageTraining(
            lambda: self._configuration.settings,
            society.identity,
            self._publisher,
            assembly.startup,
            wish=wish,
            is_demo=self._demo is not None,
        )

        async def begin() -> RunningNode:
            if self._is_trainer:
                settings = self._configuration.settings
                ground = await assembly.lay_to_drive()
                return begin_driving(ground, settings, society.identity, self._publisher, assembly.startup, wish=wish)
            return await training.begin(*await assembly.lay())

        life = TrainingLife(
            training,
            loop,
            self._stop,
            self._publisher,
            lambda node: Observer(node, society, self._publisher, self._counters),
            None if self._demo is None else self._demo.steps,
        )
        try:
            await life.run(begin, partial(self._companions, training, society))
        except NeuroShardError as error:
            self._publisher.state(NodeState.FAILED, str(error))
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await assembly.close()

    def _companions(self, training: StageTraining, society: Society, ground: Ground) -> list[Companion]:
        """What goes on beside the training, whatever stages are trained."""
        companions: list[Companion] = [
            partial(self._further_nodes, ground, society),
            society.exchange.look_on_shelf,
            HolderWatch(ground.swarm).run,
            StageSafety(ground.swarm, partial(training.has_checkpoint, ground)).run,
        ]
        if training.copies is not None:
            companions.append(training.copies.run)
        return companions

    def _enter(self, society: Society, run: OwnRun) -> Placing:
        """Become one of the run's nodes; which layers this one takes is chosen next."""
        is_swarm = self._demo is not None and self._demo.nodes > 1
        swarm = society.serve(run.offer, self._board.current, is_shared=is_swarm or run.is_joined)
        society.networking.attach(partial(tell_stages, swarm, self._publisher, self._board.current))
        return Placing(swarm, society.networking, is_first=self._demo is not None)

    async def _further_nodes(self, ground: Ground, society: Society) -> None:
        """The other nodes of `demo --nodes N`, which join the first one's run."""
        if self._demo is None or self._demo.nodes < 2:
            return
        settings = self._configuration.settings
        network = await society.networking.up()
        invitation = Invitation(
            run_id=ground.run.run_id,
            peer=network.transport.addresses()[0],
            genesis=ground.fetcher.source.description,
            max_stages=self._demo.stages_a_node,
            spare_stages=self._demo.spare_stages_a_node,
            max_storage=settings.max_storage,
            is_training=settings.training,
        )
        swarm = LocalSwarm(settings.data_dir, self._demo.nodes, ground.threads)
        await swarm.run(invitation)
