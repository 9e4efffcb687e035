"""Certifies the outer steps that a node makes alone: its own vote is the whole quorum.

No aggregate leads to such a state. After a kill, a node may know a certificate of its own whose state was in no
checkpoint. If no replica here has that state, the next step continues from the state that the node has.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from math import isfinite

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from msgspec import structs
from torch import Tensor

from neuroshard.aggregation import RejectionReason
from neuroshard.aggregation.slices import dot_product
from neuroshard.consensus.chain import Chain, Step
from neuroshard.consensus.committee import NameHeir
from neuroshard.consensus.effects import Complete
from neuroshard.consensus.entries import next_change
from neuroshard.consensus.foundation import HeirNaming
from neuroshard.consensus.matchmaking import Replica
from neuroshard.consensus.round_messages import NO_DIGEST, Phase, Quorum, Vote
from neuroshard.consensus.round_runner import RoundDependencies, RoundRunner
from neuroshard.consensus.seat_changes import SeatChanges
from neuroshard.consensus.sync_strategies import Abandoned, Agreed, Outcome
from neuroshard.network.blocking import BlockingRunner
from neuroshard.state.replica_status import ReplicaStatus

_LOG = logging.getLogger(__name__)
UNPROVEN = "The certificates of this node's state are lost. If no node has them: `run refound`, or `run branch`."
LOST_STATE = (
    "Training continues, but no step completes: no node that answers has the run's newest state. Start the node that "
    "trained last. If it does not come back, the run's owner, a deputy, or the node that kept the copy of these layers "
    "can decide: `neuroshard run refound`. "
    "If these are gone, too, you can continue from your own state: `neuroshard run branch`."
)
ROOT_LOOK_SECONDS = 0.02  # while the root of the new state is computed on another thread
FOLLOW_SECONDS = 60.0


async def lone_exchange(
    contribution: Tensor, outer_step: int, offload: BlockingRunner = anyio.to_thread.run_sync
) -> Agreed | Abandoned:
    """Run the round of a node without peers, which has no agreement to reach; implements RunRound.

    Nothing travels, so no codec loses anything. A contribution that the gates of a group always refuse is refused
    here as well.
    """
    del outer_step
    square = await offload(partial(dot_product, contribution, contribution))
    if isfinite(square) and square > 0:
        return Agreed(contribution, 1)
    refusal = RejectionReason.ZERO if square == 0 else RejectionReason.NOT_FINITE
    return Abandoned(f"no contribution was accepted: {refusal}")


class LoneSteps:
    """Belongs to the event loop. A step comes first; its certificate follows while training continues."""

    def __init__(self, replica: Replica, around: RoundDependencies, actor: RoundRunner, seats: SeatChanges) -> None:
        self._replica = replica
        self._chain = around.chain
        self._swarm = around.swarm
        self._offload = around.offload
        self._actor = actor
        self._seats = seats
        self._certifying = anyio.Lock()
        self._root_before = NO_DIGEST  # of the state before this node's last step alone

    async def exchange(self, contribution: Tensor, outer_step: int, beside: TaskGroup | None) -> Outcome:
        """Run the step of this node alone, after the certificate of the one before, on which it builds.

        Its own certificate follows in a task `beside`.
        """
        if not self._actor.leave():
            return Abandoned("the step has ended with others", is_soon_again=True)
        if not await self.certify():
            return Abandoned("the step before it could not be stored", is_soon_again=True)
        self._root_before = self._replica.outer.own_status().root
        lost = self.after_lost_state()
        if beside is not None:
            beside.start_soon(self.follow)
        outcome = await lone_exchange(contribution, outer_step, self._offload)
        if lost is None or not isinstance(outcome, Agreed):
            return outcome
        _LOG.warning(
            "The state of outer step %d is lost. Step %d continues from an older one.", lost.number, lost.number + 1
        )
        return replace(outcome, completes=lost.number)

    @property
    def is_ahead(self) -> bool:
        """Whether this replica has made a step alone whose certificate follows."""
        chain = self._chain.chain
        return chain is not None and self._replica.outer.own_status().outer_step > chain.standing.outer_step

    @property
    def obstacle(self) -> str:
        """The reason why the state of this node cannot be certified, and the action that helps; "" if it can."""
        return UNPROVEN if self.is_ahead and self._chain.obstacle == "" and self.pending() is None else ""

    def after_lost_state(self) -> Step | None:
        """The step after the newest certified state, which this node does not have.

        None if others have a say in that step, or if any of the lost states has the work of others.
        """
        chain, own = self._chain.chain, self._replica.outer.own_status()
        if chain is None or self._chain.fork is not None or not own.root or not self._seats.may_vote:
            return None
        lost = chain.values_after(own.root, own.outer_step)
        if not lost or any(value.round_id is not None for value in lost):
            return None
        step = self._step(chain)
        return step if step.is_quorum({self._replica.member.node_id}) else None

    def pending(self) -> Step | None:
        """The step of this node alone whose certificate is missing; None if there is none or others have a say."""
        chain = self._chain.chain
        is_next = chain is not None and self._replica.outer.own_status().outer_step == chain.standing.outer_step + 1
        if chain is None or not is_next or not self._seats.may_vote:
            return None
        step = self._step(chain)
        return step if step.is_quorum({self._replica.member.node_id}) else None

    async def follow(self) -> None:
        """Certify the step that this node makes now, when it is made. Gives up after FOLLOW_SECONDS."""
        with anyio.move_on_after(FOLLOW_SECONDS):
            while self.pending() is None:
                await anyio.sleep(ROOT_LOOK_SECONDS)
            await self.certify()

    async def certify(self) -> bool:
        """Certify the pending step when the root of its state is known. Returns whether no step is pending any more."""
        async with self._certifying:
            while (step := self.pending()) is not None:
                own = self._replica.outer.own_status()
                if own.root:
                    return await self._has_certified(step, own)
                await anyio.sleep(ROOT_LOOK_SECONDS)
            return True

    async def finish_locked(self) -> None:
        """Complete the value that this node had locked when it was killed, if its own vote decides.

        It may have sent that vote, and then others have the certificate. Another value would be a second one.
        """
        chain = self._chain.chain
        step = None if chain is None or not self._seats.may_vote else self._step(chain)
        if step is None or not step.is_quorum({self._replica.member.node_id}):
            return
        record = self._actor.locked_in(step.standing.root or self._replica.outer.own_status().root, step.height)
        if record is None or record.lock is None:
            return
        lock = record.lock
        vote = self._swarm.sign(Vote(record.step_id, lock.view, Phase.COMMIT, lock.value.digest))
        complete = Complete(Quorum(lock.value, lock.view, Phase.COMMIT, (vote,)), record.aggregate)
        if await self._actor.keep_end(step.number, complete):
            await self._chain.extend(complete.certificate)

    def _step(self, chain: Chain) -> Step:
        standing = chain.standing
        root = standing.root or self._root_before
        return self._replica.terms.step(standing.outer_step, root, standing, chain.ledger, chain.owner)

    def _heir(self, step: Step) -> tuple[NameHeir, ...]:
        """The entry that names the wallet with the copy of this stage, if that is news.

        The stage must have been founded with this seat as the only one: without that, nobody could check the entry.
        """
        keeper, chain, own = self._replica.copy_keeper, self._chain.chain, self._replica.member.wallet_id
        committee, known = step.committee, step.ledger.heir
        wallet = None if keeper is None else self._swarm.wallet_of(keeper)
        is_due = wallet is not None and wallet not in committee.wallets and (known is None or known.wallet_id != wallet)
        is_only = chain is not None and committee.wallets == chain.start.committee.wallets == frozenset({own})
        if wallet is None or not is_due or not is_only or committee.is_open:
            return ()
        naming = HeirNaming(step.standing.statement, step.stage, step.height, wallet)
        return (NameHeir(wallet, self._swarm.sign(naming).claim),)

    async def _has_certified(self, step: Step, own: ReplicaStatus) -> bool:
        first, change = step.first_value(), next_change(step, self._swarm.changes)
        entries = (*self._heir(step), *(() if change is None else (change,)))
        value = step.completed(structs.replace(first, outer_step=own.outer_step, next_root=own.root, entries=entries))
        vote = self._swarm.sign(Vote(step.id, 0, Phase.COMMIT, value.digest))
        complete = Complete(Quorum(value, 0, Phase.COMMIT, (vote,)), ())
        is_stored = await self._actor.keep_end(step.number, complete)
        if is_stored:
            await self._chain.extend(complete.certificate)
        return is_stored
