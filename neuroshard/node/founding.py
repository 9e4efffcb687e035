"""The owner's node founds the stages of its run: it signs where each stage's chain begins, and who votes.

It signs on its own in three cases only, all of which it can see itself:

    this node is about to train such a stage   this node gets the seat, before it makes a step
    a stage has no foundation                  the nodes that hold it get the seats
    a founded stage has lost all its seats     its present holders get the seats, from the newest certified height

In a run that is open to strangers, wallets cost nothing, so only nodes of the owner get seats in this way. Free names
around this node may hide the seats of others from it, so it never replaces those on its own.

Everything else, such as a lost quorum of a stage that this node holds, is the decision of the owner or of a deputy:
`neuroshard run refound` leaves a request in the data folder, and this node then founds the stages again from the state
that it has. A wallet that kept the copy of a stage whose only seat is gone has the same command for that stage alone.

If the owner's first steps were founded on two computers that could not reach each other, the one that has certified
nothing gives its foundation up, and the chain of the other one continues.

Once per week it signs a waypoint of each stage that it holds: a certified value through which the chain passes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from neuroshard.consensus.chain import Chain, ForkError
from neuroshard.consensus.committee import MAX_SEATS, AppliedVersion, Committee, Seat, versions_from
from neuroshard.consensus.foundation import (
    Foundation,
    Foundations,
    Founding,
    SignedFoundation,
    SignedSuccession,
    StageStart,
    Succession,
)
from neuroshard.consensus.stage_chain import FileChainStore, newest_chain, proven_chain
from neuroshard.consensus.vote_log import ROUNDS_FOLDER
from neuroshard.consensus.waypoints import SignedWaypoint, Waypoint, is_waypoint_due, next_milestone
from neuroshard.errors import NeuroShardError
from neuroshard.identity import Wallet
from neuroshard.model.architecture import plan_of
from neuroshard.network.blocking import BlockingRunner
from neuroshard.node.stage_swarm import StageSwarm
from neuroshard.runs.exchange import RunVersions
from neuroshard.runs.foundations import StoredFoundations, merged
from neuroshard.runs.offer import RunOffer
from neuroshard.state.backup_copy import BackupCopy
from neuroshard.state.checkpoint_store import stage_folder
from neuroshard.state.disk_space import copy_folder
from neuroshard.state.replica_status import ReplicaStatus, query_statuses
from neuroshard.types import NodeId, WalletId
from neuroshard.waiting import sleep_to_tick

_LOG = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
PATIENCE_SECONDS = 5.0  # for an earlier foundation, and for the first reports of the holders
GONE_SECONDS = 60.0  # without any seat of a stage among its holders
GATHER_SECONDS = 60.0  # at most, for the expected number of first seats


@dataclass
class Founder:
    """Of several nodes of the owner's wallet, the one with the lowest id acts. Other nodes act on a request only."""

    swarm: StageSwarm
    wallet: Wallet
    stored: StoredFoundations
    first_seats: int = 1  # nodes to wait for before a stage of a demo is founded
    now: Callable[[], float] = time.time
    offload: BlockingRunner = anyio.to_thread.run_sync
    _seatless_since: dict[int, float] = field(default_factory=dict[int, float])
    _contradicted_since: float | None = None  # since when another first foundation contradicts this node's

    async def found_first(self, stages: Iterable[int], *, is_shared: bool) -> None:
        """Found the stages that this node is about to train, so that its first steps already belong to a chain.

        In a shared run, wait first for statements that another node of the owner may have signed.
        """
        versions = self.swarm.versions
        if not self._is_owners or self.first_seats > 1:
            return
        if is_shared and not versions.foundations.known:
            with anyio.move_on_after(PATIENCE_SECONDS):
                await versions.changed.until(lambda: bool(versions.foundations.known))
        if not versions.foundations.is_contradictory and self._acts():
            seats = self._committee([self.swarm.node_id])
            missing = [stage for stage in stages if versions.founding_of(stage) is None]
            if missing:
                self._sign([StageStart(stage, seats) for stage in missing])

    async def run(self) -> None:
        """Look every LOOK_SECONDS until cancelled."""
        began = waited_since = anyio.current_time()
        await anyio.sleep(PATIENCE_SECONDS)
        while True:
            foundations = self.swarm.versions.foundations
            if self.stored.is_new_requested(self.swarm.versions.offer):
                if foundations.may_sign(self.wallet.public_key):
                    self._found_again()
                else:
                    await self._inherit()
            elif self._is_owners and foundations.is_contradictory:
                self._give_up_own(foundations)
            elif self._is_owners and self._acts():
                await self._look(anyio.current_time() - began)
                if self.sign_waypoints(anyio.current_time() - waited_since):
                    waited_since = anyio.current_time()
            await sleep_to_tick(LOOK_SECONDS)

    @property
    def _is_owners(self) -> bool:
        return self.wallet.wallet_id == self.swarm.versions.offer.owner

    def _acts(self) -> bool:
        members = self.swarm.membership.view.members.values()
        own = [member.node_id for member in members if member.wallet_id == self.wallet.wallet_id]
        return self.swarm.node_id == min([*own, self.swarm.node_id])

    async def _look(self, seconds: float) -> None:
        starts = list[StageStart]()
        for stage in range(len(self.swarm.plan)):
            holders = self._holders(stage)
            founding = self.swarm.versions.founding_of(stage)
            if founding is None and holders and (len(holders) >= self.first_seats or seconds >= GATHER_SECONDS):
                starts += self._first_start(stage, holders)
            elif founding is not None and self._has_lost_its_seats(stage, founding, holders):
                start = await self._continued(stage, founding, holders)
                if start is not None:
                    starts.append(start)
        if starts:
            self._sign(starts)

    def _give_up_own(self, foundations: Foundations) -> None:
        """Sign that the stages continue by the owner's other first foundation, if nothing is certified by that of this
        node.

        This node is the only seat of its own, so nobody else can have certified anything. If both nodes could give up,
        the one with the higher statement does, and the other one only if that has not happened within GONE_SECONDS.
        """
        mine = [each for each in foundations.highest if self._is_own_and_unused(each)]
        others = [each for each in foundations.highest if each not in mine]
        if len(mine) != 1 or len(others) != 1 or others[0].signer != self.wallet.public_key:
            self._contradicted_since = None
            return
        now, other = anyio.current_time(), others[0]
        self._contradicted_since = now if self._contradicted_since is None else self._contradicted_since
        if mine[0].id > other.id or now - self._contradicted_since >= GONE_SECONDS:
            named = other.foundation.deputies, other.foundation.trusted
            follows = Foundation(foundations.run_id, 1, (), other.id, (mine[0].id,), *named)
            if self._keep(foundations.with_statements([SignedFoundation.sign(self.wallet, follows)])):
                _LOG.info("The run was founded on another computer, too: this one follows.")

    def _is_own_and_unused(self, statement: SignedFoundation) -> bool:
        """Whether this node has signed a first foundation with itself as the only seat, and has certified nothing."""
        foundation = statement.foundation
        if statement.signer != self.wallet.public_key or foundation.epoch > 0 or not foundation.stages:
            return False
        for start in foundation.stages:
            name = self.swarm.name_of(self.swarm.plan[start.stage])
            chain, own = self.swarm.rounds.last_chain(name), self.swarm.donor.replica_status(name)
            is_mine = [seat.node_id for seat in start.committee.seats] == [self.swarm.node_id]
            if not is_mine or chain is None or chain.statement != statement.id or own is None:
                return False
            if (chain.standing.height, own.outer_step) != (start.height, start.outer_step):
                return False
        return True

    def sign_waypoints(self, waited_seconds: float) -> bool:
        """Sign a waypoint of each stage held here for which one is due. Returns whether new ones are on the disk."""
        versions, now, signed = self.swarm.versions, self.now(), list[SignedWaypoint]()
        for stage in range(len(self.swarm.plan)):
            name, founding = self.swarm.name_of(self.swarm.plan[stage]), versions.founding_of(stage)
            chain, last = self.swarm.rounds.last_chain(name), versions.foundations.points.get(stage)
            if chain is None or founding is None or chain.statement != founding.statement:
                continue
            above = last.milestone.height if last is not None and last.statement == chain.statement else 0
            milestone = next_milestone(chain.ledger.milestones, above)
            if milestone is not None and is_waypoint_due(last, now, waited_seconds):
                waypoint = Waypoint(versions.offer.run_id, stage, chain.statement, chain.epoch, milestone, int(now))
                signed.append(SignedWaypoint.sign(self.wallet, waypoint))
        return bool(signed) and self._keep(versions.foundations.with_statements((), signed))

    def _first_start(self, stage: int, holders: Sequence[NodeId]) -> list[StageStart]:
        """The start of a stage without a foundation; empty while the root of the state here is not known.

        A stage that this node has trained already begins with its state, and with this node as the only seat.
        """
        own = self.swarm.donor.replica_status(self.swarm.name_of(self.swarm.plan[stage]))
        if own is None or not own.is_live or own.outer_step == 0:
            return [StageStart(stage, self._committee(holders))]
        seats = self._committee([self.swarm.node_id])
        return [StageStart(stage, seats, 0, own.outer_step, own.root)] if own.root else []

    def _holders(self, stage: int) -> list[NodeId]:
        """Nodes that work on a stage and may get a seat, this one first."""
        holders = sorted(self.swarm.holders_of(stage), key=lambda node: (node != self.swarm.node_id, node))
        return [node for node in holders if not self._is_open or self._wallet_of(node) == self.wallet.wallet_id]

    @property
    def _is_open(self) -> bool:
        return self.swarm.versions.offer.parameters.admission != "friends"

    def _wallet_of(self, node: NodeId) -> WalletId | None:
        return self.swarm.wallet_id if node == self.swarm.node_id else self.swarm.wallet_of(node)

    def _has_lost_its_seats(self, stage: int, founding: Founding, holders: Sequence[NodeId]) -> bool:
        chain = self.swarm.rounds.last_chain(self.swarm.name_of(self.swarm.plan[stage]))
        committee = founding.start.committee if chain is None else chain.ledger.committee
        seats = {seat.node_id for seat in committee.seats}
        if not holders or seats.intersection(holders) or self._has_seats_of_others(committee):
            self._seatless_since.pop(stage, None)
            return False
        return anyio.current_time() - self._seatless_since.setdefault(stage, anyio.current_time()) >= GONE_SECONDS

    def _has_seats_of_others(self, committee: Committee) -> bool:
        """Whether other wallets than the owner's vote on a stage of an open run."""
        return committee.is_open and not committee.wallets <= {self.wallet.wallet_id}

    async def _continued(self, stage: int, founding: Founding, holders: Sequence[NodeId]) -> StageStart | None:
        """The start from the newest certified height, with the state that a holder has; None if none answers."""
        name = self.swarm.name_of(self.swarm.plan[stage])
        others = [node for node in holders if node != self.swarm.node_id]
        try:
            chain = await newest_chain(self.swarm.asking, name, Chain.founded(founding), others)
        except ForkError as error:
            _LOG.error("%s %s", error.message, error.action)
            return None
        if self._has_seats_of_others(chain.ledger.committee):
            return None
        statuses = await query_statuses(self.swarm.asking, name, others)
        known = {node: status for node, status in statuses.items() if status.is_live and status.root}
        if not known:
            return None
        best = max(sorted(known), key=lambda node: known[node].work)
        status = known[best]
        seats = [node for node in holders if node == best or (node in known and known[node].root == status.root)]
        return _started(stage, self._committee(seats), chain, status.outer_step, status.root)

    def _found_again(self) -> None:
        """Continue the stages held here from this node's state, with this node as the only seat.

        A stage waits until its state here is the newest certified one, unless foundations contradict each other. A
        deputy also waits until its chain has reached the owner's newest waypoint and the tip of its invitation.
        """
        starts, committee, versions = list[StageStart](), self._committee([self.swarm.node_id]), self.swarm.versions
        for stage in range(len(self.swarm.plan)):
            name = self.swarm.name_of(self.swarm.plan[stage])
            chain, own = self.swarm.rounds.last_chain(name), self.swarm.donor.replica_status(name)
            if own is None or not own.is_live:
                continue
            standing = None if chain is None else chain.standing
            is_behind = standing is not None and own.outer_step < standing.outer_step
            points = () if chain is None or self._is_owners else chain.points
            is_short = standing is not None and any(standing.height < point.milestone.height for point in points)
            if is_short or not own.root or (is_behind and versions.founding_of(stage) is not None):
                return  # the root is being computed, or the node is about to follow: look again
            heights = [0 if standing is None else standing.height, *versions.foundations.heights_of(stage)]
            parent = None if standing is None else standing.value
            place = (max(heights), own.outer_step, own.root, parent, _versions(chain, own.outer_step))
            starts.append(StageStart(stage, committee, *place))
        if starts and self._sign(starts):
            self.stored.withdraw_request(versions.offer)

    async def _inherit(self) -> None:
        """Continue the stages whose only seat is gone and whose heir is this wallet, with the node that has the state.

        Until a node has taken a stage over from the copy, nothing is signed. A seat that is here ends the request.
        """
        versions, signed = self.swarm.versions, list[SignedSuccession]()
        for stage in range(len(self.swarm.plan)):
            holders = self._holders(stage)
            chain = await self._inherited_chain(stage, holders)
            if chain is None or chain.ledger.heir is None:
                continue
            if any(seat.node_id in holders for seat in chain.ledger.committee.seats):
                _LOG.error("Stage %d is not continued by its heir: its voting node is here.", stage + 1)
                self.stored.withdraw_request(versions.offer)
                return
            states = await self._states(stage, holders)
            if states:
                best = best_state(states, chain, self.swarm.node_id)
                state, seats = states[best], self._committee([best])
                start = _started(stage, seats, chain, state.outer_step, state.root)
                content = Succession(versions.offer.run_id, chain.statement, start, chain.ledger.heir.naming)
                signed.append(SignedSuccession.sign(self.wallet, content))
        if signed and self._keep_signed(signed):
            self.stored.withdraw_request(versions.offer)

    async def _inherited_chain(self, stage: int, holders: Sequence[NodeId]) -> Chain | None:
        """The newest chain of a stage, known here or to a holder, if it names this wallet as the heir.

        It may be the one next to the copy that this node keeps.
        """
        name, founding = self.swarm.name_of(self.swarm.plan[stage]), self.swarm.versions.founding_of(stage)
        chain, copy = self.swarm.rounds.last_chain(name), self.swarm.donor.local(name)
        if founding is None:
            return None
        if isinstance(copy, BackupCopy):
            chain = await self.offload(partial(proven_chain, FileChainStore(copy.folder / ROUNDS_FOLDER), founding))
        if chain is None or chain.statement != founding.statement or chain.ledger.heir is None:
            return None
        others = [node for node in holders if node != self.swarm.node_id]
        try:
            chain = await newest_chain(self.swarm.asking, name, chain, others)
        except ForkError as error:
            _LOG.error("%s %s", error.message, error.action)
            return None
        heir = chain.ledger.heir
        return chain if heir is not None and heir.wallet_id == self.wallet.wallet_id else None

    async def _states(self, stage: int, holders: Sequence[NodeId]) -> dict[NodeId, ReplicaStatus]:
        """The states of a stage at the nodes that train it."""
        name = self.swarm.name_of(self.swarm.plan[stage])
        others = [node for node in holders if node != self.swarm.node_id]
        found, own = await query_statuses(self.swarm.asking, name, others), self.swarm.donor.replica_status(name)
        found |= {} if own is None else {self.swarm.node_id: own}
        return {node: status for node, status in found.items() if status.is_live and status.root}

    def _keep_signed(self, successions: Sequence[SignedSuccession]) -> bool:
        """Store successions. Returns whether nothing is left to do."""
        known = self.swarm.versions.foundations
        try:
            more = known.with_statements((), (), successions)
        except NeuroShardError as error:
            _LOG.error("The stage cannot be continued: %s", error)
            return True  # asking again changes nothing
        if more == known:
            _LOG.error("The stage cannot be continued: this wallet has continued it already. The run's owner can help.")
            return True
        return self._keep(more)

    def _committee(self, nodes: Sequence[NodeId]) -> Committee:
        seats = dict[str, Seat]()
        for node in nodes:
            wallet = self._wallet_of(node)
            if wallet is not None and wallet not in seats and len(seats) < MAX_SEATS:
                seats[wallet] = Seat(wallet, node, 0)
        return Committee.founded(seats.values(), is_open=self._is_open)

    def _sign(self, starts: Sequence[StageStart]) -> bool:
        """Sign and store a statement. Returns whether it is on the disk.

        It follows the one that a command on this computer may just have stored, such as a list of wallets.
        """
        versions = self.swarm.versions
        foundations = merged(versions.foundations, self.stored.read(versions.offer))
        try:
            return self._keep(foundations.with_statements([foundations.next(self.wallet, starts)]))
        except NeuroShardError as error:
            _LOG.error("The foundation of the run cannot be made: %s", error)
            return False

    def _keep(self, known: Foundations) -> bool:
        """Store statements and waypoints before anybody sees them: after a restart none may be signed twice."""
        versions = self.swarm.versions
        try:
            self.stored.write(versions.offer, known)
        except NeuroShardError as error:
            _LOG.error("The foundations of the run are not stored: %s", error)
            return False
        return versions.learn_foundations(known)


def best_state(states: Mapping[NodeId, ReplicaStatus], chain: Chain, own: NodeId) -> NodeId:
    """The node with a state that the chain certifies, or else with the most work, by its own word."""

    def rank(node: NodeId) -> tuple[bool, tuple[int, int], bool]:
        state = states[node]
        return chain.place_of(state.root, state.outer_step) is not None, state.work, node == own

    return max(sorted(states), key=rank)


def inherited_stages(data_dir: Path, offer: RunOffer, wallet: WalletId) -> list[int]:
    """The stages whose heir a wallet is, by the chains on this computer. Blocks."""
    versions, found = RunVersions(offer, StoredFoundations(data_dir).read(offer)), list[int]()
    for stage, layers in enumerate(plan_of(offer.parameters)):
        own, copied = stage_folder(data_dir, wallet, offer.run_id, layers), copy_folder(data_dir, offer.run_id, layers)
        founding = versions.founding_of(stage)
        if founding is not None:
            chains = [proven_chain(FileChainStore(folder / ROUNDS_FOLDER), founding) for folder in (own, copied)]
            heirs = [chain.ledger.heir for chain in chains if chain.ledger.heir is not None]
            found += [stage] if any(heir.wallet_id == wallet for heir in heirs) else []
    return found


def _started(stage: int, committee: Committee, chain: Chain, outer_step: int, root: str) -> StageStart:
    height, value = chain.standing.height, chain.standing.value
    return StageStart(stage, committee, height, outer_step, root, value, _versions(chain, outer_step))


def _versions(chain: Chain | None, outer_step: int) -> tuple[AppliedVersion, ...]:
    """The versions of the run's parameters that the next line of a stage carries over."""
    return () if chain is None else versions_from(chain.ledger.versions, outer_step)
