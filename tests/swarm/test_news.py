"""How soon a node tells what it does now, and how often at most."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import anyio

from neuroshard.membership.claim_intake import BURST_CLAIMS, CLAIMS_PER_SECOND
from neuroshard.membership.reporting import Reporter
from neuroshard.membership.reports import EARLY_SECONDS, NEWS_SECONDS, TrainingReport
from neuroshard.membership.swarm_view import Membership
from neuroshard.network import InMemoryNetwork
from tests.worlds.claims import REPORT, RUN, TOPIC, clock, identity_of
from tests.worlds.clock import run_virtually

LOOK_SECONDS = 0.05
MOMENT = NEWS_SECONDS + LOOK_SECONDS


def spoken(seconds: float, pauses: list[float]) -> list[float]:
    """When a node spoke that had news after these pauses, and then all the time."""
    times = list[float]()

    async def scenario() -> None:
        identity = identity_of(1)

        def report() -> TrainingReport:
            times.append(anyio.current_time())
            return REPORT

        with InMemoryNetwork(now=clock) as network:
            network.join(identity.node_id)
            membership = Membership(identity.node_id, identity.wallet_id)
            reporter = Reporter(identity, RUN, TOPIC, report, membership, now=clock, random=Random(1))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reporter.report_forever, network.network_of(identity.node_id))
                for pause in pauses:
                    await anyio.sleep(pause)
                    membership.own_news.notify()
                while anyio.current_time() < seconds:
                    await anyio.sleep(LOOK_SECONDS)
                    membership.own_news.notify()
                tasks.cancel_scope.cancel()

    run_virtually(scenario)
    return times[:-1]  # the last one is its good-bye


def test_a_few_pieces_of_news_are_told_at_once() -> None:
    told = spoken(3.5, [2.0, 0.5, 0.5])
    for at in (2.0, 2.5, 3.0):
        assert any(at <= time <= at + MOMENT for time in told)


def test_constant_news_is_told_every_second_and_never_so_often_that_others_refuse_it() -> None:
    told = spoken(60.0, [])
    assert max(after - before for before, after in pairwise(told)) <= EARLY_SECONDS + LOOK_SECONDS
    for number, first in enumerate(told):
        counts = [(later - first, count) for count, later in enumerate(told[number:], 1)]
        assert all(count <= BURST_CLAIMS + CLAIMS_PER_SECOND * seconds for seconds, count in counts)
