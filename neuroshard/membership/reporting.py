"""The report loop and the report listener: a node publishes its own reports and adds verified reports of others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random

import anyio
from msgspec.structs import replace

from neuroshard.identity import NodeIdentity
from neuroshard.membership.claim_intake import LATE_SECONDS, ClaimIntake, Refusal, Statement, signed_report
from neuroshard.membership.reports import (
    EARLY_SECONDS,
    NEWS_AT_ONCE,
    NEWS_SECONDS,
    ReportNumbers,
    TrainingReport,
    is_worth_an_early_report,
    next_report_at,
    report_interval,
)
from neuroshard.membership.swarm_view import Membership
from neuroshard.network import Network, ScoreReason, TransportClosedError
from neuroshard.types import NodeId, RunId

LEAVE_SECONDS = 2.0  # at most, for the last report
_LOG = logging.getLogger(__name__)


class Reporter:
    """Publishes this node's reports on one topic.

    `make_report` fills in the training values; the reporter sets run, sequence, interval and whether the node leaves.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        run_id: RunId,
        topic: str,
        make_report: Callable[[], TrainingReport],
        membership: Membership,
        *,
        now: Callable[[], float] = time.time,
        random: Random,
        numbers: ReportNumbers | None = None,
    ) -> None:
        """`numbers` give the sequence numbers; by default they do not continue those of earlier starts."""
        self._identity = identity
        self._run_id = run_id
        self._topic = topic
        self._make_report = make_report
        self._membership = membership
        self._now = now
        self._random = random
        self._numbers = numbers or ReportNumbers()
        self._reported_news = 0  # count of news that the newest report contains
        self._paced_until = 0.0  # end of the time that earlier news would fill, at EARLY_SECONDS each

    async def report_forever(self, network: Network) -> None:
        """Report at once, soon after a node appears, and at intervals; at the end report that this node leaves.

        Ends with TransportClosedError when the network closes.
        """
        try:
            # random intervals, so that nodes that start together do not report together forever
            share = self._random.uniform(0.05, 1.0)
            while True:
                await self._publish(network, leaving=False)
                await self._wait(share)
                share = self._random.uniform(0.9, 1.1)  # on average one interval
        finally:
            with anyio.move_on_after(LEAVE_SECONDS, shield=True), suppress(TransportClosedError):
                await self._publish(network, leaving=True)  # a closed network needs no last report

    async def _publish(self, network: Network, *, leaving: bool) -> None:
        now = self._now()
        self._reported_news = self._membership.own_news.count
        self._membership.forget_silent(now)
        report = replace(
            self._make_report(),
            run_id=self._run_id,
            sequence=self._numbers.next(now),
            interval_seconds=report_interval(self._members()),
            leaving=leaving,
        )
        data = signed_report(self._identity, report, now)
        self._membership.count_own_report(report, data, now)
        await network.gossip.publish(self._topic, data)

    async def _wait(self, share: float) -> None:
        """Wait until the next report is due; news, or a node that appears, may bring it forward."""
        last = anyio.current_time()
        async with anyio.create_task_group() as tasks:

            async def hear_news() -> None:
                await self._membership.own_news.wait(after=self._reported_news)
                paced_at = self._paced_until - (NEWS_AT_ONCE - 1) * EARLY_SECONDS
                await anyio.sleep_until(max(last + NEWS_SECONDS, paced_at))
                self._paced_until = max(anyio.current_time(), self._paced_until) + EARLY_SECONDS
                tasks.cancel_scope.cancel()

            tasks.start_soon(hear_news)
            await self._wait_for_others(share)
            tasks.cancel_scope.cancel()

    async def _wait_for_others(self, share: float) -> None:
        last, members = anyio.current_time(), self._members()
        with anyio.CancelScope(deadline=next_report_at(last, share, members)):
            await self._membership.next_meeting()
            await anyio.sleep_until(last + EARLY_SECONDS)
            if is_worth_an_early_report(self._members(), members):
                return
        await anyio.sleep_until(next_report_at(last, share, self._members()))

    def _members(self) -> int:
        return max(1, len(self._membership.view.members))


class Listener:
    """Adds the reports of other nodes to the membership, and reports senders of refused ones to the reputation."""

    def __init__(
        self,
        intake: ClaimIntake[TrainingReport],
        membership: Membership,
        topic: str,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._intake = intake
        self._membership = membership
        self._topic = topic
        self._now = now

    async def listen_forever(self, network: Network) -> None:
        """Receive reports until cancelled. Ends with TransportClosedError when the network closes."""

        def check(sender: NodeId, data: bytes) -> bool:
            return self._is_fine(network, sender, data)

        subscription = network.gossip.subscribe(self._topic, check)
        try:
            while True:
                heard = self._intake.take(await subscription.receive())
                if not isinstance(heard, Refusal):
                    self._membership.hear_report(heard, self._now())
        finally:
            subscription.close()

    def _is_fine(self, network: Network, sender: NodeId, data: bytes) -> bool:
        found = self._intake.check(data)
        if not isinstance(found, Refusal):
            if found.node_id != self._membership.node_id or data == self._membership.own_report:
                return True
            # other nodes would blame this node for an old report that it forwards
            found = Refusal("A report of this node that is not its newest.", self._reason_for_old_report(found))
        self._count_refusal(network, sender, found)
        return False

    def _reason_for_old_report(self, own: Statement[TrainingReport]) -> ScoreReason | None:
        is_late = own.issued_at >= self._now() - LATE_SECONDS
        return None if is_late else ScoreReason.REPLAYED_CLAIM

    def _count_refusal(self, network: Network, sender: NodeId, refusal: Refusal) -> None:
        self._intake.count_refusal(refusal)
        if refusal.reason is not None:
            network.reputation.report(refusal.culprit or sender, refusal.reason)
            _LOG.debug("A report from node %s is refused: %s", sender, refusal.explanation)
