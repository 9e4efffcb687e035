"""Which run this node serves: the one its owner named, the data set's default, one heard of nearby, or its own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from neuroshard.config.settings import Settings
from neuroshard.data.fetcher import Fetcher
from neuroshard.data.opening import Genesis
from neuroshard.errors import UsageError
from neuroshard.node.default_run import default_run_of
from neuroshard.node.networking import Networking
from neuroshard.node.run_exchange import RunExchange
from neuroshard.swarm.run_offer import RunOffer
from neuroshard.types import RunId

log = logging.getLogger(__name__)

NEARBY_SECONDS = 3.0  # how long a start without a run listens for others on the local network
DEFAULT_RUN_SECONDS = 20.0  # how long the seeds of a default run are asked for its parameters


class RunOrigin(StrEnum):
    """Why a node serves its run."""

    NAMED = "named"  # with --run
    DEFAULT = "default"  # run.json of the data set
    NEARBY = "nearby"  # a peer on the local network, or one given with --peer, told of it
    OWN = "own"
    DEMO = "demo"


@dataclass(frozen=True)
class FoundRun:
    """A run to join and where it was found."""

    offer: RunOffer
    origin: RunOrigin


class RunFinder:
    """Looks for a run to join."""

    def __init__(self, settings: Settings, exchange: RunExchange, networking: Networking) -> None:
        self._settings = settings
        self._exchange = exchange
        self._networking = networking

    async def named(self, tell: Callable[[str], None]) -> FoundRun | None:
        """The run given with --run, waiting until its parameters are known; None when none was given."""
        if self._settings.run is None:
            return None
        run_id = RunId(self._settings.run)
        offer = self._exchange.shelf.find(run_id)
        if offer is None:
            if not self._networking.is_wanted:
                raise UsageError(
                    f"Run {run_id[:16]} is not known on this computer, and the network is off.",
                    "Leave out --no-network, or --run.",
                )
            offer = await self._exchange.fetch(run_id, self._networking, tell)
        return FoundRun(offer, RunOrigin.NAMED)

    async def suggested(self, fetcher: Fetcher, genesis: Genesis) -> FoundRun | None:
        """The data set's default run, else one that peers tell of within seconds; None when there is neither."""
        default = await default_run_of(fetcher, genesis.manifest.signing_key)
        if default is not None:
            self._networking.book.add(default.seeds, is_given=True)
            offer = self._exchange.shelf.find(default.run_id)
            if offer is None and self._networking.is_wanted:
                offer = await self._exchange.fetch_soon(default.run_id, self._networking, DEFAULT_RUN_SECONDS)
            if offer is not None and offer.initial.owner_public_key == default.owner_public_key:
                return FoundRun(offer, RunOrigin.DEFAULT)
            log.warning("Nobody answers for the default run %s of this data set.", default.run_id[:16])
        if self._networking.meets_strangers:
            offer = await self._exchange.hear_of_any(self._networking, NEARBY_SECONDS)
            if offer is not None:
                return FoundRun(offer, RunOrigin.NEARBY)
        return None


def explanation(origin: RunOrigin, offer: RunOffer | None) -> str:
    """Why this node serves its run, in one sentence."""
    owner = "" if offer is None else f" of wallet {offer.owner}"
    match origin:
        case RunOrigin.DEMO:
            return "A demonstration: this computer trains a small model on embedded text."
        case RunOrigin.OWN:
            return "No run to join is known, so this computer trains a run of its own."
        case RunOrigin.NAMED:
            return f"This computer serves the run{owner} that was named with --run."
        case RunOrigin.DEFAULT:
            return f"This computer serves the default run{owner} of its data set."
        case RunOrigin.NEARBY:
            return f"No run was named, so this computer serves the run{owner} that a node nearby told of."
