"""The work of a running node: it lays its ground, trains, and has what goes on beside that."""

from __future__ import annotations

from functools import partial

import anyio

from neuroshard.data.storage import METADATA_FOLDER
from neuroshard.node.application import Beginning, Workplace
from neuroshard.node.assembly import Assembly
from neuroshard.node.data_sharing import DataSharing
from neuroshard.node.drive_training import begin_driving
from neuroshard.node.holder_watch import HolderWatch
from neuroshard.node.local_swarm import Invitation, LocalSwarm
from neuroshard.node.observation import Observer
from neuroshard.node.own_run import OwnRun
from neuroshard.node.pipeline_status import tell_stages
from neuroshard.node.placing import Placing
from neuroshard.node.run_choice import FoundRun
from neuroshard.node.stage_safety import StageSafety
from neuroshard.node.stage_training import Ground, RunningNode, StageTraining
from neuroshard.node.tasks import Companion
from neuroshard.node.training_life import TrainingLife


class NodeWork:
    """Used once a start, when PyTorch is loaded."""

    def __init__(self, place: Workplace, beginning: Beginning) -> None:
        self._place = place
        self._beginning = beginning

    async def run(self) -> None:
        """Start up and train. A stop during the start-up cancels it; nothing was trained yet, so nothing is lost."""
        place, beginning = self._place, self._beginning
        publisher, society, startup = beginning.publisher, beginning.society, beginning.startup
        settings, wish = place.configuration.settings, beginning.wish
        sharing = DataSharing(society, settings.paths.data_cache / METADATA_FOLDER)
        society.networking.attach(sharing.live)
        assembly = Assembly(
            settings=settings,
            wallet=place.wallet,
            identity=society.identity,
            publisher=publisher,
            startup=startup,
            memory=beginning.memory,
            finder=society.finder,
            named=self._named,
            enter=self._enter,
            sharing=sharing,
            metered=society.metered,
            demo=place.demo,
            holds_layers=not place.is_trainer,
        )
        training = StageTraining(
            lambda: place.configuration.settings,
            society.identity,
            publisher,
            startup,
            wish=wish,
            is_demo=place.demo is not None,
        )

        async def begin() -> RunningNode:
            if place.is_trainer:
                ground = await assembly.lay_to_drive()
                return begin_driving(ground, settings, society.identity, publisher, startup, wish=wish)
            return await training.begin(*await assembly.lay())

        life = TrainingLife(
            training,
            beginning.loop,
            place.stop,
            publisher,
            lambda node: Observer(node, society, publisher, place.counters),
            None if place.demo is None else place.demo.steps,
        )
        try:
            await life.run(begin, partial(self._companions, training))
        finally:
            with anyio.CancelScope(shield=True):
                await assembly.close()

    async def _named(self) -> FoundRun | None:
        return await self._beginning.arrival.found() if self._place.configuration.settings.run else None

    def _companions(self, training: StageTraining, ground: Ground) -> list[Companion]:
        """What goes on beside the training, whatever stages are trained."""
        companions: list[Companion] = [
            partial(self._further_nodes, ground),
            self._beginning.society.exchange.look_on_shelf,
            HolderWatch(ground.swarm).run,
            ground.watch.run,
            StageSafety(ground.swarm, partial(training.has_checkpoint, ground)).run,
        ]
        if training.copies is not None:
            companions.append(training.copies.run)
        return companions

    def _enter(self, run: OwnRun, genesis: str) -> Placing:
        """Become one of the run's nodes; which layers this one takes is chosen next."""
        society, board, demo = self._beginning.society, self._place.board, self._place.demo
        society.genesis = genesis
        is_swarm = demo is not None and demo.nodes > 1
        swarm = society.serve(run.offer, board.current, is_shared=is_swarm or run.is_joined)
        society.networking.attach(partial(tell_stages, swarm, self._beginning.publisher, board.current))
        return Placing(swarm, society.networking, is_first=demo is not None)

    async def _further_nodes(self, ground: Ground) -> None:
        """The other nodes of `demo --nodes N`, which join the first one's run."""
        demo, settings = self._place.demo, self._place.configuration.settings
        if demo is None or demo.nodes < 2:
            return
        network = await self._beginning.society.networking.up()
        invitation = Invitation(
            run_id=ground.run.run_id,
            peer=network.transport.addresses()[0],
            genesis=ground.fetcher.source.description,
            max_stages=demo.stages_a_node,
            spare_stages=demo.spare_stages_a_node,
            max_storage=settings.max_storage,
            is_training=settings.training,
        )
        swarm = LocalSwarm(settings.data_dir, demo.nodes, ground.threads)
        await swarm.run(invitation)
