from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

import anyio
import msgspec
import pytest
from msgspec.structs import replace

from neuroshard.membership.announcements import Announcement
from neuroshard.membership.claim_intake import (
    ANNOUNCEMENT_RULES,
    REPORT_RULES,
    ClaimIntake,
    Statement,
    signed_announcement,
    signed_report,
)
from neuroshard.membership.handshake import (
    HANDSHAKE,
    HANDSHAKE_LIMITS,
    MAX_SHARED_ADDRESSES,
    ClaimIntakes,
    HandshakeMessage,
    Handshaker,
    HandshakeRefusedError,
)
from neuroshard.membership.swarm_view import Membership
from neuroshard.messages import Frame, MalformedFrameError, as_received
from neuroshard.messages.frame import unpack
from neuroshard.network import InMemoryNetwork, Network, PeerRefusedError, PeerUnreachableError
from neuroshard.types import NodeId, RunId
from tests.worlds.claims import DAY, OTHER_RUN, REPORT, RUN, announcement_of, clock, identity_of
from tests.worlds.clock import run_virtually


@dataclass
class Node:
    number: int
    net: InMemoryNetwork
    run: RunId = RUN
    now: Callable[[], float] = clock
    changes: dict[str, object] = field(default_factory=dict[str, object])

    def __post_init__(self) -> None:
        self.identity = identity_of(self.number)
        self.node_id = self.identity.node_id
        self.net.join(self.node_id)
        self.membership = Membership(self.node_id, self.identity.wallet_id)
        self.intakes = ClaimIntakes(
            ClaimIntake(ANNOUNCEMENT_RULES, self.run, self.now), ClaimIntake(REPORT_RULES, self.run, self.now)
        )
        self.greeter = Handshaker(
            self.identity, self.membership, self.intakes, self.announcement, now=self.now, random=Random(1)
        )
        self.greeter.serve(self.network)

    @property
    def network(self) -> Network:
        return self.net.network_of(self.node_id)

    def announcement(self) -> Announcement:
        return announcement_of(self.identity, run_id=self.run, **self.changes)

    def report(self, **changes: object) -> None:
        report = replace(REPORT, sequence=int(self.now() * 1000), run_id=self.run, **changes)  # type: ignore[arg-type]
        self.membership.count_own_report(report, signed_report(self.identity, report, self.now()), self.now())

    async def greet(self, other: Node) -> tuple[str, ...]:
        return await self.greeter.greet(self.network, other.node_id)

    def score_of(self, other: Node) -> float:
        return self.network.reputation.score(other.node_id)


def run(scenario: Callable[[InMemoryNetwork], Awaitable[None]]) -> None:
    async def virtual() -> None:
        with InMemoryNetwork(now=clock) as network:
            await scenario(network)

    run_virtually(virtual)


def test_after_one_hello_both_know_each_other_and_what_they_do() -> None:
    async def scenario(net: InMemoryNetwork) -> None:
        a, b = Node(1, net), Node(2, net)
        a.report(steps=10)
        b.report(steps=20)
        assert await a.greet(b) == ()
        for one, other in ((a, b), (b, a)):
            assert one.membership.announcements == {other.node_id: other.announcement()}
            assert one.membership.view.total_steps == 30
        assert a.score_of(b) > 0
        assert b.score_of(a) == 0
        await a.greet(b)  # the same report again is no offence
        assert b.score_of(a) == 0

    run(scenario)


def test_a_hello_comes_before_the_first_report_too() -> None:
    async def scenario(net: InMemoryNetwork) -> None:
        a, b = Node(1, net), Node(2, net)
        await a.greet(b)
        assert set(b.membership.announcements) == {a.node_id}
        assert set(b.membership.view.members) == set()

    run(scenario)


def test_acquaintances_are_passed_on_one_address_each_and_not_too_many() -> None:
    async def scenario(net: InMemoryNetwork) -> None:
        center, newcomer = Node(0, net), Node(1, net)
        others = [Node(number, net) for number in range(2, 50)]
        for other in others:
            await other.greet(center)
        addresses = await newcomer.greet(center)
        assert len(addresses) == len(set(addresses)) == MAX_SHARED_ADDRESSES
        reached = {await newcomer.network.transport.connect(address) for address in addresses}
        assert reached <= {other.node_id for other in others}
        assert f"/memory/p2p/{newcomer.node_id}" not in await newcomer.greet(center)

    run(scenario)


def test_direct_addresses_are_told_before_relayed_ones() -> None:
    async def scenario(net: InMemoryNetwork) -> None:
        center, behind, newcomer = Node(0, net), Node(1, net), Node(2, net)
        end = f"/p2p/{behind.node_id}"
        behind.changes["addresses"] = (f"/ip4/1.2.3.4/tcp/1/p2p/r/p2p-circuit{end}", f"/ip4/5.6.7.8/tcp/2{end}")
        await behind.greet(center)
        assert await newcomer.greet(center) == (f"/ip4/5.6.7.8/tcp/2{end}",)

    run(scenario)


def test_another_run_is_refused_with_a_clear_reason_and_nobody_is_blamed() -> None:
    async def scenario(net: InMemoryNetwork) -> None:
        a, stranger = Node(1, net), Node(2, net, run=OTHER_RUN)
        for one, other in ((a, stranger), (stranger, a)):
            with pytest.raises(PeerRefusedError, match=f"serves run {other.run[:16]}, not run {one.run[:16]}"):
                await one.greet(other)
            assert one.score_of(other) == other.score_of(one) == 0
            assert one.membership.announcements == {}

    run(scenario)


def test_an_answer_of_another_run_does_not_count_either() -> None:
    async def scenario(net: InMemoryNetwork) -> None:
        a, liar = Node(1, net), identity_of(9)

        async def answer(_sender: NodeId, _request: Frame) -> Frame:
            await anyio.lowlevel.checkpoint()
            announcement = announcement_of(liar, run_id=OTHER_RUN)
            return Frame(HANDSHAKE, HandshakeMessage(signed_announcement(liar, announcement, clock()), None, ()))

        net.join(liar.node_id).serve(HANDSHAKE, answer, HANDSHAKE_LIMITS)
        with pytest.raises(HandshakeRefusedError, match="not run"):
            await a.greeter.greet(a.network, liar.node_id)
        assert a.membership.announcements == {}

    run(scenario)


def test_a_clock_a_day_off_is_told_to_its_owner() -> None:
    async def scenario(net: InMemoryNetwork) -> None:
        a, wrong = Node(1, net), Node(2, net, now=lambda: clock() + DAY)
        with pytest.raises(PeerRefusedError, match="is dated 86400 s ahead"):
            await wrong.greet(a)
        with pytest.raises(PeerRefusedError, match="is dated 86400 s ago"):
            await a.greet(wrong)

    run(scenario)


def test_lies_in_a_hello_are_refused_and_cost_the_liar() -> None:
    async def scenario(net: InMemoryNetwork) -> None:
        a, b, liar = Node(1, net), Node(2, net), Node(3, net)
        b.report()
        own = liar.greeter.signed(liar.announcement())
        theirs = b.greeter.signed(b.announcement())
        assert b.membership.own_report is not None
        forged = liar.greeter.signed(announcement_of(liar.identity, memory_tier_mb=1)).replace(b"0.2.0", b"0.2.9")
        lies = [
            HandshakeMessage(theirs, None, ()),
            HandshakeMessage(own, b.membership.own_report, ()),
            HandshakeMessage(forged, None, ()),
            HandshakeMessage(own, b"\x02garbage", ()),
            HandshakeMessage(b"garbage", None, ()),
        ]
        for number, hello in enumerate(lies):
            before = a.score_of(liar)
            with pytest.raises(PeerRefusedError):
                await liar.network.transport.request(a.node_id, Frame(HANDSHAKE, hello), timeout_seconds=60)
            assert a.score_of(liar) < before, number
        assert a.score_of(b) == 0
        assert a.membership.view.members == {}
        assert set(a.membership.announcements) <= {liar.node_id}

    run(scenario)


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"announcement": "text", "report": None, "addresses": []},
        {"announcement": b"x" * 20_000, "report": None, "addresses": []},
        {"announcement": b"x", "report": b"x" * 5000, "addresses": []},
        {"announcement": b"x", "report": 3, "addresses": []},
        {"announcement": b"x", "report": None, "addresses": "/memory"},
        {"announcement": b"x", "report": None, "addresses": [b"/memory"]},
        {"announcement": b"x", "report": None, "addresses": ["/memory"] * 33},
        {"announcement": b"x", "report": None, "addresses": ["no slash"]},
        {"announcement": b"x", "report": None, "addresses": ["/" * 257]},
        {"announcement": b"x", "report": None, "addresses": {"a": 1}},
        {"announcement": b"x", "report": None, "addresses": [], "more": 1},
    ],
)
def test_a_malformed_hello_is_refused(header: dict[str, object]) -> None:
    with pytest.raises(MalformedFrameError):
        unpack(msgspec.msgpack.encode(header), HandshakeMessage)


def test_a_hello_survives_its_frame() -> None:
    for hello in (HandshakeMessage(b"a", b"r", ("/x", "/y")), HandshakeMessage(b"a", None, ())):
        assert as_received(Frame(HANDSHAKE, hello), HANDSHAKE_LIMITS).read(HandshakeMessage) == hello


def test_the_dead_answer_no_hello() -> None:
    async def scenario(net: InMemoryNetwork) -> None:
        a, b = Node(1, net), Node(2, net)
        net.kill(b.node_id)
        with pytest.raises(PeerUnreachableError):
            await a.greet(b)

    run(scenario)


def test_the_newest_announcement_of_each_is_kept_and_old_ones_go() -> None:
    def said(number: int, at: float, version: str) -> Statement[Announcement]:
        identity = identity_of(number)
        announcement = announcement_of(identity, version=version)
        return Statement(identity.node_id, identity.wallet_id, at, at + DAY, announcement)

    me = identity_of(0)
    membership = Membership(me.node_id, me.wallet_id)
    for statement in (said(1, 10, "new"), said(1, 5, "old"), said(2, 20, "x"), said(0, 30, "me")):
        membership.hear_announcement(statement)
    versions = {node: announcement.version for node, announcement in membership.announcements.items()}
    assert versions == {identity_of(1).node_id: "new", identity_of(2).node_id: "x"}
    membership.forget_silent(3600 + 15)
    assert set(membership.announcements) == {identity_of(2).node_id}
