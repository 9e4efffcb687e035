"""Fills the archive of a stage: whole checkpoints at regular outer steps, each with the certificate of its state."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial

import anyio.to_thread
import msgspec

from neuroshard.consensus.chain import Chain
from neuroshard.consensus.stage_chain import StageChain, certified_states
from neuroshard.errors import DiskFullError, StorageError
from neuroshard.membership.stage_coverage import layers_text
from neuroshard.network.blocking import BlockingRunner
from neuroshard.state.checkpoint_store import CheckpointStore
from neuroshard.state.disk_space import used_bytes
from neuroshard.state.kept_states import KeptState, StageArchive, kept_states
from neuroshard.types import LayerRange
from neuroshard.waiting import sleep_to_tick

_LOG = logging.getLogger(__name__)

LOOK_SECONDS = 5.0  # a checkpoint stays for longer before newer ones replace it


@dataclass
class Archivist:
    """Looks at the checkpoints of one stage and keeps some of them for ever. Belongs to the event loop."""

    store: CheckpointStore
    layers: LayerRange
    every: int  # outer steps
    offload: BlockingRunner = anyio.to_thread.run_sync
    _trouble: str = field(default="", init=False)

    async def run(self, chain: StageChain) -> None:
        """Look every LOOK_SECONDS until cancelled."""
        while True:
            await sleep_to_tick(LOOK_SECONDS)
            known = chain.chain
            if known is not None:
                await self.offload(partial(self.look, known))

    def look(self, chain: Chain) -> None:
        """Archive the newest certified checkpoint, if it is due. A failure is reported once. Blocks."""
        archive, certified = StageArchive.of(self.store), certified_states(chain)
        newest = archive.newest()
        try:
            for kept in kept_states(self.store):
                state = certified.get((kept.generation.outer_step, kept.root))
                if state is None or kept.generation.outer_step // self.every <= newest // self.every:
                    continue
                self._ensure_room(kept.generation.bytes)
                encoded = msgspec.msgpack.encode(state.certificate)
                archive.keep(self.store, KeptState(kept.generation, kept.root, encoded, state.certified_at))
                self._trouble = ""
                _LOG.info(
                    "Layers %s of outer step %d are archived.", layers_text(self.layers), kept.generation.outer_step
                )
                return
        except StorageError as error:
            if error.message != self._trouble:
                _LOG.warning("Nothing is archived now: %s", error)
            self._trouble = error.message

    def _ensure_room(self, new_bytes: int) -> None:
        """Raise DiskFullError unless the owner's limit leaves room for the archive and for the next checkpoint."""
        limits = self.store.limits
        used = sum(map(used_bytes, limits.counted))
        if limits.all_bytes is not None and used + 2 * new_bytes > limits.all_bytes:
            limit = f"{limits.all_bytes / 1e6:,.0f} MB"
            raise DiskFullError(
                f"The archive of layers {layers_text(self.layers)} has no room within {limit}.",
                "Raise max_checkpoint_storage, or move folders of the archive away.",
            )
