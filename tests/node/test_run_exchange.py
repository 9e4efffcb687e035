"""Asking many peers for a run: one that is silent holds up nobody."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

import anyio
import pytest
import trio
from trio.testing import MockClock

from neuroshard.identity import Wallet
from neuroshard.identity.invitations import InvitationTerms, InvitedPlaces, invite
from neuroshard.membership.connectivity import Networking
from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import PeerRefusedError, PeerUnreachableError, RequestTimeoutError
from neuroshard.network.in_memory import InMemoryNetwork
from neuroshard.network.in_memory_links import Link
from neuroshard.runs.exchange import ASK_SECONDS, ASKED_AT_ONCE, LOOK_SECONDS, OfferStore, RunExchange
from neuroshard.runs.offer import OfferChoice, RunAnswer, RunOffer
from neuroshard.types import NodeId, RunId
from tests.worlds.claims import FIRST, OWNER, STRANGER, identity_of, offer_of

OFFER = offer_of()


class Peers:
    """A network whose peers are silent, but for those that know the run or refuse to answer."""

    def __init__(self, silent: int, knowing: int = 0, refusing: int = 0) -> None:
        self.silent = [NodeId(f"silent {number}") for number in range(silent)]
        self.knowing = [NodeId(f"knowing {number}") for number in range(knowing)]
        self.refusing = [NodeId(f"refusing {number}") for number in range(refusing)]
        self.most_asked = self._asked = 0
        self.member_pass: bytes | None = None  # in the answers of those that know the run
        self.transport = self
        self.directory = self

    async def up(self) -> Any:
        await anyio.lowlevel.checkpoint()
        return self

    def peers(self) -> frozenset[NodeId]:
        return frozenset((*self.silent, *self.refusing, *self.knowing))

    async def find(self, *_: Any) -> tuple[bytes, ...]:
        raise PeerUnreachableError("nobody there")

    async def request(self, peer: NodeId, _: Frame, *, reply: FrameLimits, timeout_seconds: float) -> Frame:
        self._asked += 1
        self.most_asked = max(self.most_asked, self._asked)
        try:
            await anyio.sleep(timeout_seconds if peer in self.silent else 0.05)
        finally:
            self._asked -= 1
        if peer in self.knowing:
            return Frame("run/parameters", RunAnswer(OFFER.to_json(), self.member_pass))
        raise RequestTimeoutError("silent") if peer in self.silent else PeerRefusedError("no")

    def state(self) -> tuple[str, str]:
        return "alone", "Nobody."


def exchange() -> RunExchange:
    def keep(offer: RunOffer) -> OfferChoice:
        return OfferChoice(offer, True)

    return RunExchange(OfferStore(lambda _: None, keep))


def virtual(scenario: Callable[[], Awaitable[None]]) -> None:
    trio.run(scenario, clock=MockClock(autojump_threshold=0))


@pytest.mark.parametrize("silent", [1, 20])
def test_a_newcomer_hears_of_a_run_although_others_are_silent(silent: int) -> None:
    async def scenario() -> None:
        peers = Peers(silent, knowing=1)
        found = await exchange().hear_of_any(cast("Networking", peers), 3.0)
        assert found is not None
        assert found.parameters == FIRST
        assert trio.current_time() < 1

    virtual(scenario)


def test_a_run_is_fetched_from_who_knows_it_however_many_are_silent() -> None:
    async def scenario() -> None:
        peers = Peers(3 * ASKED_AT_ONCE, knowing=1)
        offer = await exchange().fetch(RunId(OFFER.run_id), cast("Networking", peers), lambda _: None)
        assert offer.run_id == OFFER.run_id
        assert trio.current_time() <= 4 * ASK_SECONDS
        assert peers.most_asked == ASKED_AT_ONCE

    virtual(scenario)


def test_who_comes_while_others_are_silent_is_asked_at_once_and_what_is_waited_for_is_told() -> None:
    async def scenario() -> None:
        peers, told = Peers(1, refusing=1), list[str]()

        async def come_later() -> None:
            await anyio.sleep(4.5)
            peers.knowing.append(NodeId("late"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(come_later)
            await exchange().fetch(RunId(OFFER.run_id), cast("Networking", peers), told.append)
        assert trio.current_time() < 6
        assert "None of the nodes that answer knows it yet" in told[0]

    virtual(scenario)


def test_nobody_who_speaks_of_a_run_in_time_is_nobody() -> None:
    async def scenario() -> None:
        assert await exchange().hear_of_any(cast("Networking", Peers(2, refusing=2)), 3.0) is None
        assert trio.current_time() == 3

    virtual(scenario)


ME = identity_of(1)


def pass_of(wallet: bytes, owner: Wallet = OWNER) -> bytes:
    invitation = invite(owner, OFFER.run_id, InvitationTerms(2e9), InvitedPlaces(""), seed=bytes(32))
    return invitation.pass_for(wallet, 1e9)


MINE = pass_of(ME.delegation.grant.wallet_public_key)


@pytest.mark.parametrize(
    ("member_pass", "is_kept"),
    [
        (MINE, True),
        (b"no pass", False),
        (pass_of(OWNER.public_key), False),
        (pass_of(ME.delegation.grant.wallet_public_key, STRANGER), False),
    ],
    ids=["own", "unreadable", "of another wallet", "of another owner"],
)
def test_a_pass_that_a_peer_sends_counts_only_if_the_owner_signed_it_for_this_wallet(
    member_pass: bytes, is_kept: bool
) -> None:
    """Otherwise any peer could end the start of an invited node with a pass of its own making."""

    async def scenario() -> None:
        peers, asking = Peers(0, knowing=1), exchange()
        peers.member_pass, asking.wallet = member_pass, ME.wallet_id
        await asking.fetch(OFFER.run_id, cast("Networking", peers), lambda _: None)
        assert asking.shown_passes == ({OFFER.run_id: member_pass} if is_kept else {})

    virtual(scenario)


def test_a_new_foundation_crosses_the_run_within_seconds() -> None:
    """Three nodes in a row: the last one hears it from the one in the middle. A silent peer holds up nobody."""

    async def scenario() -> None:
        with InMemoryNetwork() as network:
            exchanges = [exchange() for _ in range(3)]
            async with anyio.create_task_group() as tasks:
                for number, each in enumerate(exchanges):
                    node = NodeId(f"node {number}")
                    network.join(node)
                    each.follow(OFFER, is_shared=True)
                    tasks.start_soon(each.live, network.network_of(node))
                network.join(NodeId("silent"))
                network.set_link(NodeId("node 0"), NodeId("node 2"), Link(loss=1.0))
                await anyio.sleep(2 * LOOK_SECONDS)  # every peer has been asked once
                first, *others = (each.followed for each in exchanges)
                assert first is not None
                first.learn_foundations(first.foundations.with_statements([first.foundations.next(OWNER, ())]))
                await anyio.sleep(1.0)
                assert [each.foundations if each else None for each in others] == [first.foundations] * 2
                tasks.cancel_scope.cancel()

    virtual(scenario)
