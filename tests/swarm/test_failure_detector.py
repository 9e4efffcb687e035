"""The failure detector drops a node that has ended within 5 s, and keeps one whose connection alone was lost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import cast

import anyio
import pytest

from neuroshard.membership.claim_intake import Statement
from neuroshard.membership.failure_detector import FailureDetector
from neuroshard.membership.swarm_view import Membership
from neuroshard.network import Connection, InMemoryNetwork, NobodyListensError, PeerUnreachableError, Transport
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId
from tests.worlds.claims import DAY, EPOCH, announcement_of, clock, identity_of, said
from tests.worlds.clock import run_virtually

ME, PEER = identity_of(0), identity_of(1)
HERE = "/ip4/192.0.2.7"
CONNECTED = f"{HERE}/tcp/57588"


@dataclass
class Line:
    """The part of a transport that the detector uses: one connection, and the answer of each announced address."""

    answers: dict[str, Exception | None]
    kind: ConnectionKind = ConnectionKind.DIRECT
    is_up: bool = True
    called: list[str] = field(default_factory=list[str])

    def peers(self) -> frozenset[NodeId]:
        return frozenset([PEER.node_id] if self.is_up else [])

    def connections(self) -> tuple[Connection, ...]:
        return tuple(Connection(peer, CONNECTED, self.kind, is_outbound=False, since=EPOCH) for peer in self.peers())

    async def connect(self, address: str) -> NodeId:
        await anyio.lowlevel.checkpoint()
        self.called.append(address)
        error = self.answers[address]
        if error is not None:
            raise error
        return PEER.node_id


REFUSED, UNREACHABLE = NobodyListensError("refused"), PeerUnreachableError("no answer in time")
OWN, OTHER, INNER = f"{HERE}/tcp/4001/p2p/x", f"{HERE}/tcp/4002/p2p/x", "/ip4/192.168.1.5/tcp/4001/p2p/x"


def is_known_after(line: Line, seconds: float) -> bool:
    """Whether a node is still a member some seconds after its connection was lost, 3 s after a report of it."""
    membership = Membership(ME.node_id, ME.wallet_id)
    membership.hear_report(replace(said(1), node_id=PEER.node_id), EPOCH)
    value = announcement_of(PEER, addresses=tuple(line.answers))
    membership.hear_announcement(Statement(PEER.node_id, PEER.wallet_id, EPOCH, EPOCH + DAY, value))
    known: list[bool] = []

    async def scenario() -> None:
        memory = InMemoryNetwork()
        memory.join(ME.node_id)
        network = replace(memory.network_of(ME.node_id), transport=cast("Transport", line))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(FailureDetector(membership, clock).watch_forever, network)
            await anyio.sleep(3.0)
            line.is_up = False
            await anyio.sleep(seconds)
            known.append(PEER.node_id in membership.view.members)
            tasks.cancel_scope.cancel()

    run_virtually(scenario)
    return known[0]


def test_a_node_whose_computer_refuses_connections_is_dropped_within_4_s() -> None:
    line = Line({INNER: UNREACHABLE, OWN: REFUSED})
    assert not is_known_after(line, 4.0)
    assert line.called == [OWN]


@pytest.mark.parametrize(
    "line",
    [
        Line({OWN: None}),  # only the connection was lost
        Line({OWN: UNREACHABLE}),  # a firewall says nothing
        Line({OWN: REFUSED, OTHER: UNREACHABLE}),
        Line({INNER: REFUSED}),  # another computer at the same private address
        Line({OWN: REFUSED}, ConnectionKind.RELAYED),  # the address of the connection is the relay's
    ],
    ids=["answers", "firewall", "second address", "private address", "relayed"],
)
def test_a_node_that_may_live_is_kept_until_it_is_silent(line: Line) -> None:
    assert is_known_after(line, 6.0)


def test_a_silent_node_that_cannot_be_called_is_dropped() -> None:
    assert not is_known_after(Line({OWN: UNREACHABLE}), 16.0)
