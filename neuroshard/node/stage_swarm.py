"""The stages of a run in the swarm: their holders, which of them can work, and how this node reaches them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeAlias

import anyio
from torch import Tensor

from neuroshard.consensus.effects import AnyBody
from neuroshard.consensus.group_rounds import RoundRequestHandlers
from neuroshard.consensus.message_frames import signed_by
from neuroshard.consensus.round_messages import Signed
from neuroshard.data.held_out_losses import MeasuredWith, signed_losses, verified_losses
from neuroshard.identity import NodeIdentity, SignedClaim
from neuroshard.membership.connectivity import DialledRequests, Networking
from neuroshard.membership.holder_health import VALID_SECONDS, ConfirmedHolders, LostNodes, SlowStarts
from neuroshard.membership.reports import TrainingReport
from neuroshard.membership.stage_coverage import (
    StageCoverage,
    StageHolder,
    StageRange,
    missing_layers,
    missing_sentence,
    stages_of,
)
from neuroshard.membership.swarm_view import GlobalView, Member, Membership
from neuroshard.messages import Frame, FrameLimits
from neuroshard.model.architecture import StagePlan
from neuroshard.network import Network, ScoreReason
from neuroshard.pipeline.stage_client import LocalStageClient, RemoteStageClient, StageClient, StageClientOptions
from neuroshard.pipeline.stage_protocol import StageAddress, WirePrecision
from neuroshard.pipeline.stage_requests import StageRequestHandler, StageRequestHandlers
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.runs.exchange import RunVersions
from neuroshard.state.download import ReplicaClient
from neuroshard.state.snapshot_server import SnapshotServer
from neuroshard.state.transfer_messages import StageName
from neuroshard.status.snapshot import NodeState
from neuroshard.types import LayerRange, NodeId, WalletId

AT_WORK = frozenset({NodeState.TRAINING, NodeState.WAITING_FOR_DATA, NodeState.WAITING_FOR_STAGES})
HOLDING = AT_WORK | {NodeState.PAUSED}
GONE = frozenset({NodeState.STOPPING, NodeState.NOT_TRAINING, NodeState.FAILED})
PRESENCE_LOOK_SECONDS = 1.0
ABSENCE_SECONDS = 3.0  # without a connection, until a node counts as gone and holds no stage up any more
MOST_RANGES = 4096  # that are remembered


_ToldHolder: TypeAlias = "tuple[TrainingReport, StageHolder | None]"


@dataclass(frozen=True)
class _Fold:
    """What follows from one view of the members; it is asked for per microbatch, and changes with a report."""

    view: GlobalView
    lost: int
    coverage: StageCoverage
    at_work: dict[LayerRange, list[NodeId]] = field(default_factory=dict[LayerRange, list[NodeId]])


@dataclass(frozen=True)
class ReportedCopy:
    """What the single holder of a stage says of the copy that another node keeps."""

    holder: NodeId
    age_seconds: float | None  # when it was told; None: there is none yet
    told_at: float  # by the event loop's clock


class StageSwarm:
    """Made when the run of this node is known. `live` lets others use the stages that are held here."""

    def __init__(
        self,
        identity: NodeIdentity,
        versions: RunVersions,
        membership: Membership,
        networking: Networking,
        options: StageClientOptions | None = None,
    ) -> None:
        offer, parameters = versions.offer, versions.offer.parameters
        self._identity = identity
        self.node_id = identity.node_id
        self.wallet_id = identity.wallet_id
        self.run_id = offer.run_id
        self.versions = versions
        self.plan = StagePlan.even(parameters.architecture.layer_count, parameters.stage_count)
        self.membership = membership
        self.outer = parameters.outer  # no later version changes what is kept of it beside the weights
        self._version = offer.initial.parameters.version  # no later one changes what stages say to each other
        self._options = options or StageClientOptions(WirePrecision(parameters.wire_precision))
        self._networking = networking
        self._requests = DialledRequests(networking, membership)
        self._shapes = [
            StageShapes.for_layers(parameters.architecture, layers, parameters.batch_size) for layers in self.plan
        ]
        self._endpoints = StageRequestHandlers(self._shapes)
        self._local: dict[int, LocalStageClient] = {}
        self.lost = LostNodes(membership)
        self.confirmed = ConfirmedHolders()
        self._slow_starts = SlowStarts()
        self._fold: _Fold | None = None
        self._told_holders: dict[NodeId, _ToldHolder] = {}  # as of the last fold: most members say nothing new
        self.unobtainable: frozenset[int] = frozenset()  # stages of which nobody who answers has the state
        self.windows: tuple[StageRange, ...] = ()  # the longest runs of stages that this computer holds, for the others
        self.ready_percent = 0  # of the states that this node fetches before it can work
        self.destination: StageRange | None = None  # where this node goes, while it still holds other stages
        self.report_soon: Callable[[], None] = _unheard  # lets the others know what this node does now
        self.told_copies: Mapping[int, ReportedCopy] = {}  # of stages that another node holds alone
        self.donor = SnapshotServer(membership.knows, report=self._report)  # of the state of stages that lies here
        self.rounds = RoundRequestHandlers()  # of replicas that are held here
        self.asking = ReplicaClient(self, self._report)  # others for theirs
        self.stages_of = lru_cache(MOST_RANGES)(partial(stages_of, plan=self.plan))  # many nodes tell the same layers

    async def live(self, network: Network) -> None:
        """Answer the requests of others until cancelled.

        What those have here whose connection is gone is given up, unless they come back at once.
        """
        self._endpoints.serve(network.transport)
        self.donor.serve(network.transport)
        self.rounds.serve(network.transport)
        try:
            seen = dict[NodeId, float]()
            await anyio.sleep(ABSENCE_SECONDS)  # a network that has just come up knows nobody yet
            while True:
                now = anyio.current_time()
                seen |= dict.fromkeys(network.transport.peers(), now)
                seen = {peer: at for peer, at in seen.items() if now - at <= ABSENCE_SECONDS}
                present = {self.node_id, *seen}
                self._endpoints.keep_only(present)
                self.donor.keep_only(present)
                await anyio.sleep(PRESENCE_LOOK_SECONDS)
        finally:
            self.donor.close()

    def hold(self, stage: int, service: StageServer, root: Callable[[], str], outer_step: Callable[[], int]) -> None:
        """A stage is held here from now on; `root` names its present weights."""

        def sign(labels: Tensor, summed: Tensor) -> str:
            weights = MeasuredWith(self.run_id, self.plan[stage], outer_step(), root())
            return signed_losses(self._identity, weights, labels, summed, time.time()).encode().decode()

        self._local[stage] = LocalStageClient(service, self.node_id, root)
        self._endpoints.add(
            StageRequestHandler(
                service,
                self._address(stage),
                self._shapes[stage],
                root=root,
                may_drive=self.is_member,
                report=self._report,
                sign=sign,
            )
        )

    def go_to(self, stages: StageRange | None) -> None:
        """Tell the others at once which stages this node goes to, so that nobody else does; None: it stays."""
        self.destination = stages
        self.report_soon()

    def release(self) -> None:
        """Nothing is held here any more."""
        for stage in self._local:
            self.donor.withdraw(self.name_of(stage))
        self.rounds.clear()
        self._local.clear()
        self._endpoints.clear()

    @property
    def held(self) -> StageRange | None:
        """The stages that this node can work on; None while there are none."""
        return StageRange(min(self._local), max(self._local) + 1) if self._local else None

    def is_connected(self, node_id: NodeId) -> bool:
        """Whether there is a connection with a node."""
        network = self._networking.current
        return network is not None and node_id in network.transport.peers()

    def is_member(self, node_id: NodeId) -> bool:
        """Whether a node reports of its work in this run."""
        return node_id in self.membership.view.members

    def may_send_large(self) -> bool:
        """Whether this node's owner lets tensors through the network now."""
        return not self._networking.gate.reason

    def wallet_of(self, node_id: NodeId) -> WalletId | None:
        """The wallet of a node that reports; None for one that is not known."""
        member = self.membership.view.members.get(node_id)
        return None if member is None else member.wallet_id

    def sign(self, body: AnyBody) -> Signed[AnyBody]:
        """What a round says in this node's name."""
        return signed_by(self._identity, body, time.time())

    def moved_bytes(self, node_id: NodeId) -> int:
        """What went to and came from a node over all present connections with it."""
        network = self._networking.current
        every = () if network is None else network.transport.connections()
        return sum(one.bytes_sent + one.bytes_received for one in every if one.peer == node_id)

    def coverage(self) -> StageCoverage:
        """Who holds which stages, this node as its own last report has it."""
        return self._present().coverage

    def sole_holder(self, stage: int) -> NodeId | None:
        """The one node that can work on a stage; None when there are several, or none.

        Of several only those count that have confirmed it: a false report must not keep a stage from being copied.
        """
        holders: Sequence[NodeId] = self.coverage().replicas_of(stage)
        if len(holders) > 1:
            own, confirmed = self.node_id, self.confirmed
            holders = [node for node in holders if node == own or confirmed.told_within(VALID_SECONDS, node, stage)]
        return holders[0] if len(holders) == 1 else None

    def _present(self) -> _Fold:
        view, fold = self.membership.view, self._fold
        if fold is None or fold.view is not view or fold.lost != self.lost.added:
            fold = self._fold = _Fold(view, self.lost.added, self._folded())
        return fold

    def _folded(self) -> StageCoverage:
        members, known, told = self.membership.view.members, self._told_holders, dict[NodeId, _ToldHolder]()
        out = self.lost.now() | self._slow_starts.overdue(members.values())
        for node_id, member in members.items():
            holds = known.get(node_id)
            if holds is None or holds[0] is not member.report:
                holds = member.report, self._holder(member)
            told[node_id] = holds
        self._told_holders = told
        holders = [holder for node_id, (_, holder) in told.items() if holder is not None and node_id not in out]
        return StageCoverage.of(self.run_id, len(self.plan), holders)

    def _holder(self, member: Member) -> StageHolder | None:
        """What a member holds or gets ready for, by its report."""
        report = member.report
        stages = None if report.layers is None else self.stages_of(report.layers)
        if stages is None or report.state in GONE:
            return None
        is_ready = report.state in HOLDING
        return StageHolder(member.node_id, member.wallet_id, stages, is_ready, report.windows)

    def workers(self, stage: int) -> Sequence[NodeId]:
        """Who can work on a stage now, in the order of their names.

        The first stage of a node that holds it is its own: it says when data are taken, and a checkpoint how far.
        """
        if stage == 0 and stage in self._local:
            return (self.node_id,)
        others = self._others_at_work(self.plan[stage])
        return sorted([self.node_id, *others] if stage in self._local else others)

    def replicas(self, stage: int) -> Sequence[NodeId]:
        """The other nodes that can work on a stage now, in the order of their names."""
        return self._others_at_work(self.plan[stage])

    def newcomers(self) -> frozenset[NodeId]:
        """Who takes a state over from here and may be about to work on it: it is starting, or has not reported yet."""
        members = self.membership.view.members
        return frozenset(
            node
            for node in self.donor.receivers
            if node not in members or members[node].report.state is NodeState.STARTING
        )

    def sends_to_others(self) -> bool:
        """Whether a microbatch that this node drives may leave it."""
        return any(list(self.workers(stage)) != [self.node_id] for stage in range(len(self.plan)))

    def lane_root(self, stage: int) -> bytes:
        """What lanes through a stage are drawn with: the root that most replicas report, else the run.

        Nobody has certified it.
        """
        workers = set(self.workers(stage))
        members = self.membership.view.members.values()
        roots = [each.report.state_hash for each in members if each.node_id in workers and each.report.state_hash]
        return bytes.fromhex(max(sorted(set(roots)), key=roots.count, default=self.run_id))

    def hop(self, stage: int, node_id: NodeId) -> StageClient:
        """The way to a stage at a node."""
        if node_id == self.node_id:
            return self._local[stage]

        def check(sender: NodeId, claim: str, labels: Tensor, summed: Tensor) -> SignedClaim:
            weights = MeasuredWith(self.run_id, self.plan[stage], 0)
            return verified_losses(claim, sender, weights, labels, summed, now=time.time())

        address, shapes = self._address(stage), self._shapes[stage]
        return RemoteStageClient(
            self, node_id, address, shapes, self._options, report=self._report, check=check, moved=self.moved_bytes
        )

    def missing(self) -> str:
        """Which layers nobody can work on now, in a sentence; "" when there are none."""
        coverage = self.coverage()
        if self.held is not None:
            coverage = coverage.with_holder(StageHolder(self.node_id, self.wallet_id, self.held))
        missing = missing_sentence(missing_layers(coverage, self.plan))
        if missing:
            is_hopeless = any(stage in self.unobtainable for stage in coverage.missing)
            return f"{missing} Nobody who answers has their state." if is_hopeless else missing
        idle = [layers for stage, layers in enumerate(self.plan) if not self.workers(stage)]
        return missing_sentence(idle, "held only by nodes that are paused")

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """Transport.request on the present network, to a peer that is dialled first when it must be."""
        return await self._requests.request(peer, frame, reply=reply, timeout_seconds=timeout_seconds)

    def _others_at_work(self, layers: LayerRange) -> list[NodeId]:
        at_work = self._present().at_work
        if layers not in at_work:
            at_work[layers] = self._working_on(layers)
        return at_work[layers]

    def _working_on(self, layers: LayerRange) -> list[NodeId]:
        return sorted(
            member.node_id
            for member in self.membership.view.members.values()
            if member.node_id != self.node_id
            and member.node_id not in self.lost
            and member.report.state in AT_WORK
            and member.report.layers is not None
            and member.report.layers.start <= layers.start
            and layers.stop <= member.report.layers.stop
        )

    def name_of(self, stage: int | LayerRange) -> StageName:
        """What others call a stage when they ask for its state."""
        return StageName(self.run_id, self.plan[stage] if isinstance(stage, int) else stage)

    def _address(self, stage: int) -> StageAddress:
        return StageAddress(self.run_id, self.plan[stage], self._version)

    def _report(self, peer: NodeId, reason: ScoreReason) -> None:
        if self._networking.current is not None:
            self._networking.current.reputation.report(peer, reason)


def _unheard() -> None:
    """While nobody reports."""
