"""Reads the running parts twice per second, and when their state changes, and publishes one snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio
import anyio.to_thread

from neuroshard.host.computer import peak_megabytes, resident_megabytes
from neuroshard.model.architecture import flops_per_token
from neuroshard.node.data_sharing import DataView
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.node.pipeline_status import pipeline_status
from neuroshard.node.stage_training import RunningNode
from neuroshard.node.stage_versions import first_step_of
from neuroshard.status.board import Publisher
from neuroshard.status.computer import AccelerationStatus, ResourceStatus
from neuroshard.status.snapshot import DilocoStatus, NodeState, StageStatus
from neuroshard.telemetry.counters import Counters
from neuroshard.training.trainer import TrainerSnapshot
from neuroshard.waiting import next_tick, sleep_to_tick

QUIET_SECONDS = 15.0


class StandbyNotice:
    """Detects that this node's stages have had no work for QUIET_SECONDS."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._work: object = None
        self._since = 0.0

    def rest(self) -> None:
        """Restart the measurement: a node that does not train gets no work for another reason."""
        self._work = None

    def sentence(self, stages: Sequence[StageStatus], replicas: int, *, has_lanes: bool) -> str:
        """Explain why stages that other nodes drive are idle; "" while they work, or if this node drives itself.

        `replicas` is the number of other nodes with the same layers. With lanes a driver uses one replica until the
        next outer step.
        """
        now, work = self._clock(), [(stage.index, stage.steps, stage.sequences_accumulated) for stage in stages]
        if work != self._work:
            self._work, self._since = work, now
        if not stages or stages[0].index == 0 or now - self._since < QUIET_SECONDS:
            return ""
        if replicas and has_lanes:
            return (
                "Ready, but not needed now: until the next outer step the computers that feed text use another one "
                "with the same layers. This one takes over at once if that one fails."
            )
        return "Ready: no computer that feeds text to the model sends anything now."


PUBLISH_SECONDS = 0.5
RESTING_SECONDS = 2.0  # a paused node's numbers hardly change; a change of state is published at once
RESOURCE_SECONDS = 2.0
RESTING_RESOURCE_SECONDS = 10.0
_COUNTED = {
    "refused_files": "Damaged or wrong files from the data source that were dropped",
    "damaged_cache_files": "Damaged shards in the cache that were downloaded again",
}


class Observer:
    """Builds the node's status from the trainer's snapshot and samples of this computer's resources."""

    def __init__(self, node: RunningNode, peer_network: PeerNetwork, publisher: Publisher, counters: Counters) -> None:
        self._node = node
        self._peer_network = peer_network
        self._counters = counters
        for name, help_text in _COUNTED.items():
            counters.declare(name, help_text)
        self._publisher = publisher
        self._reported_state: NodeState | None = None
        self._clock_warning: str | None = None  # that is shown
        self._standby = StandbyNotice()
        total_shards = node.ground.run.parameters.genesis.total_shards
        self._data_view = DataView(node.ground.watch, peer_network, total_shards)
        device = node.ground.device
        self._resources = ResourceStatus(
            device=str(device.torch_device()), device_name=device.name, cpu_threads_limit=node.ground.threads
        )
        architecture = node.ground.run.parameters.architecture
        self._flops = tuple(flops_per_token(architecture, live.layers) for live in node.lives)  # of each stage
        self._acceleration = _acceleration(node, sum(self._flops))

    async def run(self) -> None:
        """Publish at least every PUBLISH_SECONDS (RESTING_SECONDS while paused) until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._sample_resources)
            while True:
                self.publish()
                seconds = RESTING_SECONDS if self._reported_state is NodeState.PAUSED else PUBLISH_SECONDS
                with anyio.CancelScope(deadline=next_tick(seconds)):
                    await self._node.trainer.until_state_changes()

    def publish(self) -> None:
        """Publish the status once, and report to peers soon if this node's state has changed."""
        seen = self._among_others(self._node.trainer.snapshot())
        idle = self._idle_sentence(seen)
        if seen.state is not self._reported_state:
            self._reported_state = seen.state
            self._peer_network.report_soon()
        memory = replace(self._node.memory, resident_mb=resident_megabytes(), peak_mb=peak_megabytes())
        self._publisher.change(
            state=seen.state,
            state_reason=idle or seen.reason,
            is_standing_by=bool(idle),
            paused_until=seen.paused_until,
            memory=memory,
            training=seen.training,
            verification=seen.verification,
            diloco=self._with_version(among_replicas(seen.diloco, self._replicas(), holds_all=self._holds_all)),
            data=self._data_view.completed(seen.data),
            checkpoints=seen.checkpoints,
            stages=seen.stages,
            pipeline=pipeline_status(self._node.ground.swarm, seen.state, seen.flow),
            resources=self._resources,
            acceleration=self._present_acceleration(seen.stages),
            history=seen.history,
        )
        self._count("refused_files", self._node.ground.fetcher.refused_files)
        self._count("damaged_cache_files", self._node.ground.data_store.cache.damaged_files)
        if seen.warnings:
            self._publisher.warn(*seen.warnings)
        self._show_clock_warning(self._peer_network.clock_warning)
        self._node.rotations.record(self._node.feed.rotations)
        if seen.training.step_seconds > 0:
            self._node.startup.complete()

    def _with_version(self, diloco: DilocoStatus) -> DilocoStatus:
        swarm = self._node.ground.swarm
        version = swarm.versions.offer.parameters.version
        chains = [group.chain.versions for group in swarm.rounds.groups.values()]
        return replace(diloco, version=version, version_from=first_step_of(version, chains))

    def _present_acceleration(self, stages: Sequence[StageStatus]) -> AccelerationStatus | None:
        device, compilation = self._acceleration, self._node.compilation
        if device is None:
            return None
        compiled = device if compilation is None else replace(device, compile=compilation.status)
        return at_speed_of(compiled, stages, self._flops)

    def _show_clock_warning(self, warning: str | None) -> None:
        """Show at most one warning about the clock, as long as it applies: its words change with the other nodes."""
        before, self._clock_warning = self._clock_warning, warning
        if before is not None and before != warning:
            self._publisher.end_warning(before)
        if warning is not None:
            self._publisher.warn(warning)

    def _among_others(self, seen: TrainerSnapshot) -> TrainerSnapshot:
        """Show a training node as waiting for stages if no node holds some of the layers."""
        missing = self._node.ground.swarm.missing() if seen.state is NodeState.TRAINING else ""
        return replace(seen, state=NodeState.WAITING_FOR_STAGES, reason=missing) if missing else seen

    def _idle_sentence(self, seen: TrainerSnapshot) -> str:
        """Explain why a training node is idle; "" if it has work or does not train."""
        if seen.state is not NodeState.TRAINING:
            self._standby.rest()
            return ""
        has_lanes = self._node.ground.swarm.versions.offer.parameters.routing == "lanes"
        return self._standby.sentence(seen.stages, self._replicas(), has_lanes=has_lanes)

    @property
    def _holds_all(self) -> bool:
        return self._node.stages is None or len(self._node.stages) == len(self._node.ground.swarm.plan)

    def _replicas(self) -> int:
        """Number of other nodes that hold the first of this node's stages."""
        node = self._node
        return 0 if node.stages is None else len(node.ground.swarm.replicas(node.stages.start))

    def _count(self, name: str, total: int) -> None:
        """Raise a counter to a total that a part has counted itself."""
        self._counters.add(name, max(0, total - self._counters.value(name)))

    async def _sample_resources(self) -> None:
        while True:
            is_resting = self._reported_state is NodeState.PAUSED
            await sleep_to_tick(RESTING_RESOURCE_SECONDS if is_resting else RESOURCE_SECONDS)
            self._resources = await anyio.to_thread.run_sync(self._node.sampler.sample)


def _acceleration(node: RunningNode, flops: int) -> AccelerationStatus | None:
    """The device of a node with layers, before its speed is known; `flops` per token are those of all its layers."""
    if node.peak is None:
        return None
    return AccelerationStatus(
        device=node.ground.device.name,
        precision=node.lives[0].executor.precision.value,
        flops_per_token=flops,
        peak_flops=node.peak.flops_per_second * node.ground.width,
        ranks=node.ground.width,
        mode=None if node.ground.site is None else "shard" if node.ground.site.is_sharded else "replicate",
        peak_source=node.peak.source,
    )


def at_speed_of(
    acceleration: AccelerationStatus, stages: Sequence[StageStatus], flops: Sequence[int]
) -> AccelerationStatus:
    """The device at the speed of its stages: a mean weighted by their FLOPs per token, since stages may differ."""
    done = sum(stage.tokens_per_second * cost for stage, cost in zip(stages, flops, strict=True))
    return replace(acceleration, tokens_per_second=done / acceleration.flops_per_token) if done else acceleration


def among_replicas(diloco: DilocoStatus, replicas: int, *, holds_all: bool) -> DilocoStatus:
    """Explain outer steps before the first common round, given the number of other nodes with the same layers.

    `holds_all` is true if this node holds the whole model.
    """
    if diloco.members > 1 or (replicas == 0 and holds_all):
        return diloco
    if replicas == 0:
        words = "No other computer holds the same layers: outer steps move their anchor only."
        return replace(diloco, explanation=words)
    others = "Another node holds" if replicas == 1 else f"{replicas} other nodes hold"
    words = f"{others} the same layers. From the next round on, all of them agree on one average."
    return replace(diloco, explanation=words)
