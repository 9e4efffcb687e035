"""Certifies the outer steps that a node makes alone: its own vote is the whole quorum."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup
from msgspec import structs
from torch import Tensor

from neuroshard.consensus.chain import Chain, Step
from neuroshard.consensus.effects import Complete, Sign
from neuroshard.consensus.matchmaking import Replica
from neuroshard.consensus.round_messages import NO_DIGEST, Phase, Quorum, Vote
from neuroshard.consensus.seat_changes import SeatChanges
from neuroshard.consensus.stage_chain import StageChain
from neuroshard.consensus.sync_strategies import Abandoned, Outcome, RunRound
from neuroshard.state.replica_status import ReplicaStatus

ROOT_LOOK_SECONDS = 0.02  # while the root of the new state is computed on another thread
FOLLOW_SECONDS = 60.0


class LoneSteps:
    """Belongs to the event loop. A step comes first; its certificate follows while training continues."""

    def __init__(
        self,
        replica: Replica,
        chain: StageChain,
        sign: Sign,
        alone: RunRound,
        seats: SeatChanges,
        *,
        keep_end: Callable[[int, Complete], Awaitable[bool]],
        extend: Callable[[Quorum], Awaitable[None]],
    ) -> None:
        """`keep_end` stores the end of an outer step and returns whether it is on the disk."""
        self._replica = replica
        self._chain = chain
        self._sign = sign
        self._alone = alone
        self._seats = seats
        self._keep_end = keep_end
        self._extend = extend
        self._certifying = anyio.Lock()
        self._root_before = NO_DIGEST  # of the state before this node's last step alone

    async def exchange(self, contribution: Tensor, outer_step: int, beside: TaskGroup | None) -> Outcome:
        """Run the step of this node alone, after the certificate of the one before, on which it builds.

        Its own certificate follows in a task `beside`.
        """
        if not await self.certify():
            return Abandoned("the step before it could not be stored", is_soon_again=True)
        self._root_before = self._replica.replica_status().root
        if beside is not None:
            beside.start_soon(self.follow)
        return await self._alone(contribution, outer_step)

    def pending(self) -> Step | None:
        """The step of this node alone whose certificate is missing; None if there is none or others have a say."""
        chain = self._chain.chain
        is_next = chain is not None and self._replica.replica_status().outer_step == chain.standing.outer_step + 1
        if chain is None or not is_next or not self._seats.may_vote:
            return None
        step = self._step(chain)
        return step if step.is_quorum({self._replica.node_id}) else None

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
                own = self._replica.replica_status()
                if own.root:
                    return await self._has_certified(step, own)
                await anyio.sleep(ROOT_LOOK_SECONDS)
            return True

    def _step(self, chain: Chain) -> Step:
        standing = chain.standing
        root = standing.root or self._root_before
        return self._replica.rounds.step(standing.outer_step, root, standing, chain.ledger, chain.owner)

    async def _has_certified(self, step: Step, own: ReplicaStatus) -> bool:
        value = step.completed(structs.replace(step.first_value(), outer_step=own.outer_step, next_root=own.root))
        vote = self._sign(Vote(step.id, 0, Phase.COMMIT, value.digest))
        complete = Complete(Quorum(value, 0, Phase.COMMIT, (vote,)), ())
        is_stored = await self._keep_end(step.number, complete)
        if is_stored:
            await self._extend(complete.certificate)
        return is_stored
