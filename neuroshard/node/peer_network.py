"""This node's part in the network: its connections, the runs that it knows and serves, and its own reports."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from math import isfinite
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from msgspec.structs import replace

from neuroshard.config.settings import Settings
from neuroshard.data.source import MeteredSource, ShardSource
from neuroshard.errors import StorageError
from neuroshard.host.identity import StoredRevocations
from neuroshard.identity import NodeIdentity
from neuroshard.identity.admissions import AdmissionRegister
from neuroshard.identity.invitations import Invitation
from neuroshard.identity.node_revocations import RevokedNodes
from neuroshard.membership.announcements import Announcement
from neuroshard.membership.connectivity import Networking, NetworkOpener
from neuroshard.membership.network_opening import (
    PEERS_FILE,
    Traffic,
    TrafficMeter,
    libp2p_opener,
    memory_limit_mb,
    use_surroundings,
)
from neuroshard.membership.participant import OwnMessages, Participant
from neuroshard.membership.reports import (
    MAX_DEVICE_CHARACTERS,
    MAX_FLOPS_PER_SECOND,
    MAX_WINDOWS,
    TrainingReport,
    kept_report_numbers,
)
from neuroshard.membership.run_members import Papers, RunMembers
from neuroshard.membership.stage_coverage import StageRange
from neuroshard.membership.swarm_status import ShardCoverage
from neuroshard.model.architecture import plan_of
from neuroshard.model.memory_limit import network_memory
from neuroshard.network import Connection, Network
from neuroshard.network.blocking import BlockingRunner
from neuroshard.network.limits import UploadPacer
from neuroshard.network.line import UploadLine
from neuroshard.network.mdns import MAX_COMPUTERS, MAX_NAME_CHARACTERS, RunNotice
from neuroshard.network.nat.external_addresses import ExternalAddresses
from neuroshard.network.nat.port_mapping import PortMapping
from neuroshard.network.transport import MAX_RECORD_ADDRESSES, node_of_address
from neuroshard.runs.admission_keeper import AdmissionKeeper, keeper_of
from neuroshard.runs.exchange import OfferStore, RunExchange, RunVersions
from neuroshard.runs.finding import RunFinder
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.runs.knocking import KnockDoor
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stored_passes import OwnPass, StoredPasses
from neuroshard.runs.stored_runs import JoinedRuns
from neuroshard.status.board import Publisher
from neuroshard.status.snapshot import NetworkStatus, NodeState, NodeStatus, PeerStatus, SwarmStatus
from neuroshard.types import MAX_LOSS, LayerRange, RunId, WalletId
from neuroshard.waiting import Signal, sleep_to_tick

if TYPE_CHECKING:
    from neuroshard.node.stage_swarm import StageSwarm


def own_report(status: NodeStatus, run_id: RunId) -> TrainingReport:
    """Build this node's report. The reporter sets its sequence and interval. Raises ValueError without a run."""
    if status.model is None:
        raise ValueError("a node without a run has nothing to report")
    training, diloco, data = status.training, status.diloco, status.data
    held_out, speed = training.held_out[-1] if training.held_out else None, status.acceleration
    is_measured = speed is not None and isfinite(speed.flops_per_second)
    return TrainingReport(
        run_id=run_id,
        sequence=0,
        steps=training.steps,
        tokens=training.tokens,
        loss_ema=_reportable(training.loss_ema),
        shard=data.shard if data else None,
        shards_seen=data.shards_seen if data else 0,
        roles=status.model.roles,
        layers=status.model.layers,
        outer_step=diloco.outer_steps,
        state_hash=diloco.state_root,
        successful_syncs=diloco.successful_syncs,
        failed_syncs=diloco.failed_syncs,
        tokens_per_second=training.tokens_per_second,
        state=status.state,
        started_at=status.started_at,
        interval_seconds=1.0,
        inherited_steps=training.inherited_steps,
        inherited_tokens=training.inherited_tokens,
        cached=data.shared if data else (),
        held_out_loss=None if held_out is None else _reportable(held_out.loss),
        held_out_step=0 if held_out is None else held_out.step,
        device="" if speed is None else speed.device.encode("ascii", "ignore").decode()[:MAX_DEVICE_CHARACTERS],
        flops_per_second=min(speed.flops_per_second, MAX_FLOPS_PER_SECOND) if speed and is_measured else 0.0,
        reachable=status.network.reachable,
    )


def _reportable(loss: float | None) -> float | None:
    return loss if loss is not None and isfinite(loss) and 0 <= loss <= MAX_LOSS else None


def own_announcement(
    status: NodeStatus,
    run_id: RunId,
    *,
    parameters_version: int,
    addresses: tuple[str, ...],
    member_pass: bytes | None = None,
    admission: bytes | None = None,
) -> Announcement:
    """Build the announcement that this node stores in the directory."""
    return Announcement(
        run_id=run_id,
        parameters_version=parameters_version,
        layers=status.model.layers if status.model else None,
        addresses=addresses[:MAX_RECORD_ADDRESSES],
        pool=None,
        started_at=status.started_at,
        memory_tier_mb=status.memory.tier_mb if status.memory else 0,
        is_relay=False,
        version=status.version,
        member_pass=member_pass,
        admission=admission,
    )


_LOG = logging.getLogger(__name__)

PUBLISH_SECONDS = 0.5
PAPERS_SECONDS = 5.0
ADMISSIONS_SECONDS = 60.0
RESTING_SECONDS = 2.0  # while the node is paused, or has no network and counts only what it fetches
FIRST_PUBLISH_SECONDS = 0.1  # until the network is up
OPENING_SECONDS = 30.0  # a network that is not up by then is not expected soon


@dataclass(frozen=True)
class NetworkView:
    """Connections, peers and swarm of this node at one moment."""

    network: NetworkStatus
    peers: tuple[PeerStatus, ...]
    swarm: SwarmStatus | None


class JoinedRun:
    """The run that this node is a member of. Its stages follow when PyTorch is loaded."""

    def __init__(
        self,
        identity: NodeIdentity,
        settings: Settings,
        networking: Networking,
        versions: RunVersions,
        status: Callable[[], NodeStatus],
        *,
        members: RunMembers | None,
        now: Callable[[], float],
    ) -> None:
        """`status` returns this node's present status, from which its reports are made.

        `members` decides in a run of friends; None: any node may take part.
        """
        offer = versions.offer
        self.run_id = offer.run_id
        self._identity = identity
        self._networking = networking
        self._versions = versions
        self._status = status
        self._genesis = settings.genesis or ""
        self._swarm: StageSwarm | None = None
        self.participant = Participant(
            identity,
            offer.run_id,
            ShardCoverage(offer.data_run_id, offer.parameters.genesis.total_shards),
            OwnMessages(self._report, self._announcement, kept_report_numbers(settings.data_dir)),
            networking.book.add,
            plan=plan_of(offer.parameters),
            members=members,
            claim_bytes=network_memory(memory_limit_mb(settings)).claims,
            now=now,
        )
        networking.attach(self.participant.live)
        self._own_pass = None if members is None else members.own_pass
        self.members = members

    def open_stages(self, offer: RunOffer, genesis: str, windows: Sequence[StageRange]) -> StageSwarm:
        """Exchange the stages' work and state with the run's other nodes. Loads PyTorch.

        `genesis` is the location of the data, "" without one; `windows` are the longest sequences of stages that fit
        this computer.
        """
        from neuroshard.node.stage_swarm import StageSwarm  # imports PyTorch: only after peers know this node

        self._versions.learn(offer)
        self._genesis = genesis
        membership, members = self.participant.membership, self.members
        self._swarm = StageSwarm(
            self._identity, self._versions, membership, self._networking, windows=windows, members=members
        )
        self._networking.attach(self._swarm.live)
        return self._swarm

    @property
    def in_round(self) -> bool:
        """Whether a stage of this node is in a round."""
        return self._swarm is not None and any(group.in_round for group in self._swarm.rounds.groups.values())

    def has_certified(self, version: int) -> bool:
        """Whether the chains of all stages here have this version of the run's parameters or a later one."""
        groups = () if self._swarm is None else tuple(self._swarm.rounds.groups.values())
        ledgers = [group.chain.ledger for group in groups]
        return bool(ledgers) and all(ledger is not None and ledger.newest_version >= version for ledger in ledgers)

    def join_line(self, addresses: Sequence[str], organiser: str) -> str:
        """Command that others type to join the run; "" while they cannot, and in a demo.

        `organiser` is the address of the run's organiser, "" if it is not known here.
        """
        if self._status().is_demo:
            return ""
        return join_line(self._versions.offer, addresses, self._genesis, organiser)

    def status(self, network: Network | None, now: float) -> tuple[tuple[PeerStatus, ...], SwarmStatus]:
        """Return the peers, and the totals of all nodes with this node's present values."""
        if self._status().model is not None:
            self.participant.membership.count_present(self._report(), now)
        return self.participant.status(network)

    def _report(self) -> TrainingReport:
        said = own_report(self._status(), self.run_id)
        return said if self._swarm is None else report_of_stages(said, self._swarm)

    def _announcement(self) -> Announcement:
        version, addresses = self._versions.offer.parameters.version, addresses_of(self._networking.current)
        return own_announcement(
            self._status(),
            self.run_id,
            parameters_version=version,
            addresses=addresses,
            member_pass=self._own_pass,
            admission=None if self.members is None else self.members.own_admission,
        )


@dataclass
class PeerNetwork:
    """This node's network, built once per start without PyTorch.

    `join` follows when the run is known, and `serve` when PyTorch is loaded.
    """

    identity: NodeIdentity
    settings: Settings
    networking: Networking
    exchange: RunExchange
    finder: RunFinder
    now: Callable[[], float]  # seconds since the epoch
    revoked_nodes: RevokedNodes  # of this wallet, and of the others in the run
    line: UploadLine
    offload: BlockingRunner
    upload: UploadPacer = field(default_factory=UploadPacer)  # the owner's limit on everything that is sent
    port_mapping: PortMapping | None = None
    holds_layers: bool = True  # or may hold some; otherwise an organiser gives it the place of a trainer
    joined: JoinedRun | None = field(default=None, init=False)
    door: KnockDoor | None = field(default=None, init=False)  # where computers of the local network ask to join
    knocked: Signal = field(default_factory=Signal, init=False)  # notified after every knock
    _keeper: AdmissionKeeper | None = field(default=None, init=False)  # of this node's admission to an organised run
    _limits: Settings | None = field(default=None, init=False)  # settings after a change
    _traffic: TrafficMeter = field(default_factory=TrafficMeter, init=False)
    _moved_by_peers: int = field(default=0, init=False)  # bytes since the start, in both directions
    _fetched: int = field(default=0, init=False)  # bytes from sources of data

    @classmethod
    def of(
        cls,
        settings: Settings,
        identity: NodeIdentity,
        open_network: NetworkOpener | None = None,
        now: Callable[[], float] = time.time,
        *,
        invitation: Invitation | None = None,
        may_wait: bool = False,
        holds_layers: bool = True,
        serves_others: bool = False,
        offload: BlockingRunner = anyio.to_thread.run_sync,
    ) -> PeerNetwork:
        """Build the network on libp2p, or on `open_network` if given; without any if the owner turned it off.

        With `may_wait` a node that its run does not admit waits until it does. `serves_others`: as a relay.
        """
        outside = ExternalAddresses()
        line = UploadLine(settings.data_dir)
        upload = UploadPacer(line.limit(settings))
        opener = open_network or libp2p_opener(settings, identity, outside, upload=upload, serves_others=serves_others)
        networking = Networking(
            identity.node_id,
            opener if settings.network else None,
            peers_file=settings.data_dir / PEERS_FILE,
            given=settings.peer,
            loopback_only=ip_address(settings.p2p_host).is_loopback,
        )
        stored = JoinedRuns(settings.data_dir)
        foundations = StoredFoundations(settings.data_dir)
        offers = OfferStore(stored.load, stored.keep, foundations.read, foundations.write)
        exchange = RunExchange(offers, now=now, wallet=identity.wallet_id)
        networking.attach(exchange.live)
        finder = RunFinder(
            settings, exchange, networking, identity, invitation, may_wait=may_wait, holds_layers=holds_layers
        )
        revoked = StoredRevocations(settings.data_dir).revoked()
        parts = (networking, exchange, finder, now, revoked, line, offload, upload)
        built = cls(identity, settings, *parts, holds_layers=holds_layers)
        if open_network is None:
            built._use_surroundings(outside)
        return built

    def _use_surroundings(self, outside: ExternalAddresses) -> None:
        node_id, networking = self.identity.node_id, self.networking
        self.port_mapping = use_surroundings(self.settings, node_id, networking, outside, self.notice)

    def notice(self) -> RunNotice | None:
        """The run that this node announces on the local network: one into which it can let computers that ask."""
        offer, joined = self.exchange.shared, self.joined
        if offer is None or joined is None or (offer.parameters.admission == "friends" and self.door is None):
            return None
        name = offer.parameters.name[:MAX_NAME_CHARACTERS]
        nodes = joined.status(self.networking.current, self.now())[1].nodes
        return RunNotice(offer.run_id, name if name.isprintable() else "", min(nodes, MAX_COMPUTERS))

    def join(self, offer: RunOffer, status: Callable[[], NodeStatus], *, is_shared: bool) -> JoinedRun:
        """Make this node a member of a run. If `is_shared`, nodes that ask for any run are offered it."""
        stored = StoredPasses(self.settings.data_dir, offer)
        own = stored.own(self.identity.wallet_id)
        members = self._members(offer, stored, own)
        register = members.register if members.named is None else None
        tip = None if own is None else own.tip
        versions = self.exchange.follow(offer, is_shared=is_shared, members=register, tip=tip)
        joined = JoinedRun(
            self.identity, self.settings, self.networking, versions, status, members=members, now=self.now
        )
        self.joined = joined
        members.learn(Papers(revoked_nodes=stored.revoked_nodes()))  # now it is known which wallets count
        keeper = keeper_of(
            self.settings,
            self.identity,
            lambda: versions.offer,
            self.now,
            self.finder.invitation,
            networking=self.networking,
            holds_layers=self.holds_layers,
        )
        if keeper is not None:
            keeper.restore(offer, self.identity)
            self._keeper = keeper
            self.networking.attach(lambda _network: keeper.run(members))
        papers = PaperKeeper(members, stored, StoredRevocations(self.settings.data_dir), self.offload)
        self.networking.attach(papers.run)
        return joined

    @property
    def _organiser(self) -> str:
        return self.settings.organiser or ("" if self._keeper is None else self._keeper.url)

    @property
    def admitted_layers(self) -> LayerRange | None:
        """The layers for which an organiser admitted this node; None in other runs."""
        return None if self._keeper is None else self._keeper.layers

    def _named(self) -> Collection[WalletId]:
        return () if self.exchange.followed is None else self.exchange.followed.foundations.trusted

    def _admissions(self, offer: RunOffer) -> AdmissionRegister | None:
        """The admissions of an organised run; its newest version names the authorities."""
        if offer.parameters.admission != "admitted":
            return None

        def authorities() -> tuple[bytes, ...]:
            followed = self.exchange.followed
            newest = offer if followed is None or followed.offer.run_id != offer.run_id else followed.offer
            return tuple(map(bytes.fromhex, newest.parameters.authority))

        return AdmissionRegister(offer.run_id, authorities)

    def _members(self, offer: RunOffer, stored: StoredPasses, own: OwnPass | None) -> RunMembers:
        """Close the gate to revoked nodes and, in a run of friends, to wallets without a pass. Raises StorageError."""
        is_closed = offer.parameters.admission == "friends"
        trusted = frozenset(map(node_of_address, self.settings.peer))
        members = RunMembers(
            stored.register(),
            self.identity,
            None if own is None else own.member_pass,
            self.now,
            trusted,
            self.revoked_nodes,
            None if is_closed else self._named,
            self._admissions(offer),
            self.upload,
        )
        if is_closed and offer.owner == self.identity.wallet_id:
            self.door = KnockDoor(offer.run_id, self.knocked.notify)
            self.networking.attach(self.door.live)
        self.networking.close_to_others(members.refusal, members.may_read)
        return members

    def serve(
        self,
        offer: RunOffer,
        status: Callable[[], NodeStatus],
        *,
        is_shared: bool,
        genesis: str | None = None,
        windows: Sequence[StageRange] = (),
    ) -> StageSwarm:
        """Join a run, unless this node has joined already, and exchange its stages' work and state. Loads PyTorch.

        The arguments are those of `join` and of `JoinedRun.open_stages`; `genesis` is that of the settings by default.
        """
        joined = self.joined or self.join(offer, status, is_shared=is_shared)
        return joined.open_stages(offer, (self.settings.genesis or "") if genesis is None else genesis, windows)

    def metered(self, source: ShardSource) -> ShardSource:
        """Wrap a remote data source so that the owner's network rules apply and its bytes are counted."""
        return MeteredSource(source, lambda: self.networking.gate.reason, self._note_fetched)

    def limit_upload(self, settings: Settings) -> None:
        """Apply a changed upload limit to everything that is sent from now on."""
        self._limits = settings
        self._renew_upload_limit()

    def _renew_upload_limit(self) -> None:
        limit = self.line.limit(self._limits or self.settings)
        if limit != self.upload.bytes_per_second:
            self.upload.limit(limit)

    def moved(self) -> int:
        """Bytes moved over the network since the start, in both directions: peers and data sources."""
        return self._moved_by_peers + self._fetched

    def _note_fetched(self, count: int) -> None:
        self._fetched += count

    async def introduced(self) -> None:
        """Wait until this node is announced, so that others can find it as a member of its run."""
        if self.joined is not None:
            await self.joined.participant.announced.wait()

    def look(self) -> NetworkView:
        """Collect the present state of the network, count the bytes moved by peers, and measure the line."""
        network = self.networking.current
        connections = () if network is None else network.transport.connections()
        traffic = self._traffic.look(connections, self.now())
        self.line.look(connections, self.now())
        self._renew_upload_limit()
        self._moved_by_peers = traffic.sent + traffic.received
        peers, swarm = ((), None) if self.joined is None else self.joined.status(network, self.now())
        return NetworkView(
            self._network_status(network, connections, traffic),
            peers,
            swarm,
        )

    def report_soon(self) -> None:
        """Send a report to the other nodes within a second."""
        if self.joined is not None:
            self.joined.participant.membership.own_news.notify()

    @property
    def clock_warning(self) -> str | None:
        """Warning for the owner if this computer's clock differs from the other nodes'; None if it does not."""
        return None if self.joined is None else self.joined.participant.clock_warning

    def _network_status(
        self, network: Network | None, connections: Sequence[Connection], traffic: Traffic
    ) -> NetworkStatus:
        state, explanation = self.networking.state()
        trouble = "" if self.port_mapping is None else self.port_mapping.trouble()
        kept_out = "" if self._keeper is None else self._keeper.trouble
        addresses = addresses_of(network)
        return NetworkStatus(
            state=state,
            explanation=" ".join(filter(None, (explanation, trouble, kept_out))),
            addresses=addresses,
            connections=len(connections),
            bytes_sent=traffic.sent,
            bytes_received=traffic.received,
            upload_rate=traffic.sent_a_second,
            download_rate=traffic.received_a_second,
            upload_limit=self.upload.bytes_per_second,
            line_upload=None if self.line.speed is None else self.line.speed.upload,
            line_measured_at=None if self.line.speed is None else self.line.speed.measured_at,
            banned_peers=0 if network is None else len(network.reputation.banned_peers()),
            refused=() if network is None else network.reputation.refused(),
            reachable=None if self._keeper is None else self._keeper.reachable,
            join_line="" if self.joined is None else self.joined.join_line(addresses, self._organiser),
        )


def report_of_stages(said: TrainingReport, swarm: StageSwarm) -> TrainingReport:
    """Add the stages that this node can hold, its progress, and its destination if it moves to other stages."""
    percent = swarm.ready_percent if said.state is NodeState.STARTING else 0
    if swarm.destination is not None:
        layers = swarm.destination.layers(swarm.plan)
        roles = layers.roles(swarm.plan[-1].stop)
        said, percent = replace(said, state=NodeState.STARTING, layers=layers, roles=roles), 0
    windows = swarm.windows if len(swarm.windows) <= MAX_WINDOWS else ()
    return replace(said, windows=windows, ready_percent=percent)


@dataclass
class PaperKeeper:
    """Stores passes, admissions and revocations as this node learns them, and takes up revocations made here."""

    members: RunMembers
    stored: StoredPasses
    signed: StoredRevocations
    offload: BlockingRunner  # the file has up to 32 MB
    _is_restored: bool = field(default=False, init=False)

    async def run(self, _network: Network) -> None:
        """Restore the stored admissions once, then keep the papers until cancelled.

        Admissions, which every node of the run renews twice an hour, are stored less often.
        """
        if not self._is_restored:
            await self._restore()
        kept, kept_at = self.members.papers(), anyio.current_time()
        while True:
            await sleep_to_tick(PAPERS_SECONDS)
            try:
                self.members.learn(await self.offload(self._made_here))
                known = self.members.papers()
                is_due = anyio.current_time() - kept_at >= ADMISSIONS_SECONDS
                if known != kept and (is_due or replace(known, admissions=()) != replace(kept, admissions=())):
                    await self.offload(partial(self.stored.keep_papers, known))
                    kept, kept_at = known, anyio.current_time()
            except StorageError as error:
                _LOG.warning("The passes of the run cannot be stored or read: %s", error)

    async def _restore(self) -> None:
        try:
            await self.members.restore(self.stored.admissions, self.offload)
            # a wallet with an admission may revoke its nodes, too
            self.members.learn(Papers(revoked_nodes=await self.offload(self.stored.revoked_nodes)))
        except StorageError as error:
            _LOG.warning("The stored admissions of the run cannot be read: %s", error)
        self._is_restored = True

    def _made_here(self) -> Papers:
        return Papers(revocations=self.stored.issued().revocations, revoked_nodes=self.signed.read())


async def observe_network(peer_network: PeerNetwork, publisher: Publisher) -> None:
    """Publish the state of the network until cancelled, from the start of a node to its end."""
    began = anyio.current_time()
    while True:
        sight = peer_network.look()
        publisher.change(network=sight.network, peers=sight.peers, swarm=sight.swarm)
        is_wanted = peer_network.networking.is_wanted
        if is_wanted and not sight.network.addresses and anyio.current_time() - began < OPENING_SECONDS:
            seconds = FIRST_PUBLISH_SECONDS
        elif is_wanted and publisher.node_state is not NodeState.PAUSED:
            seconds = PUBLISH_SECONDS
        else:
            seconds = RESTING_SECONDS
        await sleep_to_tick(seconds)


def addresses_of(network: Network | None) -> tuple[str, ...]:
    """Multiaddrs at which others may reach this node now, the most widely reachable first."""
    return () if network is None else network.transport.addresses()


def join_line(run: RunOffer, addresses: Sequence[str], genesis: str, organiser: str = "") -> str:
    """Command that others type to join the run; "" while they cannot."""
    if not addresses:
        return ""
    data = f" --genesis {genesis}" if genesis else ""  # without it the nodes of the run send the data
    if run.parameters.admission == "friends":
        return f"neuroshard --invite LINK{data}"  # of `neuroshard run invite`
    if run.parameters.admission == "admitted":
        data = (
            data if genesis.startswith(("https://", "http://")) else ""
        )  # the nodes of the run have those of a folder
        return f"neuroshard --run {run.run_id} --organiser {organiser or 'URL'}{data}"
    return f"neuroshard --run {run.run_id} --peer {addresses[0]}{data}"
