"""The exchange of a stage that may have several replicas: with the group that was agreed on, else alone."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import anyio.to_thread
from torch import Tensor

from neuroshard.aggregation import Mean, make_aggregator
from neuroshard.compression import make_codec
from neuroshard.swarm.frames import HASH_BYTES
from neuroshard.swarm.group import aggregator_name, round_id
from neuroshard.swarm.outcome import Aborted, Completed
from neuroshard.swarm.round import CONTRIBUTION_KIND, ROOT_KIND, Offload, run_round
from neuroshard.training.control import first_of
from neuroshard.training.exchange import StageRounds
from neuroshard.training.outer_sync import Abandoned, Agreed, Exchange
from neuroshard.training.rounds.calls import RoundTimes
from neuroshard.training.rounds.gathering import Agreement, Gathering, Replica
from neuroshard.training.rounds.line import RoundLine
from neuroshard.training.transfer.download import Asking
from neuroshard.training.transfer.standings import standings_of
from neuroshard.types import NodeId

LEAST_DEADLINE_SECONDS = 60.0
SLOWEST_BYTES_PER_SECOND = 250_000
PRESENCE_LOOK_SECONDS = 1.0
GONE_SECONDS = 5.0  # a member may lose its connection so long and come back
_MEAN = Mean()


class GroupRounds:
    """One stage's rounds: who gathers, over which line, and the exchange that the outer step uses.

    The aggregator is the plain mean, whatever the run names: what else it asks for needs certified rounds.
    """

    def __init__(
        self,
        replica: Replica,
        asking: Asking,
        alone: Exchange,
        *,
        vector_length: int,
        times: RoundTimes | None = None,
        offload: Offload = anyio.to_thread.run_sync,
    ) -> None:
        """`vector_length` numbers are a contribution."""
        self.line = RoundLine(replica.stage, asking.requester)
        self.gathering = Gathering(replica, asking, self._open_line, times)
        self._rounds: StageRounds = replica.rounds
        self._alone = alone
        self._length = vector_length
        self._offload = offload
        self._asking = asking
        self._is_present = replica.is_present

    async def exchange(self, contribution: Tensor, outer_step: int) -> Agreed | Abandoned:
        """See Exchange."""
        agreement = self.gathering.agreement
        if agreement is None:
            return await self._alone(contribution, outer_step)
        if agreement.outer_step != outer_step:
            self.withdraw()
            return Abandoned("it was called for another outer step", is_soon_again=True)
        self.gathering.in_round = True
        completed = False
        try:
            outcome = await self._unless_one_goes(contribution, agreement)
            completed = isinstance(outcome, Agreed)
        finally:
            self.line.close()
            self.gathering.ended(completed=completed)
        return outcome

    def knows(self, node: NodeId) -> bool:
        """Whether a node may have a part in this stage's rounds; nothing of others is kept, not even for a while."""
        agreement = self.gathering.agreement
        return node in self.gathering.replica.peers() or (agreement is not None and node in agreement.group.others)

    def withdraw(self) -> None:
        """Take no part in what was agreed on: the others learn it when they send."""
        if self.gathering.is_called:
            self.line.close()
            self.gathering.withdraw()

    async def _unless_one_goes(self, contribution: Tensor, agreement: Agreement) -> Agreed | Abandoned:
        """The round, which a member that still has something to send ends by being gone: nobody waits for the dead."""
        ended = list[Agreed | Abandoned]()

        async def work() -> None:
            ended.append(await self._with_group(contribution, agreement))

        async def watch() -> None:
            gone = await self._gone_member()
            ended.append(Abandoned(f"member {gone} is gone", is_soon_again=True))

        await first_of(work, watch)
        return ended[0]

    async def _gone_member(self) -> NodeId:
        """Wait until a member is gone whose part of the round has not come."""
        gone_since = dict[NodeId, float]()
        while True:
            await anyio.sleep(PRESENCE_LOOK_SECONDS)
            now = anyio.current_time()
            absent = [node for node in self.line.awaited(ROOT_KIND) if not self._is_present(node)]
            gone_since = {node: gone_since.get(node, now) for node in absent}
            suspects = [node for node, since in sorted(gone_since.items()) if now - since >= GONE_SECONDS]
            told = await standings_of(self._asking, self.line.stage, suspects) if suspects else {}
            for node in suspects:
                if node not in told or not told[node].in_round:
                    return node
                del gone_since[node]  # only its connection was closed

    async def _with_group(self, contribution: Tensor, agreement: Agreement) -> Agreed | Abandoned:
        sizes, members = self._largest(agreement.outer_step), len(agreement.group.members)
        deadline = LEAST_DEADLINE_SECONDS + 2 * members * sum(sizes.values()) / SLOWEST_BYTES_PER_SECOND
        codec = make_codec(self._rounds.parameters_at(agreement.outer_step).codec)
        outcome = await run_round(
            self.line,
            self._rounds.descriptor(agreement.outer_step, agreement.view, aggregator_name(_MEAN)),
            agreement.group,
            contribution,
            aggregator=make_aggregator(_MEAN),
            codec=codec,
            deadline_seconds=deadline,
            offload=self._offload,
        )
        match outcome:
            case Completed(aggregate=aggregate, members=together, accepted=accepted):
                is_in_it = agreement.group.self_id in accepted
                sent = await self._offload(lambda: codec.round_trip(contribution)) if is_in_it else None
                return Agreed(aggregate, len(together), sent)
            case Aborted(reason=reason):
                return Abandoned(reason, is_soon_again=True)

    def _open_line(self, agreement: Agreement) -> None:
        """Messages of the others may come before this node enters the round."""
        descriptor = self._rounds.descriptor(agreement.outer_step, agreement.view, aggregator_name(_MEAN))
        name = round_id(descriptor, agreement.group).hex()
        self.line.open(name, frozenset(agreement.group.others), self._largest(agreement.outer_step))

    def _largest(self, outer_step: int) -> Mapping[str, int]:
        codec = make_codec(self._rounds.parameters_at(outer_step).codec)
        contribution = 2 * HASH_BYTES + codec.encoded_size(self._length)
        return {CONTRIBUTION_KIND: contribution, ROOT_KIND: 2 * HASH_BYTES}
