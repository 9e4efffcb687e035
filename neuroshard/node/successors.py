"""Follows the owner of a run to its successor: the run that continues it from an earlier state.

The node continues its run until it has all it needs for the next one: the parameters, signed by the same owner as a
branch of this run, and a pass or an admission. Then it ends its round and starts again. `RunFinder` serves the
successor from then on, whatever run the owner of this computer has named.
"""

from __future__ import annotations

import logging

import anyio

from neuroshard.config.settings import Settings
from neuroshard.errors import ConflictError, NeuroShardError
from neuroshard.node.peer_network import PeerNetwork
from neuroshard.node.process import StopRequest
from neuroshard.runs.offer import RunOffer, continues
from neuroshard.status.board import Publisher
from neuroshard.types import RunId
from neuroshard.waiting import sleep_to_tick

_LOG = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
ANSWER_SECONDS = 20.0  # for a peer with the parameters of the successor
AGAIN_SECONDS = 30.0  # after the successor was not found, or did not admit this node
ENTRY_SECONDS = 30.0  # for the entry into the chain: then the owner's signature is enough, because a run may be stuck
ROUND_SECONDS = 90.0  # for both: a round whose voting nodes are gone does not end


class SuccessorFollower:
    """Belongs to the event loop."""

    def __init__(self, settings: Settings, network: PeerNetwork, stop: StopRequest, publisher: Publisher) -> None:
        self._settings = settings
        self._network = network
        self._stop = stop
        self._publisher = publisher

    async def run(self) -> None:
        """Wait for a successor of the run that this node serves, and follow it. Ends never: the node starts again."""
        offer = await self._named()
        successor, since = RunId(offer.parameters.successor), anyio.current_time()
        words = f"The owner continues this run as run {successor[:16]}."
        if not self._settings.follow_successor:
            self._publisher.warn(f"{words} This node stays, because follow_successor is off.")
            await anyio.sleep_forever()
        self._publisher.warn(f"{words} This node follows when it is admitted there.")
        await self._until_admitted(successor)
        await self._until_round_ends(offer.parameters.version, since)
        try:
            self._stop.ask_restart(f"the owner continues the run as run {successor[:16]}")
        except ConflictError:
            self._publisher.warn(f"{words} Start this node again, so that it follows.")
        await anyio.sleep_forever()

    async def _named(self) -> RunOffer:
        """The run that this node serves, when it has a successor."""
        while True:
            followed = self._network.exchange.followed
            if followed is not None and followed.offer.parameters.successor:
                return followed.offer
            await sleep_to_tick(LOOK_SECONDS)

    async def _until_admitted(self, successor: RunId) -> None:
        exchange, finder = self._network.exchange, self._network.finder
        reason = ""
        while True:
            before, said = exchange.followed, ""
            offer = exchange.store.find(successor) or await exchange.fetch_soon(
                successor, self._network.networking, ANSWER_SECONDS
            )
            try:
                if offer is None:
                    said = "No peer sends it yet."
                elif before is None or not continues(offer, before.offer):
                    said = "It is not a branch of this run by the same owner, so this node does not follow."
                else:
                    await finder.named(successor, lambda _reason: None)
                    return
            except NeuroShardError as error:
                said = str(error)
            if said != reason:
                _LOG.warning("Run %s continues this one, but this node waits: %s", successor[:16], said)
                reason = said
            await anyio.sleep(AGAIN_SECONDS)

    async def _until_round_ends(self, version: int, since: float) -> None:
        """Wait until the chain has the version with the successor and no round runs, both for a limited time."""
        while True:
            joined, waited = self._network.joined, anyio.current_time() - since
            if joined is None or waited > ROUND_SECONDS:
                return
            if not joined.in_round and (joined.has_certified(version) or waited > ENTRY_SECONDS):
                return
            await sleep_to_tick(LOOK_SECONDS)
