"""Finds the run to serve: the owner's choice, the data set's default, one on the local network, or a local run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from socket import gethostname
from typing import TypeAlias

import anyio

from neuroshard.config.settings import Settings
from neuroshard.data.data_set import Genesis
from neuroshard.data.fetcher import Fetcher
from neuroshard.errors import DataError, UsageError
from neuroshard.identity import NodeIdentity
from neuroshard.identity.invitations import MAX_LABEL_CHARACTERS, Invitation, InvitationError
from neuroshard.identity.wallet import key_words
from neuroshard.membership.connectivity import Networking
from neuroshard.network.tasks import accompanied
from neuroshard.runs.admission_keeper import check_entry, keeper_of
from neuroshard.runs.chosen_run import RunChoice
from neuroshard.runs.default_run import DefaultRun, default_run_of
from neuroshard.runs.exchange import RunExchange
from neuroshard.runs.knocking import Knock, knock_at_all
from neuroshard.runs.offer import RunOffer, last_successor
from neuroshard.runs.organiser_client import QueuePlace, fetch_offer, organiser_url
from neuroshard.runs.stored_passes import StoredPasses, entry_pass
from neuroshard.types import RunId

NEARBY_SECONDS = 3.0  # how long a start without a run listens for others on the local network
ADMISSION_SECONDS = 5.0  # between two looks for a pass while a run does not admit this wallet
PASS_SECONDS = 20.0  # how long peers are asked for a pass that another node of this wallet has shown
KEEP_UP_SECONDS = 60.0  # between two such questions of a node in the queue of an organiser
DEFAULT_RUN_SECONDS = 20.0  # how long the seeds of a default run are asked for its parameters
HOW_TO_JOIN = "To join one, start with --invite LINK. Its owner makes the link with `neuroshard run invite`."
HOW_TO_BEGIN = (
    "Join a run with --invite LINK, train on your own files with --text FOLDER, "
    "or name a data set with --genesis PLACE."
)
LOOK_SECONDS = 10.0  # between two reports while a node without run and data looks for a run nearby
OF_ITS_OWN = "so this computer trains a run of its own."

ReportProgress: TypeAlias = Callable[[str, float | None], None]
"""Takes the reason for the wait, in words, and its progress, 0..1, if that is known."""


class RunOrigin(StrEnum):
    """Where a run to join was found."""

    NAMED = "named"  # with --run
    INVITED = "invited"  # with --invite
    DEFAULT = "default"  # run.json of the data set
    NEARBY = "nearby"  # from a peer on the local network or one given with --peer
    SUCCESSOR = "successor"  # the owner continues with it the run that was named or chosen


@dataclass(frozen=True)
class FoundRun:
    """A run to join and where it was found."""

    offer: RunOffer
    origin: RunOrigin

    @property
    def explanation(self) -> str:
        """The reason why this node serves the run, as one sentence for its owner."""
        owner = f" of wallet {self.offer.owner[:8]}"
        match self.origin:
            case RunOrigin.NAMED:
                return f"This computer serves the run{owner} that was named with --run."
            case RunOrigin.INVITED:
                return f"This computer serves the run{owner} to which it was invited."
            case RunOrigin.DEFAULT:
                return f"This computer serves the default run{owner} of its data set."
            case RunOrigin.SUCCESSOR:
                return f"This computer serves the run{owner} with which the owner continues an earlier one."
            case RunOrigin.NEARBY:
                return f"No run was named, so this computer serves the run{owner} that a nearby node offered."


@dataclass(frozen=True)
class NoRun:
    """The result of a search that found no run to join: the node trains its own."""

    explanation: str  # why, and how to join one instead


OWN_TEXT = NoRun("This computer trains a model of its own on your text.")
A_DEMONSTRATION = NoRun("A demonstration: this computer trains a small model on embedded text.")


def not_joinable(found: FoundRun, reason: str) -> NoRun:
    """Explain that a run was found but its data are not available to this computer."""
    return NoRun(f"The run {found.offer.run_id[:16]} was found but cannot be joined, {OF_ITS_OWN} {reason}")


class RunFinder:
    """Finds a run to join: the one named with --run, the data set's default, or one that a peer shares."""

    def __init__(
        self,
        settings: Settings,
        exchange: RunExchange,
        networking: Networking,
        identity: NodeIdentity,
        invitation: Invitation | None,
        *,
        may_wait: bool = False,
        holds_layers: bool = True,
    ) -> None:
        """With `may_wait`, a run that does not admit this wallet is waited for, instead of an error."""
        self._may_wait = may_wait
        self._holds_layers = holds_layers
        self._settings = settings
        self._identity = identity
        self.invitation = invitation
        self._exchange = exchange
        self._networking = networking
        self.place = QueuePlace()  # of this node, while it waits for its admission to an organised run
        self.queued_for: RunOffer | None = None  # the run of that place

    async def first(self, report: Callable[[str], None]) -> FoundRun:
        """Wait for the run that was named or chosen, or without one for any run that a peer shares.

        Raises DataError if there is neither a run nor data, and errors like `named`.
        """
        if self._settings.run is not None:
            return await self.named(RunId(self._settings.run), report)
        if not self._networking.meets_strangers:
            raise DataError("This computer has no run to join and no text to train on.", HOW_TO_BEGIN)
        while True:
            report(f"Looking for a run on the local network. {HOW_TO_BEGIN}")
            offer = await self._exchange.hear_of_any(self._networking, LOOK_SECONDS)
            if offer is not None:
                return await self.named(offer.run_id, report, RunOrigin.NEARBY)

    async def named(
        self, run_id: RunId, report: Callable[[str], None], origin: RunOrigin = RunOrigin.NAMED
    ) -> FoundRun:
        """Wait for the parameters of a run, or of the one with which its owner continues it, if that is known here.

        Raises UsageError if the run is not stored here and the network is off, or if the organiser of the run refuses
        this node; InvitationError if it is a run of friends and this wallet has no pass; and NetworkRefusedError if the
        organiser does not answer.
        """
        offer = self._exchange.store.find(run_id)
        if offer is None:
            if not self._networking.is_wanted:
                raise UsageError(
                    f"Run {run_id[:16]} is not known on this computer, and the network is off.",
                    "Leave out --no-network, or --run.",
                )
            offer = await self.fetch(run_id, report)
        if self._settings.follow_successor:
            offer = last_successor(offer, self._exchange.store.find)
        origin, run_id = (origin, run_id) if offer.run_id == run_id else (RunOrigin.SUCCESSOR, offer.run_id)
        await self._admitted(offer, report, may_wait=self._may_wait or origin is RunOrigin.NEARBY)
        first = offer
        keeper = keeper_of(
            self._settings,
            self._identity,
            lambda: self._exchange.store.find(first.run_id) or first,
            self._exchange.now,
            self.invitation,
            networking=self._networking,
            holds_layers=self._holds_layers,
        )
        if keeper is not None:
            self._networking.book.add(offer.parameters.seeds, is_given=True)
        if keeper is not None and not keeper.restore(offer, self._identity):
            report(f"Asking the organiser of run {run_id[:16]} for a place.")
            self.queued_for = offer
            await accompanied(partial(keeper.admit, report, self.place), partial(self._keep_up, run_id))
            offer = self._exchange.store.find(run_id) or offer
        is_invited = self.invitation is not None and self.invitation.run_id == run_id
        return FoundRun(offer, RunOrigin.INVITED if is_invited else origin)

    async def _keep_up(self, run_id: RunId) -> None:
        """Fetch the newest version and the foundations of a run while this node waits for a place, until cancelled.

        Members send these to any node. For state and data, which cost their upload, a waiting node needs a right.
        """
        while True:
            if self._networking.is_wanted:
                await self._exchange.fetch_soon(run_id, self._networking, PASS_SECONDS)
            await anyio.sleep(KEEP_UP_SECONDS)

    async def fetch(self, run_id: RunId, report: Callable[[str], None]) -> RunOffer:
        """Wait until a node of a run, or its organiser if that is known, sends the signed run."""
        url = organiser_url(self._settings, run_id, self.invitation)
        if url is None:
            return await self._exchange.fetch(run_id, self._networking, report)
        found, is_found, trouble = list[RunOffer](), anyio.Event(), ""

        def note(sentence: str) -> None:
            nonlocal trouble
            trouble = sentence

        def report_both(sentence: str) -> None:
            report(f"{sentence} {trouble}".strip())

        async def ask_nodes() -> None:
            found.append(await self._exchange.fetch(run_id, self._networking, report_both))
            is_found.set()

        async def ask_organiser() -> None:
            found.append(self._exchange.store.keep(await fetch_offer(url, run_id, note)).offer)
            is_found.set()

        await accompanied(is_found.wait, ask_nodes, ask_organiser)
        return found[0]

    async def _admitted(self, offer: RunOffer, report: Callable[[str], None], *, may_wait: bool) -> None:
        """Enter a run, after asking its nodes for a pass that another node of this wallet has shown.

        With `may_wait` it waits as long as the run does not admit this wallet. Otherwise it raises InvitationError.
        """
        run_id, has_asked = offer.run_id, False
        while (refusal := self._refusal(offer)) is not None:
            is_hopeless = not self._networking.is_wanted or (not has_asked and run_id in self._exchange.shown_passes)
            if is_hopeless or (has_asked and not may_wait):
                raise refusal
            if has_asked:
                await self._knock(offer, refusal, report)
                await anyio.sleep(ADMISSION_SECONDS)
            else:
                report(f"Asking the nodes of run {run_id[:16]} for the pass of this wallet.")
            await self._exchange.fetch_soon(run_id, self._networking, PASS_SECONDS)
            has_asked = True

    async def _knock(self, offer: RunOffer, refusal: InvitationError, report: Callable[[str], None]) -> None:
        """Ask the owner of a run on the local network to let this wallet in, and report how it stands."""
        wallet = self._identity.delegation.grant.wallet_public_key
        knock = Knock(offer.run_id, wallet, gethostname()[:MAX_LABEL_CHARACTERS])
        answer = await knock_at_all(self._networking, knock, offer.initial.owner_public_key)
        match None if answer is None else answer.state:
            case "waiting":
                report(f"Waiting for the owner of the run, who sees {knock.name} with the words {key_words(wallet)}.")
            case "refused":
                report("The owner of the run did not let this computer in. Ask for an invitation.")
            case "full":
                report("Other computers wait for the owner of the run. This one asks again.")
            case "allowed" if answer is not None and answer.member_pass is not None:
                self._exchange.shown_passes[offer.run_id] = answer.member_pass
            case _:
                report(str(refusal))

    def _refusal(self, offer: RunOffer) -> InvitationError | None:
        try:
            self._enter(offer)
        except InvitationError as error:
            return error
        return None

    def _enter(self, offer: RunOffer) -> None:
        """Check that this wallet may take part, and store its pass. Raises InvitationError."""
        invitation, shown = self.invitation, self._exchange.shown_passes.get(offer.run_id)
        if invitation is not None and invitation.run_id != offer.run_id:
            invitation = None
        stored = StoredPasses(self._settings.data_dir, offer)
        entry_pass(offer, self._identity, stored, invitation, shown=shown, now=self._exchange.now())
        check_entry(self._settings, self._identity, offer, invitation)
        RunChoice(self._settings.data_dir).forget_code(offer.run_id)

    def _checked(self, found: FoundRun) -> FoundRun | NoRun:
        refusal = self._refusal(found.offer)
        return found if refusal is None else not_joinable(found, str(refusal))

    async def suggested(
        self,
        fetcher: Fetcher,
        genesis: Genesis,
        report: ReportProgress,
        otherwise: str = "this computer trains a run of its own",
    ) -> FoundRun | NoRun:
        """Find the data set's default run, or a run that a peer offers within a few seconds, or the reason for neither.

        `otherwise` says in the status what happens if none is found.
        """
        report("Asking the source of the data for their default run.", None)
        default = await default_run_of(fetcher, genesis.manifest.signing_key)
        offer = None if default is None else await self._default_offer(default, report, otherwise)
        if offer is not None:
            return self._checked(FoundRun(offer, RunOrigin.DEFAULT))
        if self._networking.meets_strangers:
            listening = partial(self._exchange.hear_of_any, self._networking, NEARBY_SECONDS)
            words = "Listening for a node nearby that shares a run"
            offer = await accompanied(listening, partial(self._count_down, words, NEARBY_SECONDS, report, otherwise))
            if offer is not None:
                return self._checked(FoundRun(offer, RunOrigin.NEARBY))
        return NoRun(self._why_none(default))

    async def _default_offer(self, default: DefaultRun, report: ReportProgress, otherwise: str) -> RunOffer | None:
        """Offer of the data set's default run; None if no peer sends it in time or its owner is not the one named."""
        self._networking.book.add(default.seeds, is_given=True)
        offer = self._exchange.store.find(default.run_id)
        if offer is None and self._networking.is_wanted:
            asking = partial(self._exchange.fetch_soon, default.run_id, self._networking, DEFAULT_RUN_SECONDS)
            words = f"Asking the network for the default run {default.run_id[:16]} of these data"
            counting = partial(self._count_down, words, DEFAULT_RUN_SECONDS, report, otherwise)
            offer = await accompanied(asking, counting)
        return offer if offer is not None and offer.initial.owner_public_key.hex() == default.owner_public_key else None

    async def _count_down(self, words: str, seconds: float, report: ReportProgress, otherwise: str) -> None:
        """Report every second the reason for the wait, the seconds left and the state of the network."""
        for left in range(round(seconds), 0, -1):
            network = self._networking.state()[1]
            report(f"{words}, for {left} s more; otherwise {otherwise}. {network}", 1 - left / seconds)
            await anyio.sleep(1)

    def _why_none(self, default: DefaultRun | None) -> str:
        if default is None:
            nearby = " and no node nearby reports one" if self._networking.meets_strangers else ""
            return f"These data name no default run{nearby}, {OF_ITS_OWN} {HOW_TO_JOIN}"
        if not self._networking.is_wanted:
            return (
                f"The network is off and the default run {default.run_id[:16]} of these data is not known here, "
                f"{OF_ITS_OWN} To join it, start without --no-network."
            )
        return (
            f"Nobody answered within {DEFAULT_RUN_SECONDS:g} s for the default run of these data, {OF_ITS_OWN} To join "
            f"the default run as soon as one of its nodes answers, start with --run {default.run_id}"
        )
