"""Exchange of run parameters between nodes, and the signed versions of the run that this node serves."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import anyio

from neuroshard.consensus.committee import ChangeParameters, change_of
from neuroshard.consensus.foundation import Foundations, Founding, SignedFoundation, is_set_back
from neuroshard.consensus.waypoints import Milestone, Point
from neuroshard.errors import DataError, NeuroShardError
from neuroshard.identity.invitations import InvitedTip, is_pass_of
from neuroshard.identity.pass_register import PassRegister
from neuroshard.membership.announcements import directory_namespace
from neuroshard.membership.claim_intake import ANNOUNCEMENT_RULES, ClaimIntake, Refusal
from neuroshard.membership.connectivity import Networking
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import Network, RequestRefusedError
from neuroshard.network.tasks import accompanied
from neuroshard.runs.foundations import MAX_BYTES, encode_foundations, merged, no_foundations, read_foundations
from neuroshard.runs.offer import (
    NewsHeard,
    OfferChoice,
    RunAnswer,
    RunNews,
    RunOffer,
    RunRequest,
    better_of,
    checked_offer,
    read_offer,
)
from neuroshard.types import NodeId, RunId, WalletId
from neuroshard.waiting import Signal, sleep_to_tick

_LOG = logging.getLogger(__name__)

NAMED_BY_OWNER, NAMED_BY_INVITATION = "the run's owner has signed", "your invitation names"


class RunVersions:
    """The versions of a run that this node knows as signed. A chain decides from where each applies: StageVersions."""

    def __init__(
        self,
        offer: RunOffer,
        foundations: Foundations | None = None,
        tip: InvitedTip | None = None,
        members: PassRegister | None = None,
    ) -> None:
        """`tip` is that of the invitation with which this node entered: it follows no line without it.

        A wallet that is not one of the `members` any more is nobody's heir.
        """
        self.offer = offer
        self._members = members
        self.tip = tip
        self.foundations = no_foundations(offer) if foundations is None else foundations
        self.changed = Signal()  # notified after every new version or foundation
        self._held = frozenset[int]()  # stages that this node holds
        self.changes = _changes_of(offer)  # to the versions after the first one, for the chain

    def learn(self, offer: RunOffer) -> OfferChoice:
        """Merge the versions of a checked offer of the same run. Raises ValueError for another run."""
        choice = better_of(self.offer, offer)
        if choice.is_new:
            known = {signed.parameters.version for signed in self.offer.versions}
            for parameters in (signed.parameters for signed in choice.offer.versions):
                if parameters.version not in known:
                    start = parameters.holds_from_outer_step
                    _LOG.info(
                        "The run's owner signed version %d. It applies from outer step %d, or from the second one "
                        "after its entry into the chain.",
                        parameters.version,
                        start,
                    )
            self.offer, self.changes = choice.offer, _changes_of(choice.offer)
            self.changed.notify()
        return choice

    def founding_of(self, stage: int) -> Founding | None:
        """The foundation that applies to a stage; None before the owner's statement, and while two contradict."""
        found = None if self.lacks_tip else self.foundations.start_of(stage)
        if found is None:
            return None
        statement, start = found
        points, epoch, owner = self._points_of(stage, statement.id), statement.foundation.epoch, self.offer.owner
        first = Founding(statement.id, epoch, start, owner, points, statement.foundation.trusted)
        lines = {statement.id: first}  # by hash; of those that are valid the last one applies
        for each in reversed(self.foundations.successors(stage, statement.id)):
            start, before = each.succession.start, lines.get(each.succession.statement)
            if before is not None and not is_set_back(start, [point.milestone for point in before.points]):
                points = self._points_of(stage, each.id)
                lines[each.id] = Founding(each.id, epoch, start, owner, points, heir=each.named.payload)
        present = self._invited_line(lines) or [each for each in lines.values() if not self._is_removed(each)][-1]
        return replace(present, others=tuple(each for each in lines.values() if each is not present))

    def _is_removed(self, line: Founding) -> bool:
        return line.heir is not None and self._members is not None and self._members.is_removed(line.heir.heir)

    def _invited_line(self, lines: Mapping[str, Founding]) -> Founding | None:
        """The line of an heir that the invitation names, or the last one that continues it."""
        named = None if self.tip is None else lines.get(self.tip.foundation.hex())
        if named is None or named.heir is None:
            return None
        for each in lines.values():
            if each.heir is not None and each.heir.statement == named.statement and not self._is_removed(each):
                named = each
        return None if self._is_removed(named) else named

    def _points_of(self, stage: int, statement: str) -> tuple[Point, ...]:
        """The values through which a chain of this foundation must pass."""
        points, waypoint, tip = list[Point](), self.foundations.points.get(stage), self.tip
        if waypoint is not None and waypoint.statement == statement:
            points.append(Point(waypoint.milestone, NAMED_BY_OWNER))
        if tip is not None and tip.value is not None and (tip.stage, tip.foundation.hex()) == (stage, statement):
            points.append(Point(Milestone(tip.height, tip.value.hex()), NAMED_BY_INVITATION))
        return tuple(points)

    @property
    def lacks_tip(self) -> bool:
        """Whether the foundation that the invitation names is missing here, so that no line is followed yet."""
        return self.tip is not None and self.foundations.lacks(self.tip)

    def note_held(self, stages: Collection[int]) -> None:
        """Record the stages that this node holds."""
        self._held = frozenset(stages)

    @property
    def awaits_foundation(self) -> bool:
        """Whether this node holds a stage without a foundation, or misses the one that its invitation names."""
        return self.lacks_tip or any(self.founding_of(stage) is None for stage in self._held)

    def learn_foundations(self, foundations: Foundations) -> bool:
        """Add checked statements and waypoints of the same run. Returns whether one of them is new."""
        foundations = merged(self.foundations, foundations)
        if foundations == self.foundations:
            return False
        new = foundations.known.keys() - self.foundations.known.keys()
        if foundations.successions != self.foundations.successions:
            _LOG.info("An heir continues a stage of the run whose only voting node is gone.")
        self.foundations = foundations
        for statement in (foundations.known[key] for key in sorted(new)):
            signer = "owner" if statement.signer == foundations.owner else "deputy"
            _LOG.info("The run's %s signed the foundation of epoch %d.", signer, statement.foundation.epoch)
        if foundations.is_contradictory:
            _LOG.error("Two foundations of one epoch contradict each other: %s", ", ".join(_names(foundations.highest)))
        self.changed.notify()
        return True


def _changes_of(offer: RunOffer) -> tuple[ChangeParameters, ...]:
    """The entries for the later versions. One that does not fit into an entry applies nowhere."""
    found = list[ChangeParameters]()
    for signed in offer.versions[1:]:
        try:
            found.append(change_of(signed))
        except DataError as error:
            _LOG.error("%s It applies nowhere.", error.message)
    return tuple(found)


RUN_KIND = "run/parameters"
NEWS_KIND = "run/news"
ASK_SECONDS = 10.0
ASK_AGAIN_SECONDS = 1.0
CONNECTION_LOOK_SECONDS = 0.05
ASKED_AT_ONCE = 32  # peers
DIRECTORY_SECONDS = (0.5, 1.0, 2.0, 5.0, 15.0)  # between directory look-ups for a run's nodes; the last repeats
MOST_RECORDS = 32
NEWER_VERSION_SECONDS = 300.0  # how often a peer is asked whether the run's owner signed a newer version
PEERS_AT_FULL_PACE = 8  # more peers: each is asked less often
FOUNDATION_LOOK_SECONDS = 1.0  # the same while a stage that this node holds has no foundation
LOOK_SECONDS = 10.0  # between looks for peers to ask and for a version signed on this computer


@dataclass(frozen=True)
class OfferStore:
    """Storage for the offers of runs: `find` looks one up by id, `keep` stores it unless a better one is stored.

    The other two read and store the foundations of a run.
    """

    find: Callable[[RunId], RunOffer | None]
    keep: Callable[[RunOffer], OfferChoice]
    foundations: Callable[[RunOffer], Foundations] = no_foundations
    keep_foundations: Callable[[RunOffer, Foundations], None] = lambda _offer, _foundations: None


@dataclass
class RunExchange:
    """Answers peers' requests for runs and asks peers for them. A node has one for its whole life."""

    store: OfferStore
    now: Callable[[], float] = time.time  # seconds since the epoch
    wallet: WalletId | None = None  # of this node, whose pass peers may know from another of its nodes
    shown_passes: dict[RunId, bytes] = field(default_factory=dict[RunId, bytes], init=False)
    followed: RunVersions | None = field(default=None, init=False)  # the run this node serves
    _members: PassRegister | None = field(default=None, init=False)  # of the run this node serves, if it has passes
    _is_shared: bool = field(default=False, init=False)  # whether nodes that ask for any run are offered it
    _learned: Signal = field(default_factory=Signal, init=False)  # notified after news of the followed run

    def follow(
        self, offer: RunOffer, *, is_shared: bool, members: PassRegister | None = None, tip: InvitedTip | None = None
    ) -> RunVersions:
        """Serve this run from now on and return its versions, which grow as peers report newer ones.

        If `is_shared`, nodes that ask for any run are offered it. A wallet that asks gets its pass from `members`.
        `tip` is that of this node's invitation.
        """
        versions = RunVersions(offer, self.store.foundations(offer), tip, members)
        versions.changed.feed(self._learned)
        self.followed, self._is_shared, self._members = versions, is_shared, members
        return self.followed

    @property
    def shared(self) -> RunOffer | None:
        """The run that nodes that ask for any run are offered."""
        return self.followed.offer if self.followed is not None and self._is_shared else None

    async def live(self, network: Network) -> None:
        """Answer peers until cancelled. For a shared run, also ask each regularly for a newer version, and report news.

        A peer that reports news is asked at once, so that a foundation crosses the run within seconds.
        """
        network.transport.serve(RUN_KIND, self._answer, FrameLimits(message=RunRequest), for_anyone=True)
        network.transport.serve(NEWS_KIND, partial(self._hear_news, network), FrameLimits(message=RunNews))
        await accompanied(partial(self._ask_regularly, network), partial(self._report_news, network))

    async def _ask_regularly(self, network: Network) -> None:
        asked: dict[NodeId, tuple[float, float]] = {}  # when, and since when the peer was connected then
        while True:
            is_waiting = self.followed is not None and self.followed.awaits_foundation
            await sleep_to_tick(FOUNDATION_LOOK_SECONDS if is_waiting else LOOK_SECONDS)
            if self.followed is None or not self._is_shared:
                continue
            now, peers = anyio.current_time(), {one.peer: one.since for one in network.transport.connections()}
            pause = NEWER_VERSION_SECONDS * max(1.0, len(peers) / PEERS_AT_FULL_PACE)
            if self.followed.awaits_foundation:
                pause = 0.0
            # a peer that has connected again may have come back with news, such as the owner's node after a rollback
            known = {peer: (at, since) for peer, (at, since) in asked.items() if peers.get(peer) == since}
            asked = {peer: (at, since) for peer, (at, since) in known.items() if now - at < pause}
            for peer, since in peers.items():
                if peer not in asked:
                    asked[peer] = (now, since)
                    await self._ask_for_newer(network, peer, self.followed)

    async def _hear_news(self, network: Network, sender: NodeId, news: Frame) -> Frame:
        followed = self.followed
        if followed is not None and self._is_shared and news.read(RunNews).run == followed.offer.run_id:
            await self._ask_for_newer(network, sender, followed)
        return Frame(NEWS_KIND, NewsHeard())

    async def _report_news(self, network: Network) -> None:
        """Report each change here to all peers, with several requests at a time, until cancelled."""
        limiter = anyio.CapacityLimiter(ASKED_AT_ONCE)

        async def report(peer: NodeId, news: Frame) -> None:
            async with limiter:
                try:
                    await network.transport.request(
                        peer, news, reply=FrameLimits(message=NewsHeard), timeout_seconds=ASK_SECONDS
                    )
                except NeuroShardError as error:
                    _LOG.debug("Node %s does not hear the news of the run: %s", peer, error)

        while True:
            count = self._learned.count
            if count and self.followed is not None and self._is_shared:
                async with anyio.create_task_group() as tasks:
                    for peer in network.transport.peers():
                        tasks.start_soon(report, peer, Frame(NEWS_KIND, RunNews(self.followed.offer.run_id)))
            await self._learned.wait(after=count)

    async def watch_stored(self) -> None:
        """Pick up versions and foundations that the owner signs on this computer while the node runs."""
        while True:
            await sleep_to_tick(LOOK_SECONDS)
            if self.followed is not None:
                offer = self.store.find(self.followed.offer.run_id)
                if offer is not None:
                    self.followed.learn(offer)
                self.followed.learn_foundations(self.store.foundations(self.followed.offer))

    async def fetch(self, run_id: RunId, networking: Networking, report: Callable[[str], None]) -> RunOffer:
        """Wait until a peer sends the run's offer, reporting the reason for the wait to `report`.

        Meanwhile the run's nodes are looked up in the directory: a seed stores no runs, only their nodes' addresses.
        """

        def report_missing(peers: Collection[NodeId]) -> None:
            report(f"Looking for nodes of run {run_id[:16]}. {_what_is_missing(peers, networking)}")

        async def fetched() -> RunOffer:
            return await self._first_answer(networking, run_id, ASK_AGAIN_SECONDS, report_missing)

        return self.store.keep(await accompanied(fetched, partial(self._look_into_directory, run_id, networking))).offer

    async def fetch_soon(self, run_id: RunId, networking: Networking, seconds: float) -> RunOffer | None:
        """Fetch a run like `fetch`, but return None if no peer sends it within `seconds`."""
        with anyio.move_on_after(seconds):
            return await self.fetch(run_id, networking, lambda _: None)
        return None

    async def hear_of_any(self, networking: Networking, seconds: float) -> RunOffer | None:
        """Fetch any run that a peer shares, for a node without a named run; None if no peer offers one in `seconds`."""
        with anyio.move_on_after(seconds):
            offer = await self._first_answer(networking, None, ASK_AGAIN_SECONDS / 4, lambda _: None)
            return self.store.keep(offer).offer
        return None

    async def _first_answer(
        self,
        networking: Networking,
        run_id: RunId | None,
        pause_seconds: float,
        look: Callable[[Collection[NodeId]], None],
    ) -> RunOffer:
        """First valid offer from any peer. All are asked at once and repeatedly, because a peer may be silent."""
        asking: set[NodeId] = set()
        times_asked: Counter[NodeId] = Counter()
        found: list[RunOffer] = []
        async with anyio.create_task_group() as tasks:

            async def ask(network: Network, peer: NodeId) -> None:
                offer = await self._ask(network, peer, run_id)
                asking.discard(peer)
                if offer is not None:
                    found.append(offer)
                    tasks.cancel_scope.cancel()

            while True:
                network = await networking.up()
                peers = network.transport.peers()
                waiting = sorted((peer for peer in peers if peer not in asking), key=lambda peer: times_asked[peer])
                for peer in waiting[: ASKED_AT_ONCE - len(asking)]:
                    asking.add(peer)
                    times_asked[peer] += 1
                    tasks.start_soon(ask, network, peer)
                await _pause(network, pause_seconds, had_peers=bool(peers))
                look(peers)
        return found[0]

    async def _look_into_directory(self, run_id: RunId, networking: Networking) -> None:
        """Add the addresses of the run's nodes to the address book, so that this node dials them, until cancelled."""
        intake = ClaimIntake(ANNOUNCEMENT_RULES, run_id, self.now)
        for look in count():
            network = await networking.up()
            try:
                records = await network.directory.find(directory_namespace(run_id), MOST_RECORDS)
            except NeuroShardError as error:
                _LOG.debug("The directory does not answer: %s", error)
                records = ()
            for record in records:
                found = intake.take(record)
                if not isinstance(found, Refusal):
                    networking.book.add(found.value.addresses)
            await anyio.sleep(DIRECTORY_SECONDS[min(look, len(DIRECTORY_SECONDS) - 1)])

    async def _answer(self, sender: NodeId, request: Frame) -> Frame:
        asked = request.read(RunRequest)
        wanted = asked.run
        offer = self._known(None if wanted is None else RunId(wanted))
        if offer is None:
            raise RequestRefusedError(f"Node {sender} asked for a run that is not known here.")
        known = None
        if self._members is not None and asked.wallet is not None and self._members.run_id == offer.run_id:
            known = self._members.pass_of(asked.wallet)
        answer = RunAnswer(offer.to_json(), None if known is None else known.encoded)
        return Frame(RUN_KIND, answer, self._foundations(offer))

    def _foundations(self, offer: RunOffer) -> tuple[TensorPart, ...]:
        """The foundations of a run as the tensor of an answer."""
        followed = self.followed
        is_followed = followed is not None and followed.offer.run_id == offer.run_id
        known = followed.foundations if followed is not None and is_followed else self.store.foundations(offer)
        data = encode_foundations(known)
        return (TensorPart(TensorSpec("foundations", "uint8", (len(data),)), data),)

    def _known(self, run_id: RunId | None) -> RunOffer | None:
        """The stored offer of a run; without an id, the run that this node shares."""
        if run_id is None:
            return self.shared
        served = None if self.followed is None else self.followed.offer
        return served if served is not None and served.run_id == run_id else self.store.find(run_id)

    async def _ask(self, network: Network, peer: NodeId, run_id: RunId | None) -> RunOffer | None:
        """Ask a peer for a run; None if it does not have it, does not answer, or sends an invalid offer."""
        answer = await self._request_offer(network, peer, run_id)
        said = None if answer is None else answer.read(RunAnswer)
        offer = None if said is None else _read(peer, run_id, said.offer)
        if answer is None or said is None or offer is None:
            return None
        shown, owner = said.member_pass, offer.initial.owner_public_key
        if shown is not None and self.wallet is not None and is_pass_of(shown, self.wallet, offer.run_id, owner):
            self.shown_passes[offer.run_id] = shown
        known = self.store.foundations(offer)
        learnt = _read_foundations(peer, known, answer)
        if learnt != known:
            self._keep(offer, learnt)
        return offer

    def _keep(self, offer: RunOffer, foundations: Foundations) -> None:
        """Store foundations. A full disk only costs asking for them again after a restart."""
        try:
            self.store.keep_foundations(offer, foundations)
        except NeuroShardError as error:
            _LOG.warning("The foundations of the run are not stored: %s", error)

    async def _request_offer(self, network: Network, peer: NodeId, run_id: RunId | None) -> Frame | None:
        try:
            return await network.transport.request(
                peer,
                Frame(RUN_KIND, RunRequest(run_id, self.wallet)),
                reply=FrameLimits(max_body_bytes=MAX_BYTES, message=RunAnswer),
                timeout_seconds=ASK_SECONDS,
            )
        except NeuroShardError as error:
            _LOG.debug("Node %s knows no run: %s", peer, error)
            return None

    async def _ask_for_newer(self, network: Network, peer: NodeId, followed: RunVersions) -> None:
        run_id = followed.offer.run_id
        answer = await self._request_offer(network, peer, run_id)
        if answer is None:
            return
        if followed.learn_foundations(_read_foundations(peer, followed.foundations, answer)):
            self._keep(followed.offer, followed.foundations)
        said = answer.read(RunAnswer)
        if said.offer == followed.offer.to_json():  # the usual case, without parsing
            return
        offer = _read(peer, run_id, said.offer)
        if offer is None:
            return
        choice = followed.learn(offer)
        if choice.is_new:
            self.store.keep(choice.offer)
        elif choice.reason and offer.parameters.version >= choice.offer.parameters.version:  # lower: the peer is behind
            _LOG.warning("%s", choice.reason)


def _read(peer: NodeId, run_id: RunId | None, data: bytes) -> RunOffer | None:
    try:
        return read_offer(data) if run_id is None else checked_offer(run_id, data)
    except DataError as error:
        _LOG.warning("The offer of a run from node %s is ignored: %s", peer, error)
    return None


def _read_foundations(peer: NodeId, known: Foundations, answer: Frame) -> Foundations:
    """The known foundations with those in an answer; the known ones if the answer has none that are valid."""
    if not answer.tensors:
        return known
    try:
        return read_foundations(known, bytes(answer.tensors[0].data))
    except DataError as error:
        _LOG.warning("The foundations of a run from node %s are ignored: %s", peer, error)
        return known


def _names(statements: Collection[SignedFoundation]) -> list[str]:
    return [each.id[:16] for each in statements]


async def _pause(network: Network, seconds: float, *, had_peers: bool) -> None:
    """Wait `seconds`; a node that had no peers waits only until the first one connects."""
    with anyio.move_on_after(seconds):
        while had_peers or not network.transport.peers():
            await anyio.sleep(CONNECTION_LOOK_SECONDS)


def _what_is_missing(peers: Collection[NodeId], networking: Networking) -> str:
    return "None of the nodes that answer knows it yet." if peers else networking.state()[1]
