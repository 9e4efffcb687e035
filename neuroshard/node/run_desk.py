"""Commands about runs and their members: invite, revoke, name a deputy, and join another run after a checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread

from neuroshard.config.loading import source_name
from neuroshard.errors import ConflictError, NeuroShardError, UsageError
from neuroshard.host.live_settings import Configuration
from neuroshard.identity import Wallet
from neuroshard.identity.invitations import (
    LINK,
    InvitationTerms,
    InvitedPlaces,
    InvitedTip,
    to_code,
)
from neuroshard.identity.wallet import key_words, wallet_id_of
from neuroshard.network.blocking import BlockingRunner
from neuroshard.network.lan_runs import WatchedLanRuns
from neuroshard.network.mdns import RunNotice
from neuroshard.node.invited_tip import verified_tip
from neuroshard.node.peer_network import PAPERS_SECONDS, PeerNetwork, addresses_of
from neuroshard.node.process import StopRequest
from neuroshard.node.successors import SuccessorFollower
from neuroshard.runs.admission_keeper import organiser_to_name
from neuroshard.runs.chosen_run import ChosenRun, RunChoice
from neuroshard.runs.foundations import StoredFoundations
from neuroshard.runs.invitation_making import invited_places, qr_rows
from neuroshard.runs.invited_settings import read_invitation_text
from neuroshard.runs.offer import RunOffer
from neuroshard.runs.stored_passes import KnownInvitation, StoredPasses
from neuroshard.status.board import (
    AnswerKnock,
    CommandResult,
    Invite,
    JoinRun,
    ListMembers,
    NameDeputy,
    Publisher,
    RevokeInvitation,
    RunCommand,
    StatusBoard,
)
from neuroshard.types import DAY_SECONDS, JsonValue, WalletId
from neuroshard.waiting import sleep_to_tick

_LOG = logging.getLogger(__name__)

PATIENCE_SECONDS = 30.0  # from the first sight of a wallet that is one too many to the owner's word
RETRY_SECONDS = 600.0  # if the word cannot be stored


class RunDesk:
    """Answers commands about runs. The files are read and written in a worker thread.

    One command at a time, so that two invitations that are made at once get labels of their own.
    """

    def __init__(
        self,
        configuration: Configuration,
        wallet: Wallet,
        peer_network: PeerNetwork,
        board: StatusBoard,
        stop: StopRequest,
        *,
        is_demo: bool,
        publisher: Publisher,
        nearby: WatchedLanRuns | None = None,
    ) -> None:
        """`nearby` are the runs of the local network; None: it is not searched."""
        self._nearby = nearby
        self._publisher = publisher
        self._asked: dict[bytes, str] = {}  # questions to the owner that are shown, by wallet
        self._configuration = configuration
        self._wallet = wallet
        self._peer_network = peer_network
        self._board = board
        self._stop = stop
        self._is_demo = is_demo
        self._carrying_out = anyio.Lock()

    @property
    def _data_dir(self) -> Path:
        return self._configuration.settings.data_dir

    async def carry_out(self, command: RunCommand) -> CommandResult:
        """Carry out one command. Raises UsageError, ConflictError, InvitationError or StorageError."""
        match command:
            case ListMembers():
                if self._nearby is not None:
                    self._nearby.look()
                work: Callable[[], CommandResult] = self._list
            case Invite():
                work = partial(self._invite, command)
            case RevokeInvitation(named):
                work = partial(self._revoke, named)
            case NameDeputy(wallet):
                work = partial(self._name_deputy, wallet)
            case AnswerKnock():
                work = partial(self._answer_knock, command)
            case JoinRun():
                work = partial(self._join, command)
        async with self._carrying_out:
            result = await anyio.to_thread.run_sync(work)
        self.show_knocks()
        if isinstance(command, JoinRun):
            self._stop.ask_restart("joining another run")
        return result

    async def run(self) -> None:
        """Show the owner who asks to join, settle who has the last place of an invitation, and follow a successor."""
        settings, network = self._configuration.settings, self._peer_network
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(SuccessorFollower(settings, network, self._stop, self._publisher).run)
            tasks.start_soon(settle_places, self._peer_network, self._wallet, self._data_dir)
            if self._nearby is not None:
                tasks.start_soon(self._nearby.run)
            while True:
                await self._peer_network.knocked.wait()
                self.show_knocks()

    def show_knocks(self) -> None:
        """Show a question to the owner for each computer that waits at the door. Runs on the event loop."""
        door = self._peer_network.door
        waiting = {} if door is None else {key: one.sentence for key, one in door.knocks.waiting.items()}
        for gone in self._asked.keys() - waiting.keys():
            self._publisher.end_warning(self._asked[gone])
        self._publisher.warn(*(waiting[key] for key in waiting.keys() - self._asked.keys()))
        self._asked = waiting

    def _answer_knock(self, command: AnswerKnock) -> CommandResult:
        door, offer = self._peer_network.door, self._offer()
        # The event loop takes knocks at the same time, so only it may read and change the list.
        found = None if door is None else anyio.from_thread.run_sync(door.knocks.find, command.wallet)
        if door is None or found is None:
            raise UsageError("This computer no longer asks to join.", "Ask again on that computer.")
        if not command.is_allowed:
            anyio.from_thread.run_sync(door.knocks.answer, found.wallet, None)
            return self._result(f"{found.name or 'The computer'} was refused.")
        stored, now = StoredPasses(self._data_dir, offer), time.time()
        label = _free_label(found.name[:24] or "computer", stored)
        terms = InvitationTerms(now + DAY_SECONDS, 1, label, tip=self._tip(offer))
        invitation = stored.issue(self._wallet, terms, InvitedPlaces(""))
        anyio.from_thread.run_sync(door.knocks.answer, found.wallet, invitation.pass_for(found.wallet, now))
        return self._result(f"{found.name or 'The computer'} may join now.")

    def _offer(self) -> RunOffer:
        """The run that this node shares with others. Raises UsageError."""
        followed = self._peer_network.exchange.followed
        if followed is None or self._is_demo:
            raise UsageError("This computer trains alone.", "Join a run, or make one with `neuroshard run create`.")
        return followed.offer

    def _list(self) -> CommandResult:
        known = RunChoice(self._data_dir).read()
        followed = self._peer_network.exchange.followed
        now = None if followed is None else followed.offer.run_id
        runs: list[JsonValue] = [
            {"run_id": run.run, "name": run.name, "is_current": run.run == now} for run in known.runs
        ]
        door = self._peer_network.door
        knocks: list[JsonValue] = [
            {"wallet_id": wallet_id_of(one.wallet), "name": one.name, "words": key_words(one.wallet)}
            for one in (() if door is None else tuple(door.knocks.waiting.values()))
        ]
        nearby = None if self._nearby is None else [_nearby_row(one) for one in self._nearby.current if one.run != now]
        details: dict[str, JsonValue] = {"runs": runs, "run": None, "knocks": knocks, "nearby": nearby}
        if followed is not None and not self._is_demo and followed.offer.parameters.admission != "strangers":
            details["run"] = self._members(followed.offer)
        return self._result("", details)

    def _members(self, offer: RunOffer) -> dict[str, JsonValue]:
        stored = StoredPasses(self._data_dir, offer)
        own, passes = stored.own(self._wallet.wallet_id), stored.register().passes()
        is_owner = offer.owner == self._wallet.wallet_id
        return {
            "run_id": offer.run_id,
            "name": offer.parameters.name,
            "is_owner": is_owner,
            "has_deputies": offer.parameters.admission == "friends",
            "may_invite": is_owner or (own is not None and own.secret is not None),
            "deputies": [wallet_id_of(key) for key in StoredFoundations(self._data_dir).read(offer).deputies],
            "invitations": [_row(one) for one in stored.invitations(time.time())],
            "members": [
                {
                    "wallet_id": member.wallet_id,
                    "label": member.label,
                    "words": key_words(member.statement.wallet),
                }
                for member in passes
            ],
        }

    def _invite(self, command: Invite) -> CommandResult:
        offer, stored = self._offer(), StoredPasses(self._data_dir, self._offer())
        if offer.parameters.admission == "strangers":
            raise UsageError("Any node may join this run: it needs no invitations.", "Give others the run id.")
        peers = addresses_of(self._peer_network.networking.current) or offer.parameters.seeds
        if not peers:
            raise UsageError(
                "This node does not yet have an address that others can reach.", "Try again in a few seconds."
            )
        label = command.label or _free_label("invitation", stored)
        not_after, tip = time.time() + command.days * DAY_SECONDS, self._tip(offer)
        terms = InvitationTerms(not_after, command.uses, label, command.may_invite, tip)
        settings = self._configuration.settings
        places = invited_places(offer.parameters, peers, settings.genesis, organiser_to_name(settings, offer))
        link = LINK + to_code(stored.issue(self._wallet, terms, places))
        details: dict[str, JsonValue] = {"link": link, "label": label, "qr": list(qr_rows(link))}
        return self._result("The invitation is made. Send it privately: anyone with it can join.", details)

    def _tip(self, offer: RunOffer) -> InvitedTip | None:
        return verified_tip(self._data_dir, offer, self._wallet.wallet_id)

    def _revoke(self, named: str) -> CommandResult:
        label = StoredPasses(self._data_dir, self._offer()).revoke(self._wallet, named)
        return self._result(f"The invitation {label} is revoked. Other members are informed within a minute.")

    def _name_deputy(self, wallet: str) -> CommandResult:
        offer, stored = self._offer(), StoredFoundations(self._data_dir)
        member = StoredPasses(self._data_dir, offer).member(wallet)
        stored.name_deputy(offer, self._wallet, member.statement.wallet)
        return self._result(f"{member.label} is a deputy now. Members that are online learn it within seconds.")

    def _join(self, command: JoinRun) -> CommandResult:
        if self._is_demo:
            raise ConflictError("This is the demo.", "Stop it. Then start NeuroShard and join with the invitation.")
        source = self._configuration.source_of("run")
        if source in {"flag", "environment", "config.toml"}:
            raise ConflictError(
                f"The run of this node is set by {source_name(source, 'run')}.", "Start the node without it."
            )
        choice = RunChoice(self._data_dir)
        if command.code is not None:
            chosen = ChosenRun.of(read_invitation_text(command.code))
            choice.choose(chosen)
        elif command.run_id is not None:
            choice.choose(self._known(choice, command.run_id))
        else:
            choice.leave()
        return self._result("The node saves a checkpoint and starts again with the other run.")

    def _known(self, choice: RunChoice, run_id: str) -> ChosenRun:
        """A run that was chosen here before, or one of the local network, which is found again by its id."""
        for run in choice.read().runs:
            if run.run == run_id:
                return run
        for notice in () if self._nearby is None else self._nearby.current:
            if notice.run == run_id:
                return ChosenRun(notice.run, notice.name)
        raise UsageError(
            "This run is neither known here nor on the local network.",
            "Join it with an invitation, or start NeuroShard on its computer and wait a few seconds.",
        )

    def _result(self, message: str, details: dict[str, JsonValue] | None = None) -> CommandResult:
        return CommandResult(self._board.current().state, message, details)


async def settle_places(
    peer_network: PeerNetwork, owner: Wallet, data_dir: Path, offload: BlockingRunner = anyio.to_thread.run_sync
) -> None:
    """Void the places of wallets beyond the uses of an invitation, until cancelled.

    Such wallets were admitted by members that had no connection to this node. Of several nodes of the owner the one
    with the lowest id acts: after PATIENCE_SECONDS it knows the others.
    """
    due_at = dict[WalletId, float]()
    while True:
        await sleep_to_tick(PAPERS_SECONDS)
        joined, followed, now = peer_network.joined, peer_network.exchange.followed, anyio.current_time()
        if joined is None or joined.members is None or followed is None or followed.offer.owner != owner.wallet_id:
            continue
        excess, me = joined.members.register.excess, peer_network.identity.node_id
        due_at = {each.wallet_id: due_at.get(each.wallet_id, now + PATIENCE_SECONDS) for each in excess}
        due = [each for each in excess if now >= due_at[each.wallet_id]]
        nodes = joined.participant.membership.view.members.values()
        if due and me == min([me, *(node.node_id for node in nodes if node.wallet_id == owner.wallet_id)]):
            due_at |= {each.wallet_id: now + RETRY_SECONDS for each in due}
            try:
                await offload(partial(StoredPasses(data_dir, followed.offer).void_places, owner, due))
            except NeuroShardError as error:
                _LOG.error("The places of an invitation are not settled: %s", error)


def _free_label(word: str, stored: StoredPasses) -> str:
    """A label for a new invitation that no other one has: the word and a number."""
    taken = {one.label for one in stored.issued().issued}
    return next(label for number in count(len(taken) + 1) if (label := f"{word} {number}") not in taken)


def _nearby_row(notice: RunNotice) -> JsonValue:
    return {"run_id": notice.run, "name": notice.name, "computers": notice.computers}


def _row(one: KnownInvitation) -> JsonValue:
    issued = one.issued
    facts: dict[str, JsonValue] = {"label": issued.label, "uses": issued.uses, "not_after": issued.not_after}
    return {**facts, "key": one.key, "left": one.left, "state": one.state}
