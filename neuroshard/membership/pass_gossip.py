"""Gossip of passes, admissions and revocations, so that members who never greet each other know them.

A member that forwards a pass vouches for it. The gate drops gossip of all other nodes.
"""

from __future__ import annotations

import logging

import anyio
from msgspec import Struct, msgpack

from neuroshard.decoders import msgpack_decoder
from neuroshard.membership.run_members import Papers, RunMembers
from neuroshard.network import Network
from neuroshard.types import NodeId, RunId, UnixSeconds

SAY_SECONDS = (1.0, 5.0, 15.0, 60.0, 600.0)  # between two messages of a node; the last one repeats
MAX_REVOCATIONS_SAID = 64
MAX_NEWS_BYTES = 48 * 1024
_LOG = logging.getLogger(__name__)


class PassNews(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The sender's own pass and admission, if it needs them, and the newest revocations of each kind that it knows."""

    said_at: UnixSeconds  # makes a repetition another message, which gossip carries again
    papers: Papers


class PassGossip:
    """Says and hears passes, admissions and revocations, for one node in one run."""

    def __init__(self, members: RunMembers, run_id: RunId) -> None:
        self._members = members
        self._topic = f"passes/{run_id}/0"

    async def run(self, network: Network) -> None:
        """Take part until cancelled. Ends with TransportClosedError when the network closes."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen, network)
            tasks.start_soon(self._say_forever, network)
            tasks.start_soon(self._follow_changes, network)

    async def _say_forever(self, network: Network) -> None:
        for seconds in SAY_SECONDS[:-1]:
            await anyio.sleep(seconds)
            await self._say(network)
        while True:
            await anyio.sleep(SAY_SECONDS[-1])
            await self._say(network)

    async def _say(self, network: Network) -> None:
        own, admission, known = self._members.own_pass, self._members.own_admission, self._members.papers()
        papers = Papers(
            () if own is None else (own,),
            known.revocations[-MAX_REVOCATIONS_SAID:],
            known.revoked_nodes[-MAX_REVOCATIONS_SAID:],
            () if admission is None else (admission,),
            known.ended[-MAX_REVOCATIONS_SAID:],
        )
        if papers != Papers():
            await network.gossip.publish(self._topic, msgpack.encode(PassNews(self._members.now(), papers)))

    async def _follow_changes(self, network: Network) -> None:
        """Pass a revocation, or a new admission of this node, on at once."""
        changed = self._members.changed
        count = changed.count
        while True:
            await changed.wait(after=count)
            count = changed.count
            await self._say(network)

    async def _listen(self, network: Network) -> None:
        def check(sender: NodeId, data: bytes) -> bool:
            news = _read(data)
            if news is None or self._members.refusal(sender):
                return False
            self._members.learn(news.papers)
            return all(self._members.knows(data) for data in (*news.papers.passes, *news.papers.admissions))

        subscription = network.gossip.subscribe(self._topic, check)
        try:
            while True:
                await subscription.receive()  # the check has learned it
        finally:
            subscription.close()


def _read(data: bytes) -> PassNews | None:
    if len(data) > MAX_NEWS_BYTES:
        return None
    try:
        return msgpack_decoder(PassNews).decode(data)
    except (ValueError, RecursionError):
        return None
