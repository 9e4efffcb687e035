"""Exchange of shards with nodes of the run, and the status of the data at the source and in the swarm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from random import Random

import anyio

from neuroshard.config.settings import Settings
from neuroshard.data.manifest import shard_of
from neuroshard.data.shard_assignment import copies_by_cell, covered_shard_count, has_shard
from neuroshard.data.shard_cache import ShardCache
from neuroshard.data.source_monitor import SourceMonitor
from neuroshard.data.storage import METADATA_FOLDER
from neuroshard.data.transfer import OpenedFile
from neuroshard.exchange.data_files import DATA, PARTS_AT_ONCE, REQUEST_LIMITS, DataClient, DataServer, DataStore
from neuroshard.membership.connectivity import DialledRequests
from neuroshard.membership.swarm_view import GlobalView, Membership
from neuroshard.messages import Frame
from neuroshard.network import Network, RequestRefusedError, ScoreReason
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.status.data import DataCoverage, DataStatus
from neuroshard.types import NodeId, ShardRange


def open_data_store(settings: Settings) -> DataStore:
    """Open the node's only data cache; its limit covers the descriptions of data sets too. Raises StorageError."""
    folder = settings.paths.data_cache
    store = folder / METADATA_FOLDER
    return DataStore(store, ShardCache(folder, limit_bytes=settings.max_storage * 1_000_000, descriptions=store))


@dataclass(frozen=True)
class ShardExchange:
    """Server and client of a run's shards."""

    server: DataServer
    client: DataClient


class DataSharing:
    """Sends shards to nodes of the run and fetches shards from them. It is idle until the run is known.

    For the fetcher it is an AlternativeSource.
    """

    def __init__(self, peer_network: PeerNetwork, data_store: DataStore, random: Random | None = None) -> None:
        self.data_store = data_store
        self._peer_network = peer_network
        self._random = random or Random()  # noqa: S311 - order of peers to ask, no secret
        self._exchange: ShardExchange | None = None

    @property
    def bytes_given(self) -> int:
        """Bytes sent to other nodes since the start."""
        return 0 if self._exchange is None else self._exchange.server.bytes_given

    @property
    def bytes_received(self) -> int:
        """Bytes received from other nodes since the start."""
        return 0 if self._exchange is None else self._exchange.client.bytes_received

    async def live(self, network: Network) -> None:
        """Answer requests for shards until cancelled."""
        network.transport.serve(DATA, self._give, REQUEST_LIMITS, max_concurrent=PARTS_AT_ONCE)
        network.gate.let_read(DATA)
        await anyio.sleep_forever()

    def may_have(self, name: str, address: str) -> bool:
        """Whether another node of the run may have the file, according to its report."""
        exchange = self._known()
        return exchange is not None and exchange.client.may_have(name, address)

    def open(self, name: str, address: str) -> AbstractAsyncContextManager[OpenedFile]:
        """Open a file at another node. Call it only if `may_have` is true."""
        exchange = self._known()
        if exchange is None:
            raise AssertionError("no node may have it")
        return exchange.client.open(name, address)

    async def _give(self, sender: NodeId, frame: Frame) -> Frame:
        exchange = self._known()
        if exchange is None:
            raise RequestRefusedError("This node has no run yet.")
        exchange.server.limit_upload(self._peer_network.upload.bytes_per_second)  # its owner may have changed it
        return await exchange.server.give(sender, frame)

    def _known(self) -> ShardExchange | None:
        peer_network, joined = self._peer_network, self._peer_network.joined
        if self._exchange is None and joined is not None:
            membership, run_id = joined.participant.membership, joined.run_id
            readers = None if joined.members is None else joined.members.readers
            server = DataServer(run_id, self.data_store.find, membership.knows, report=self._report, readers=readers)
            client = DataClient(
                run_id,
                DialledRequests(peer_network.networking, membership),
                lambda name: holders(membership, name),
                self._random,
                self._report,
            )
            self._exchange = ShardExchange(server, client)
        return self._exchange

    def _report(self, peer: NodeId, reason: ScoreReason) -> None:
        network = self._peer_network.networking.current
        if network is not None:
            network.reputation.report(peer, reason)


def holders(membership: Membership, name: str) -> list[NodeId]:
    """Nodes that may have a file: for a shard those that report it, for a metadata file every node of the run."""
    members = membership.view.members
    shard = shard_of(name)
    if shard is None:
        known = {*members, *membership.announcements}
        return sorted(known - {membership.node_id})
    return [
        node
        for node, member in members.items()
        if node != membership.node_id and has_shard(member.report.cached, shard)
    ]


COVERAGE_SECONDS = 2.0  # between two sums; the reports of a thousand nodes take some milliseconds to add up


class DataView:
    """Adds the state of the source and the swarm's coverage of shards to the data's status."""

    def __init__(
        self,
        watch: SourceMonitor,
        peer_network: PeerNetwork,
        total_shards: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch = watch
        self._peer_network = peer_network
        self._total_shards = total_shards
        self._clock = clock
        self._coverage: DataCoverage | None = None
        self._looked_at = float("-inf")

    def completed(self, data: DataStatus) -> DataStatus:
        """Return the status with refresh and coverage; coverage is computed at most every COVERAGE_SECONDS."""
        joined, now = self._peer_network.joined, self._clock()
        if joined is not None and now - self._looked_at >= COVERAGE_SECONDS:
            membership = joined.participant.membership
            self._coverage = coverage_of(membership.view, membership.node_id, data.shared, self._total_shards)
            self._looked_at = now
        return replace(data, refresh=self._watch.status, coverage=self._coverage)


def coverage_of(view: GlobalView, node_id: NodeId, own: Sequence[ShardRange], total_shards: int) -> DataCoverage:
    """Count the shards that the nodes of a run have. `own` are this node's now; the others' are in their reports."""
    others = (member.report.cached for node, member in view.members.items() if node != node_id)
    held = [ranges for ranges in (own, *others) if ranges]
    return DataCoverage(len(held), covered_shard_count(held, total_shards), copies_by_cell(held, total_shards))
