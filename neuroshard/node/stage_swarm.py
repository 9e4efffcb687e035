"""The stages of a run in the swarm: their holders, which of them can work, and how this node reaches them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TypeAlias

import anyio
import anyio.lowlevel
from torch import Tensor

from neuroshard.consensus.committee import ChangeParameters
from neuroshard.consensus.effects import AnyBody
from neuroshard.consensus.foundation import SignedFoundation
from neuroshard.consensus.group_rounds import RoundRequestHandlers
from neuroshard.consensus.round_messages import VerifiedBody, signed_by
from neuroshard.consensus.stage_chain import CHAIN
from neuroshard.data.held_out_losses import HeldOutLosses, MeasuredWith, signed_losses, verified_losses
from neuroshard.host.sleep import watch_sleep
from neuroshard.identity import NodeIdentity, SignedClaim
from neuroshard.identity.node_revocations import RevokedPairs
from neuroshard.membership.connectivity import DialledRequests, Networking
from neuroshard.membership.holder_health import VALID_SECONDS, ConfirmedHolders, LostNodes, SlowStarts
from neuroshard.membership.reports import TrainingReport
from neuroshard.membership.run_members import RunMembers
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
from neuroshard.model.architecture import plan_of
from neuroshard.network import Network, PeerUnreachableError, ScoreReason
from neuroshard.pipeline.chain_protocol import HAND
from neuroshard.pipeline.chain_server import Neighbours
from neuroshard.pipeline.stage_client import LocalStageClient, RemoteStageClient, StageClient, StageClientOptions
from neuroshard.pipeline.stage_protocol import StageAddress, wire_precisions
from neuroshard.pipeline.stage_requests import StageRequestHandler, StageRequestHandlers
from neuroshard.pipeline.stage_server import StageServer
from neuroshard.pipeline.tensor_checks import StageShapes
from neuroshard.runs.exchange import RunVersions
from neuroshard.state.download import ReplicaClient
from neuroshard.state.kept_states import StageArchive
from neuroshard.state.replica_status import REPLICA_STATUS
from neuroshard.state.snapshot_server import SnapshotServer
from neuroshard.state.transfer_messages import CHUNK, MANIFEST, StageName
from neuroshard.status.snapshot import NodeState
from neuroshard.training.stage_replica import StageReplica
from neuroshard.types import LayerRange, NodeId, WalletId
from neuroshard.waiting import sleep_to_tick

_LOG = logging.getLogger(__name__)

AT_WORK = frozenset({NodeState.TRAINING, NodeState.WAITING_FOR_DATA, NodeState.WAITING_FOR_STAGES})
HOLDING = AT_WORK | {NodeState.PAUSED}
GONE = frozenset({NodeState.STOPPING, NodeState.NOT_TRAINING, NodeState.FAILED})
PRESENCE_LOOK_SECONDS = 1.0
ABSENCE_SECONDS = 3.0  # without a connection; then a node counts as gone and its open work is dropped
MOST_RANGES = 4096  # entries of the cache of `stages_of`


_ReportedHolder: TypeAlias = "tuple[TrainingReport, StageHolder | None]"


@dataclass(frozen=True)
class _Fold:
    """Values derived from one view of the members. They are read per microbatch but change only with a report."""

    view: GlobalView
    lost: int
    coverage: StageCoverage
    at_work: dict[LayerRange, list[NodeId]] = field(default_factory=dict[LayerRange, list[NodeId]])


@dataclass(frozen=True)
class ReportedCopy:
    """Age of the copy of a stage that another node keeps, as reported by the stage's single holder."""

    holder: NodeId
    age_seconds: float | None  # at the time of the report; None: no copy yet
    reported_at: float  # time of the report by the event loop's clock


class StageSwarm:
    """This node's view of the run's stages and its clients for them; built when the run is known.

    While `live` runs, other nodes can use the stages that are held here.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        versions: RunVersions,
        membership: Membership,
        networking: Networking,
        options: StageClientOptions | None = None,
        *,
        windows: Sequence[StageRange] = (),
        members: RunMembers | None = None,
    ) -> None:
        """`windows` are the longest sequences of stages that fit this computer; none: it holds its stages only.

        `members` are those of a run of friends.
        """
        offer, parameters = versions.offer, versions.offer.parameters
        self._identity = identity
        self.node_id = identity.node_id
        self.wallet_id = identity.wallet_id
        self.run_id = offer.run_id
        self.versions = versions
        self.plan = plan_of(parameters)
        self.membership = membership
        self.outer = parameters.outer  # no later version may change the kind of outer state
        self.inner = parameters.inner  # nor the optimizer
        self._version = offer.initial.parameters.version  # no later version changes the protocol between stages
        self._options = options or StageClientOptions(*wire_precisions(parameters))
        self._networking = networking
        self._requests = DialledRequests(networking, membership)
        self._waiting: dict[NodeId, set[anyio.CancelScope]] = {}  # requests without an answer yet, by peer
        self._shapes = [
            StageShapes.for_layers(parameters.architecture, layers, parameters.batch_size) for layers in self.plan
        ]
        self._endpoints = StageRequestHandlers(self._shapes)
        self._local: dict[int, LocalStageClient] = {}
        self.lost = LostNodes(membership)
        self.confirmed = ConfirmedHolders()
        self._slow_starts = SlowStarts()
        self._fold: _Fold | None = None
        self._reported_holders: dict[NodeId, _ReportedHolder] = {}  # of the last fold: most reports are unchanged
        self.unobtainable: frozenset[int] = frozenset()  # stages whose state no node that answers has
        self.windows = tuple(windows)
        self._members = members
        self.revoked: RevokedPairs = frozenset() if members is None else members.revoked_nodes.pairs
        self.is_asleep = False  # whether the computer sleeps or is about to
        self.ready_percent = 0  # part of the states fetched that this node needs before it can work
        self.destination: StageRange | None = None  # the stages this node moves to while it still holds others
        self.reported_copies: Mapping[int, ReportedCopy] = {}  # of stages that another node holds alone
        readers = None if members is None else members.readers
        self.donor = SnapshotServer(membership.knows, report=self._report, readers=readers)  # sends states stored here
        self.rounds = RoundRequestHandlers()  # for replicas held here
        self.asking = ReplicaClient(self, self._report)  # asks other nodes for their states
        self.stages_of = lru_cache(MOST_RANGES)(partial(stages_of, plan=self.plan))  # many nodes report the same layers

    async def live(self, network: Network) -> None:
        """Answer the requests of other nodes until cancelled.

        Open work of a node without a connection for ABSENCE_SECONDS is dropped.
        """
        self._endpoints.serve(network.transport)
        self.donor.serve(network.transport)
        self.rounds.serve(network.transport)
        network.gate.let_read(REPLICA_STATUS, MANIFEST, CHUNK, CHAIN)
        try:
            seen = dict[NodeId, float]()
            await anyio.sleep(ABSENCE_SECONDS)  # a network that has just started has no connections yet
            while True:
                now = anyio.current_time()
                seen |= dict.fromkeys(network.transport.peers(), now)
                seen = {peer: at for peer, at in seen.items() if now - at <= ABSENCE_SECONDS}
                present = {self.node_id, *seen}
                self._endpoints.keep_only(present)
                self.donor.keep_only(present)
                await sleep_to_tick(PRESENCE_LOOK_SECONDS)
        finally:
            self.donor.close()

    async def leave_before_sleep(self) -> None:
        """Give this node's seats up before the computer sleeps, so that the others need no vote of it meanwhile.

        It takes part in no new step until the computer is awake. Its next accepted work then gets the seats again.
        """

        async def sleeps() -> None:
            self.is_asleep = True
            async with anyio.create_task_group() as leaving:
                for group in self.rounds.groups.values():
                    leaving.start_soon(group.leave)

        async def wakes() -> None:
            await anyio.lowlevel.checkpoint()
            self.is_asleep = False

        reason = await watch_sleep(sleeps, wakes)
        _LOG.debug("This node cannot detect that the computer is about to sleep: %s.", reason)

    def hold(self, stage: int, service: StageServer, root: Callable[[], str], outer_step: Callable[[], int]) -> None:
        """Serve a stage from now on. `root` returns the root hash of its present weights."""

        def sign(labels: Tensor, summed: Tensor) -> bytes:
            weights = MeasuredWith(self.run_id, self.plan[stage], outer_step(), root())
            return signed_losses(self._identity, weights, labels, summed, time.time()).encode()

        self._local[stage] = LocalStageClient(service, self.node_id, root)
        self.versions.note_held(self._local)
        self._endpoints.add(
            StageRequestHandler(
                service,
                self._address(stage),
                self._shapes[stage],
                root=root,
                may_drive=self.is_member,
                report=self._report,
                sign=sign,
                neighbours=Neighbours(self, self._is_at_work),
            )
        )

    def host(self, replica: StageReplica) -> None:
        """Serve a stage that this node trains: its microbatches, its state and its rounds."""
        outer = replica.outer
        self.hold(replica.index, replica.service, outer.exact_root, lambda: outer.state.outer_step)
        self.donor.offer(replica.stage, replica)
        self.donor.archive(replica.stage, StageArchive.of(replica.keeper.store))
        if replica.group is not None:
            self.rounds.add(replica.group)

    def go_to(self, stages: StageRange | None) -> None:
        """Announce the stages that this node moves to, so that no other node moves there; None: it stays."""
        self.destination = stages
        self.membership.own_news.notify()

    def note_ready(self, percent: int) -> None:
        """Record the part of the states fetched that this node needs before it can work, for its reports."""
        self.ready_percent = percent

    def note_copies(self, copies: Mapping[int, ReportedCopy]) -> None:
        """Record the copies of stages that another node holds alone, as their holders report them."""
        self.reported_copies = copies

    def note_unobtainable(self, stages: frozenset[int]) -> None:
        """Record the stages whose state no node that answers has."""
        self.unobtainable = stages

    def release(self) -> None:
        """Stop serving all stages and drop the references to them."""
        for stage in self._local:
            self.donor.withdraw(self.name_of(stage))
        self.rounds.clear()
        self._local.clear()
        self.versions.note_held(())
        self._endpoints.clear()

    @property
    def held(self) -> StageRange | None:
        """Range of the stages served here; None while there are none."""
        return StageRange(min(self._local), max(self._local) + 1) if self._local else None

    def is_connected(self, node_id: NodeId) -> bool:
        """Return whether this node has an open connection with another node."""
        network = self._networking.current
        return network is not None and node_id in network.transport.peers()

    def is_member(self, node_id: NodeId) -> bool:
        """Return whether a node reports that it works on this run."""
        return node_id in self.membership.view.members

    @property
    def may_meet(self) -> bool:
        """Whether this node can take part in rounds: it is awake, and its owner's network rules allow tensors now."""
        return not self._networking.gate.reason and not self.is_asleep

    @property
    def word(self) -> SignedFoundation | None:
        return self.versions.foundations.word

    @property
    def changes(self) -> Sequence[ChangeParameters]:
        return self.versions.changes

    def wallet_of(self, node_id: NodeId) -> WalletId | None:
        """Wallet of a node that reports; None for an unknown node."""
        member = self.membership.view.members.get(node_id)
        return None if member is None else member.wallet_id

    def is_removed(self, wallet: WalletId) -> bool:
        """Whether the run's owner has ended the membership of a wallet."""
        return self._members is not None and self._members.register.is_removed(wallet)

    def sign(self, body: AnyBody) -> VerifiedBody[AnyBody]:
        """Sign a round message with this node's key and the present time."""
        return signed_by(self._identity, body, time.time())

    def moved_bytes(self, node_id: NodeId) -> int:
        """Bytes sent to and received from a node over its present connections."""
        network = self._networking.current
        every = () if network is None else network.transport.connections()
        return sum(one.bytes_sent + one.bytes_received for one in every if one.peer == node_id)

    def received_bytes(self, node_id: NodeId) -> int:
        """Bytes received from a node over its present connections."""
        network = self._networking.current
        every = () if network is None else network.transport.connections()
        return sum(one.bytes_received for one in every if one.peer == node_id)

    def coverage(self) -> StageCoverage:
        """Return the holders of all stages; this node counts as in its own last report."""
        return self._present().coverage

    def sole_holder(self, stage: int) -> NodeId | None:
        """The only node that can work on a stage; None if there are several or none.

        Of several holders only those count that have confirmed it: a false report must not prevent a copy.
        """
        holders: Sequence[NodeId] = self.coverage().replicas_of(stage)
        if len(holders) > 1:
            own, confirmed = self.node_id, self.confirmed
            holders = [
                node for node in holders if node == own or confirmed.was_reported_within(VALID_SECONDS, node, stage)
            ]
        return holders[0] if len(holders) == 1 else None

    def _present(self) -> _Fold:
        # The view is a new object after every change, and `lost.added` grows with every lost node.
        view, fold = self.membership.view, self._fold
        if fold is None or fold.view is not view or fold.lost != self.lost.added:
            fold = self._fold = _Fold(view, self.lost.added, self._folded())
        return fold

    def _folded(self) -> StageCoverage:
        members, known, reported = self.membership.view.members, self._reported_holders, dict[NodeId, _ReportedHolder]()
        out = self.lost.now() | self._slow_starts.overdue(members.values())
        for node_id, member in members.items():
            holds = known.get(node_id)
            if holds is None or holds[0] is not member.report:
                holds = member.report, self._holder(member)
            reported[node_id] = holds
        self._reported_holders = reported
        holders = [holder for node_id, (_, holder) in reported.items() if holder is not None and node_id not in out]
        return StageCoverage.of(self.run_id, len(self.plan), holders)

    def _holder(self, member: Member) -> StageHolder | None:
        """Stages that a member holds or prepares, according to its report; None if there are none."""
        report = member.report
        stages = None if report.layers is None else self.stages_of(report.layers)
        if stages is None or report.state in GONE:
            return None
        is_ready = report.state in HOLDING
        return StageHolder(member.node_id, member.wallet_id, stages, is_ready, report.windows)

    def workers(self, stage: int) -> Sequence[NodeId]:
        """Nodes that can work on a stage now, sorted by id.

        A driver that holds the first stage uses only its own: it decides when data are taken, and its checkpoint
        records the position in them.
        """
        if stage == 0 and stage in self._local:
            return (self.node_id,)
        others = self._others_at_work(self.plan[stage])
        return sorted([self.node_id, *others] if stage in self._local else others)

    def holders_of(self, stage: int) -> Sequence[NodeId]:
        """All nodes that work on a stage now, with this one if it holds the stage."""
        others = self._others_at_work(self.plan[stage])
        return [self.node_id, *others] if stage in self._local else list(others)

    def replicas(self, stage: int) -> Sequence[NodeId]:
        """The other nodes that can work on a stage now, sorted by id."""
        return self._others_at_work(self.plan[stage])

    def newcomers(self) -> frozenset[NodeId]:
        """Nodes that download a state from here and may soon work on it: they are starting, have not reported yet, or
        take the state again because they are behind.
        """
        members, again = self.membership.view.members, set[NodeId]().union(*map(self.replicas, self._local))
        return frozenset(
            node
            for node in self.donor.receivers
            if node not in members or node in again or members[node].report.state is NodeState.STARTING
        )

    def sends_to_others(self) -> bool:
        """Return whether a microbatch that this node drives may be sent to another node."""
        return any(list(self.workers(stage)) != [self.node_id] for stage in range(len(self.plan)))

    def lane_root(self, stage: int) -> bytes:
        """Seed of the lanes through a stage: the state root that most replicas report, otherwise the run id.

        The root comes from reports and is not certified.
        """
        workers = set(self.workers(stage))
        members = self.membership.view.members.values()
        roots = [each.report.state_hash for each in members if each.node_id in workers and each.report.state_hash]
        return bytes.fromhex(max(sorted(set(roots)), key=roots.count, default=self.run_id))

    def hop(self, stage: int, node_id: NodeId) -> StageClient:
        """Return a client for a stage at a node: local, or remote with checks of the returned losses."""
        if node_id == self.node_id:
            return self._local[stage]

        def check(sender: NodeId, claim: bytes, labels: Tensor, summed: Tensor) -> SignedClaim[HeldOutLosses]:
            weights = MeasuredWith(self.run_id, self.plan[stage], 0)
            return verified_losses(claim, sender, weights, labels, summed, now=time.time())

        address, shapes = self._address(stage), self._shapes[stage]
        return RemoteStageClient(
            self, node_id, address, shapes, self._options, report=self._report, check=check, moved=self.moved_bytes
        )

    def missing(self) -> str:
        """A sentence with the layers that no node can work on now; "" if there are none."""
        coverage = self.coverage()
        if self.held is not None:
            coverage = coverage.with_holder(StageHolder(self.node_id, self.wallet_id, self.held))
        missing = missing_sentence(missing_layers(coverage, self.plan))
        if missing:
            is_hopeless = any(stage in self.unobtainable for stage in coverage.missing)
            return f"{missing} No node that answers has their state." if is_hopeless else missing
        idle = [layers for stage, layers in enumerate(self.plan) if not self.workers(stage)]
        return missing_sentence(idle, "held only by nodes that are paused")

    async def request(
        self, peer: NodeId, frame: Frame, *, reply: FrameLimits | None = None, timeout_seconds: float
    ) -> Frame:
        """Send a request on the present network, dialling the peer first if needed. Raises like Transport.request.

        `end_requests` ends it. Two stages of this node hand their tensors to each other without the network.
        """
        if peer == self.node_id and frame.kind == HAND:
            return await self._endpoints.take(peer, frame)
        waiting = self._waiting.setdefault(peer, set())
        with anyio.CancelScope() as scope:
            waiting.add(scope)
            try:
                return await self._requests.request(peer, frame, reply=reply, timeout_seconds=timeout_seconds)
            finally:
                waiting.remove(scope)
                if not waiting:
                    self._waiting.pop(peer, None)
        raise PeerUnreachableError(f"Node {peer} no longer answers.")

    def awaits(self, peer: NodeId) -> bool:
        """Return whether a request to this node has no answer yet."""
        return peer in self._waiting

    def end_requests(self, peer: NodeId) -> None:
        """End the requests to a node that it has not answered yet."""
        for scope in self._waiting.get(peer, ()):
            scope.cancel()

    def _is_at_work(self, node_id: NodeId, layers: LayerRange) -> bool:
        if node_id == self.node_id:
            return any(self.plan[stage] == layers for stage in self._local)
        return layers in self.plan and node_id in self._others_at_work(layers)

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
        """Name of a stage in requests for its state."""
        return StageName(self.run_id, self.plan[stage] if isinstance(stage, int) else stage)

    def _address(self, stage: int) -> StageAddress:
        return StageAddress(self.run_id, self.plan[stage], self._version)

    def _report(self, peer: NodeId, reason: ScoreReason) -> None:
        if self._networking.current is not None:
            self._networking.current.reputation.report(peer, reason)
