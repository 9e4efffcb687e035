"""The observer of an organised run: a member without parameters that reads the gossip and the chains of all stages.

It is a process next to the organiser, because it loads PyTorch and reads the messages of other nodes. The organiser
does neither, and no other process has its authority key. Standard output has lines for the organiser, standard input
the admissions that the organiser signs for this node. The end of the input ends the observer. It proves every
certificate with the run's foundation, as each member does.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median_low

import anyio
import anyio.to_thread
import trio

from neuroshard import __version__
from neuroshard.config.folders import prepare_data_dir
from neuroshard.config.loading import load_settings
from neuroshard.config.settings import Settings
from neuroshard.consensus.chain import Chain
from neuroshard.consensus.round_messages import Quorum
from neuroshard.consensus.stage_chain import CertifiedState, FileChainStore, StageChain
from neuroshard.host.identity import node_identity
from neuroshard.identity import TokenSecret, Wallet
from neuroshard.membership.run_members import RunMembers
from neuroshard.membership.swarm_view import Member
from neuroshard.model.architecture import parameter_count
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.node.stage_swarm import AT_WORK, StageSwarm
from neuroshard.organiser.observations import (
    MAX_ADDRESSES,
    MAX_DEVICES,
    CertifiedValue,
    Observation,
    ObserverStarted,
    ReadyNode,
    ReportedDevice,
    RunSight,
    StageSight,
    ValueKind,
    observation_line,
    read_given_admission,
)
from neuroshard.runs.offer import RunOffer
from neuroshard.status.snapshot import ModelStatus, NodeState, NodeStatus
from neuroshard.telemetry.logs import configure_logging
from neuroshard.types import NodeId, WalletId
from neuroshard.waiting import sleep_to_tick

_LOG = logging.getLogger(__name__)

SIGHT_SECONDS = 5.0
ASK_SECONDS = 2.0  # between looks at the reports for a newer value
IDLE_ASK_SECONDS = 60.0  # between questions without such a report: entries raise no outer step
MOST_ASKED = 3  # holders of a stage at a time
_UNUSED = ("NEUROSHARD_TOKEN", "NEUROSHARD_TOKEN_FILE", "NEUROSHARD_ORGANISER", "NEUROSHARD_INVITE", "NEUROSHARD_RUN")


def observe_run(
    offer: RunOffer, folder: Path, peers: Iterable[str], p2p_port: int, environment: Mapping[str, str]
) -> int:
    """Observe a run until the standard input ends, with a node of its own in a folder. Returns the exit code.

    Raises UsageError and StorageError.
    """
    variables = {name: value for name, value in environment.items() if name not in _UNUSED}
    flags = {"data_dir": folder, "peer": tuple(peers), "p2p_port": p2p_port}
    settings = load_settings(flags, variables).settings
    prepare_data_dir(settings.data_dir)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the organiser ends first, and then the input
    with configure_logging(verbose=settings.verbose, as_json=settings.log_json, folder=settings.paths.logs):
        trio.run(partial(_main, offer, settings))  # pyright: ignore[reportUnknownMemberType]
    return 0


async def _main(offer: RunOffer, settings: Settings) -> None:
    wallet = Wallet.from_secret(TokenSecret("hex", secrets.token_bytes(32)))  # not kept: nothing refers to it later
    identity = node_identity(wallet, settings.data_dir)
    # two strangers behind routers meet only through a relay, and the organiser is the one computer that all know
    network = PeerNetwork.of(settings, identity, serves_others=settings.relay)
    observer = RunObserver(offer, settings, network)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(observer.run)
        await observer.take_admissions()
        tasks.cancel_scope.cancel()


class RunObserver:
    """Belongs to the event loop."""

    def __init__(
        self,
        offer: RunOffer,
        settings: Settings,
        network: PeerNetwork,
        write: Callable[[bytes], object] | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        """`write` takes each line; None: standard output. It blocks."""
        self._network = network
        self._write = write or _write_line
        self._writing = anyio.Lock()
        self._now = now
        self._began = now()
        architecture = offer.parameters.architecture
        model = ModelStatus(architecture, parameter_count(architecture), None, ())
        self._status = NodeStatus(__version__, self._began, self._began, NodeState.NOT_TRAINING, model=model)
        self._swarm: StageSwarm = network.serve(offer, lambda: self._status, is_shared=True)
        self._swarm.versions.note_held(range(len(self._swarm.plan)))  # so that it asks for the foundation
        self._chains = [
            StageChain(
                partial(self._swarm.versions.founding_of, stage),
                FileChainStore(settings.data_dir / "chains" / str(stage), settings.data_dir),
            )
            for stage in range(len(self._swarm.plan))
        ]
        self._reporters = Reporters(self._began)

    @property
    def members(self) -> RunMembers:
        """The members of the run, to which this node shows its admission."""
        joined = self._network.joined
        assert joined is not None
        assert joined.members is not None
        return joined.members

    async def take_admissions(self) -> None:
        """Show the admissions that come on standard input, until its end."""
        buffer = b""
        while data := await anyio.to_thread.run_sync(os.read, 0, 65536, abandon_on_cancel=True):
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                given = read_given_admission(line)
                self.members.renew(given.admission)

    async def run(self) -> None:
        """Observe until cancelled."""
        identity = self._network.identity
        await self._report(ObserverStarted(identity.node_id, identity.wallet_id))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._network.networking.run)
            tasks.start_soon(self._look)
            tasks.start_soon(self._network.exchange.watch_stored)
            for stage, chain in enumerate(self._chains):
                tasks.start_soon(self._follow, stage, chain)

    async def _report(self, observation: Observation) -> None:
        async with self._writing:
            await anyio.to_thread.run_sync(self._write, observation_line(observation))

    async def _look(self) -> None:
        while True:
            view = self._network.look()  # it measures the line, too
            swarm = self._swarm.membership.view
            others = [member for member in swarm.members.values() if not member.is_local]
            now = self._now()
            held_out = [
                (member.report.held_out_loss, member.report.held_out_step)
                for member in others
                if member.report.held_out_loss is not None
            ]
            loss, step = median_low(held_out) if held_out else (None, 0)
            reports = [member.report for member in others]
            devices = Counter(report.device for report in reports if report.device).most_common(MAX_DEVICES)
            await self._report(
                RunSight(
                    at=now,
                    nodes=len(others),
                    training_nodes=sum(member.report.state is NodeState.TRAINING for member in others),
                    trainers=sum(
                        member.report.layers is None and member.report.state is NodeState.TRAINING for member in others
                    ),
                    stages=tuple(map(self._stage_sight, range(len(self._chains)))),
                    total_steps=swarm.total_steps,
                    total_tokens=swarm.total_tokens,
                    shards_covered=0 if view.swarm is None else view.swarm.shards_covered,
                    tokens_per_second=swarm.tokens_per_second,
                    loss=swarm.global_loss,
                    min_loss=swarm.min_loss,
                    held_out_loss=loss,
                    held_out_step=step,
                    new_tokens=self._reporters.new_tokens(others),
                    ready=self._reporters.ready(others),
                    connections=view.network.connections,
                    flops_per_second=sum(report.flops_per_second for report in reports),
                    reachable_nodes=sum(report.reachable is True for report in reports),
                    unreachable_nodes=sum(report.reachable is False for report in reports),
                    devices=tuple(ReportedDevice(device, nodes) for device, nodes in devices),
                    explanation="" if others else _NOBODY,
                    addresses=self._some_addresses(others),
                )
            )
            await sleep_to_tick(SIGHT_SECONDS)

    def _some_addresses(self, members: Sequence[Member]) -> tuple[str, ...]:
        """Addresses that a few random nodes announce, for newcomers: of each node the direct one first."""
        announced = self._swarm.membership.announcements
        known = [announced[one.node_id].addresses[:2] for one in members if one.node_id in announced]
        some = random.sample(known, min(MAX_ADDRESSES // 2, len(known)))
        return tuple(address for addresses in some for address in addresses)

    def _stage_sight(self, stage: int) -> StageSight:
        layers, chain = self._swarm.plan[stage], self._chains[stage]
        known = chain.chain
        holders = [
            member.report
            for member in self._swarm.membership.view.members.values()
            if member.report.layers is not None
            and member.report.layers.start <= layers.start
            and layers.stop <= member.report.layers.stop
        ]
        trouble = "" if chain.fork is None else f"{chain.fork.message} {chain.fork.action}"
        if known is None:
            trouble = "The foundation of the run is not known to the monitor yet."
        version = chain.versions[-1] if chain.versions else None
        return StageSight(
            sum(report.state in AT_WORK for report in holders),
            sum(report.state is NodeState.STARTING for report in holders),
            0 if known is None else known.standing.height,
            trouble,
            *((1, 0) if version is None else (version.number, version.start)),
        )

    async def _follow(self, stage: int, chain: StageChain) -> None:
        """Learn the values of a stage from its holders, and report each once."""
        await chain.load()
        reported: Chain | None = None
        asked_at = -IDLE_ASK_SECONDS
        while True:
            known, now = chain.chain, anyio.current_time()
            if known is not None and known is not reported:
                for value in certified_values(known, reported):
                    await self._report(value)
                reported = known
            if self._is_behind(stage, known) or now - asked_at >= IDLE_ASK_SECONDS:
                holders = self._swarm.replicas(stage)
                if known is not None and holders:
                    asked_at = now
                    some = random.sample(holders, min(MOST_ASKED, len(holders)))
                    await chain.learn_from(self._swarm.asking, self._swarm.name_of(stage), some)
            if chain.chain is known:
                await sleep_to_tick(ASK_SECONDS)

    def _is_behind(self, stage: int, known: Chain | None) -> bool:
        """Whether a holder reports a later outer step than the chain here has."""
        members, step = self._swarm.membership.view.members, -1 if known is None else known.standing.outer_step
        return any(members[node].report.outer_step > step for node in self._swarm.replicas(stage) if node in members)


_NOBODY = "The monitor has not met a node of the run. Name one: `neuroshard organise --peer ADDRESS`."


class Reporters:
    """Compares the reports at one look with those at the look before."""

    def __init__(self, began: float) -> None:
        """`began` is the time since when starts of nodes were seen."""
        self._began = began
        self._tokens: dict[NodeId, int] = {}  # of drivers
        self._starting: dict[NodeId, float] = {}  # start of each node that did not train yet
        self._trained: dict[NodeId, float] = {}  # start of each node that trains

    def new_tokens(self, members: Iterable[Member]) -> int:
        """Tokens that drivers report beyond those of the last look; nothing for a node seen for the first time."""
        drivers = [member for member in members if member.report.layers and member.report.layers.start == 0]
        tokens = {each.node_id: each.report.tokens - each.report.inherited_tokens for each in drivers}
        added = sum(max(0, count - self._tokens.get(node, count)) for node, count in tokens.items())
        self._tokens = tokens
        return added

    def ready(self, members: Iterable[Member]) -> tuple[ReadyNode, ...]:
        """The nodes that train for the first time since their start, which was seen here."""
        found, starting, trained = list[ReadyNode](), dict[NodeId, float](), dict[NodeId, float]()
        for member in members:
            node, started_at = member.node_id, member.report.started_at
            if member.report.state is not NodeState.TRAINING:
                starting[node] = started_at
                if self._trained.get(node) == started_at:
                    trained[node] = started_at  # it pauses
                continue
            trained[node] = started_at
            was_seen = self._starting.get(node) == started_at or started_at >= self._began
            if was_seen and self._trained.get(node) != started_at:
                found.append(ReadyNode(node, started_at, max(0.0, member.last_seen - started_at)))
        self._starting, self._trained = starting, trained
        return tuple(found)


def certified_values(chain: Chain, reported: Chain | None) -> list[CertifiedValue]:
    """The newest values of a chain that an earlier state of the same chain did not have, the oldest first."""
    is_same = reported is not None and reported.statement == chain.statement
    height = reported.standing.height if is_same and reported is not None else 0
    return [_value_of(chain, each) for each in chain.recent if each.value.height > height]


def _value_of(chain: Chain, certificate: Quorum) -> CertifiedValue:
    value = certificate.value
    wallets: dict[NodeId, WalletId] = {member.node_id: member.wallet_id for member in value.members}
    kind: ValueKind = "entries" if value.round_id is None else "aggregate"
    return CertifiedValue(
        stage=chain.start.stage,
        statement=value.statement,
        start_height=chain.start.height,
        height=value.height,
        outer_step=value.outer_step,
        at=int(CertifiedState(certificate).certified_at),
        kind="alone" if value.is_lone else kind,
        sequences=value.sequences,
        seconds=value.seconds,
        members=len(value.members),
        accepted=tuple(sorted(wallets[node] for node in value.accepted if node in wallets)),
    )


def _write_line(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
