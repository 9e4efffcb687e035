"""Downloads data and the state of the probable stage while this node waits for its place in an organised run.

The organiser signs a right for the first nodes of its queue, and members let such a node read. The later start finds
everything where it looks for it: data in the cache, and the state as the newest checkpoint of its stage.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import anyio
import anyio.to_thread
from msgspec import Struct

from neuroshard.config.settings import Settings
from neuroshard.config.state_file import StateFile
from neuroshard.data.feed import DataFeed
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.source import FolderSource, NodesOnly, ShardSource, open_source
from neuroshard.errors import DataError, NeuroShardError, StorageError
from neuroshard.exchange.data_files import DataClient, DataStore
from neuroshard.host.computer import default_threads
from neuroshard.identity.admissions import DownloadRight, read_download_right
from neuroshard.membership.connectivity import DialledRequests
from neuroshard.membership.handshake import ReaderClient
from neuroshard.membership.swarm_view import Membership
from neuroshard.model.architecture import plan_of
from neuroshard.network.tasks import accompanied
from neuroshard.node.data_sharing import holders
from neuroshard.node.joining import Joining
from neuroshard.node.own_stages import kept_stages
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.node.stage import StageHome
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.runs.data_opening import largest_tokenizer_bytes, open_joined_data
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stored_passes import StoredPasses
from neuroshard.runs.stored_runs import LocalRun
from neuroshard.state.checkpoint_store import stage_folder
from neuroshard.state.download import ReceivingOptions
from neuroshard.status.data import ShardUse
from neuroshard.types import LayerRange

_LOG = logging.getLogger(__name__)

HEAR_SECONDS = 0.1
LOOK_SECONDS = 5.0
AGAIN_SECONDS = 30.0  # between two looks whether the state is outdated
NOTE_FILE = "queued.json"  # in the folder of the run's stages


class QueuedStage(Struct, frozen=True):
    """The stage whose state this node downloaded for its place in the queue, and has not trained."""

    layers: LayerRange


@dataclass
class QueuedDownload:
    """Downloads for one place in the queue of an organiser, once per start."""

    settings: Settings
    peer_network: PeerNetwork
    data_store: DataStore
    tier_mb: int
    _random: Random = field(default_factory=Random)  # order of peers to ask, no secret
    _shown: dict[str, str] = field(default_factory=dict[str, str])  # sentences about the download, by subject

    async def run(self) -> None:
        """Download as soon as the organiser allows it, until cancelled. A failure is only shown: the wait continues."""
        place = self.peer_network.finder.place
        while (offer := self.peer_network.finder.queued_for) is None or self._right(offer) is None:
            await place.changed.wait()
        swarm = self._swarm(offer)
        reader_client = ReaderClient(
            self.peer_network.identity, offer.run_id, swarm.membership, self.peer_network.now, self._shown_right
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader_client.run, self.peer_network.networking)
            tasks.start_soon(self._learn_versions, swarm)
            tasks.start_soon(self._fetch_data, offer, swarm.membership)
            await self._keep_states(offer, swarm)

    def _shown_right(self) -> bytes | None:
        waiting = self.peer_network.finder.place.waiting
        return None if waiting is None else waiting.right

    def _right(self, offer: RunOffer) -> DownloadRight | None:
        """The present right of this node; None without one."""
        data, authorities = self._shown_right(), tuple(map(bytes.fromhex, offer.parameters.authority))
        if data is None:
            return None
        try:
            right = read_download_right(data, offer.run_id, authorities, self.peer_network.now())
        except DataError as error:
            _LOG.info("The right to download is not used: %s", error)
            return None
        is_usable = right.layers is None or right.layers in plan_of(offer.parameters)
        return right if is_usable and right.node == self.peer_network.identity.node_id else None

    def _swarm(self, offer: RunOffer) -> StageSwarm:
        """The stages of the run as a reader sees them. It serves nothing."""
        network, identity = self.peer_network, self.peer_network.identity
        own = StoredPasses(self.settings.data_dir, offer).own(identity.wallet_id)
        foundations = network.exchange.store.foundations(offer)
        versions = RunVersions(offer, foundations, None if own is None else own.tip, None)
        return StageSwarm(identity, versions, Membership(identity.node_id, identity.wallet_id), network.networking)

    async def _learn_versions(self, swarm: StageSwarm) -> None:
        """Take up the versions and foundations that the finder fetches meanwhile."""
        store, versions = self.peer_network.exchange.store, swarm.versions
        while True:
            versions.learn(store.find(swarm.run_id) or versions.offer)
            versions.learn_foundations(store.foundations(versions.offer))
            await anyio.sleep(LOOK_SECONDS)

    def _show(self, subject: str, sentence: str) -> None:
        """Show how the download of a subject stands, next to the others."""
        self._shown[subject] = sentence
        self.peer_network.finder.place.show(" ".join(self._shown.values()))

    async def _fetch_data(self, offer: RunOffer, membership: Membership) -> None:
        """Fetch the tokenizer, and the first shard if this node will drive."""
        while self.settings.genesis is None and not membership.view.members:  # a failed file is tried less often
            await anyio.sleep(HEAR_SECONDS)
        try:
            await self._fetch_files(offer, membership)
        except NeuroShardError as error:
            self._show("data", f"The data are downloaded after the admission: {error}")

    async def _fetch_files(self, offer: RunOffer, membership: Membership) -> None:
        network, location, cache = self.peer_network, self.settings.genesis, self.data_store.cache
        source: ShardSource = NodesOnly() if location is None else open_source(location)
        if location is not None and not isinstance(source, FolderSource):
            source = network.metered(source)
        asking = DialledRequests(network.networking, membership)
        fetcher = Fetcher(source, others=DataClient(offer.run_id, asking, partial(holders, membership), self._random))
        try:
            run, most = LocalRun.of(offer, is_joined=True), largest_tokenizer_bytes(self.tier_mb)
            data = await open_joined_data(fetcher, self.data_store.store, run, most)
            self._show("data", "The tokenizer is here.")
            right = self._right(offer)
            if right is None or (right.layers is not None and right.layers.start > 0):
                return
            feed = DataFeed(
                data.genesis,
                cache,
                run_id=offer.data_run_id,
                node_id=network.identity.node_id,
                sequence_length=run.parameters.architecture.sequence_length,
                vocabulary_size=run.parameters.genesis.next_merge_id,
            )
            await accompanied(partial(_first_shard, feed), feed.run)
            self._show("data", "The tokenizer and the first shard are here.")
        finally:
            with anyio.CancelScope(shield=True):
                await fetcher.source.aclose()

    async def _keep_states(self, offer: RunOffer, swarm: StageSwarm) -> None:
        """Download the state of the probable stage, and that of another one if the organiser changes its mind."""
        place = self.peer_network.finder.place
        while True:
            right = self._right(offer)
            if right is None or right.layers is None:
                await place.changed.wait()
            else:
                is_other = partial(self._is_other, offer, right.layers)
                await accompanied(
                    partial(place.changed.until, is_other), partial(self._keep, offer, swarm, right.layers)
                )

    def _is_other(self, offer: RunOffer, layers: LayerRange) -> bool:
        right = self._right(offer)
        return right is not None and right.layers != layers

    async def _keep(self, offer: RunOffer, swarm: StageSwarm, layers: LayerRange) -> None:
        """Download the state of a stage. While the admission is near, download it again if it is outdated."""
        place, has_state = self.peer_network.finder.place, False
        try:
            if not await anyio.to_thread.run_sync(self._make_room, offer, layers):
                return
        except StorageError as error:
            self._show("state", f"The state is not downloaded before the admission: {error}")
            return
        while True:
            is_near = place.waiting is not None and place.waiting.is_near
            if not has_state or is_near:
                try:
                    has_state = await self._prepared(offer, swarm, layers)
                except NeuroShardError as error:
                    self._show("state", f"The state is not downloaded before the admission: {error}")
            await anyio.sleep(AGAIN_SECONDS if has_state else LOOK_SECONDS)

    async def _prepared(self, offer: RunOffer, swarm: StageSwarm, layers: LayerRange) -> bool:
        """Whether a state is here that this node can continue from. Raises StorageError."""
        if swarm.versions.founding_of(list(swarm.plan).index(layers)) is None:
            return False  # nothing proves a state yet
        threads = self.settings.cpu_threads or default_threads()
        run = LocalRun.of(offer, is_joined=True)
        home = StageHome.of(self.settings, self.peer_network.identity, run, layers=layers, threads=threads)
        options = ReceivingOptions(chunks_at_once=1)  # members answer few requests of readers at a time
        show = partial(self._show, "state")
        joining = Joining(swarm, home.identity, home.store, show, may_catch_up=True, options=options)
        if not await joining.prepare():
            return False
        newest = (await anyio.to_thread.run_sync(home.store.generations))[0]
        show(f"The state of layers {layers.start + 1}-{layers.stop} is here, at outer step {newest.outer_step:,}.")
        return True

    def _make_room(self, offer: RunOffer, layers: LayerRange) -> bool:
        """Note the stage to download, and remove the one before. False if this node continues with stages of its own.

        A start continues with the stages of its checkpoints, so a note separates a downloaded one from a trained one.
        """
        note = self._note(offer)
        if self._noted_other(offer, layers) is None and note.read() is None:
            run = LocalRun.of(offer, is_joined=True)
            if kept_stages(self.settings.data_dir, self.peer_network.identity, run) is not None:
                return False
        note.write(QueuedStage(layers))
        return True

    def settle(self, offer: RunOffer, admitted: LayerRange | None) -> None:
        """Keep the downloaded state if it is that of these layers, as a state of this node, and remove another one.

        Blocks on the disk. Raises StorageError.
        """
        self._noted_other(offer, admitted)
        self._note(offer).remove()

    def _noted_other(self, offer: RunOffer, layers: LayerRange | None) -> LayerRange | None:
        """Remove the downloaded state unless it is that of these layers; return the layers that were removed."""
        noted = self._note(offer).read()
        if noted is None or noted.layers == layers:
            return None
        shutil.rmtree(self._folder(offer, noted.layers), ignore_errors=True)
        return noted.layers

    def _folder(self, offer: RunOffer, layers: LayerRange) -> Path:
        return stage_folder(self.settings.data_dir, self.peer_network.identity.wallet_id, offer.run_id, layers)

    def _note(self, offer: RunOffer) -> StateFile[QueuedStage]:
        path = self._folder(offer, plan_of(offer.parameters)[0]).parent / NOTE_FILE
        consequence = "a state that was downloaded while this node waited counts as its own"
        return StateFile(path, QueuedStage, "set_aside", consequence, data_dir=self.settings.data_dir)


async def _first_shard(feed: DataFeed) -> None:
    """Wait until the feed's first shard is here."""
    while not any(shard.use is ShardUse.IN_USE and shard.bytes is not None for shard in feed.status().shards):
        await anyio.sleep(1.0)
