"""The relay of a closed run serves its members: reservations, circuits, and their end with the membership."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Status

from neuroshard.messages import Frame, FrameLimits
from neuroshard.network import Network, PeerUnreachableError
from neuroshard.network.libp2p import relay as relay_module
from neuroshard.network.libp2p.addresses import PeerAddress
from neuroshard.network.libp2p.connections import Dialler
from neuroshard.network.libp2p.hole_punching import HolePuncher
from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.negotiation import confirm, proposal
from neuroshard.network.libp2p.relay_messages import HOP_PROTOCOL, encode_message, encoded_node_id, read_message
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId
from tests.network.libp2p.test_libp2p_relay import FAR, RELAY, circuits, kinds, lives_over, never_punch
from tests.worlds.claims import identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import address_of, echo, nodes, run

MEMBER, OTHER = 2, 3
HIDDEN = frozenset(identity_of(number).node_id for number in (MEMBER, OTHER))


@pytest.fixture(autouse=True)
def _routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody dial the two nodes, which then meet only through the relay."""
    dial = Dialler.dial

    async def dial_relay_only(dialler: Dialler, address: PeerAddress) -> BoundedMuxer:
        if address.peer in HIDDEN:
            raise PeerUnreachableError("its router lets nobody in")
        return await dial(dialler, address)

    monkeypatch.setattr(Dialler, "dial", dial_relay_only)
    monkeypatch.setattr(HolePuncher, "upgrade", never_punch)


@asynccontextmanager
async def relay_of_a_run() -> AsyncIterator[tuple[Network, Network, Network, set[NodeId]]]:
    """A relay whose gate accepts the nodes of a set, and two nodes that are connected with it; the set is empty."""
    members = set[NodeId]()
    async with nodes(1, RELAY) as (relay,), nodes(2, FAR, first=MEMBER) as (one, other):
        relay.gate.close(lambda peer: "" if peer in members else "It has no admission.")
        for network in (one, other):
            network.transport.serve("echo", echo, FrameLimits(max_body_bytes=1024 * 1024))
            await network.transport.connect(address_of(relay))
        yield relay, one, other, members


async def status_of(asker: Network, relay: NodeId, question: HopMessage) -> Status.ValueType:
    """The relay's answer to one request."""
    muxer = asker.transport._connections.of(relay)
    stream = await muxer.open_stream()
    try:
        await stream.write(proposal(HOP_PROTOCOL) + encode_message(question))
        with anyio.fail_after(10):
            await confirm(stream, HOP_PROTOCOL)
            return (await read_message(stream, HopMessage())).status
    finally:
        stream.abandon()


def call_to(node: Network) -> HopMessage:
    return HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=encoded_node_id(node.transport.local_id)))


RESERVE = HopMessage(type=HopMessage.RESERVE)


def test_a_stranger_gets_no_reservation_and_hears_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(relay_module, "DENIED_SECONDS", 0.0)
    caplog.set_level(logging.INFO, logger=relay_module.__name__)

    async def scenario() -> None:
        async with relay_of_a_run() as (relay, stranger, member, members):
            members.add(member.transport.local_id)
            await until(lambda: bool(circuits(member)))
            assert await status_of(stranger, relay.transport.local_id, RESERVE) == Status.PERMISSION_DENIED
            await until(lambda: bool(caplog.messages))
            (said,) = caplog.messages
            assert relay.transport.local_id in said
            assert "serves only members of a run" in said
            assert circuits(stranger) == []
            assert await status_of(member, relay.transport.local_id, call_to(stranger)) == Status.NO_RESERVATION

    run(scenario)


def test_a_stranger_is_not_connected_with_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "PATIENCE_SECONDS", 0.0)

    async def scenario() -> None:
        async with relay_of_a_run() as (relay, stranger, member, members):
            members.add(member.transport.local_id)
            await until(lambda: bool(circuits(member)))
            assert await status_of(stranger, relay.transport.local_id, call_to(member)) == Status.PERMISSION_DENIED
            with pytest.raises(PeerUnreachableError, match="serves only members of a run"):
                await stranger.transport.connect(circuits(member)[0])
            assert kinds(member) == {relay.transport.local_id: ConnectionKind.DIRECT}

    run(scenario)


def test_a_node_that_becomes_a_member_gets_its_place_and_its_circuit_soon() -> None:
    async def scenario() -> None:
        async with relay_of_a_run() as (relay, one, other, members):
            members.add(one.transport.local_id)
            await until(lambda: bool(circuits(one)))
            began = anyio.current_time()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other.transport.connect, circuits(one)[0])  # before the relay knows it
                assert await status_of(other, relay.transport.local_id, RESERVE) == Status.PERMISSION_DENIED
                members.add(other.transport.local_id)
            await lives_over(other, one)
            await until(lambda: bool(circuits(other)))
            assert anyio.current_time() - began < relay_module.REFUSED_SECONDS / 10

    run(scenario)


@pytest.mark.parametrize("ended", [MEMBER, OTHER])
def test_a_membership_that_ends_takes_the_place_and_the_circuits_with_it(
    ended: int,
) -> None:
    async def scenario() -> None:
        async with relay_of_a_run() as (relay, one, other, members):
            members |= {one.transport.local_id, other.transport.local_id}
            await until(lambda: bool(circuits(one) and circuits(other)))
            await other.transport.connect(circuits(one)[0])
            await lives_over(other, one)
            gone, left = (one, other) if ended == MEMBER else (other, one)
            members.remove(gone.transport.local_id)
            with pytest.raises(PeerUnreachableError):
                await other.transport.request(one.transport.local_id, Frame("echo", {}), timeout_seconds=10)
            await until(lambda: kinds(gone) == kinds(left) == {relay.transport.local_id: ConnectionKind.DIRECT})
            assert await status_of(left, relay.transport.local_id, call_to(gone)) == Status.NO_RESERVATION
            assert await status_of(gone, relay.transport.local_id, call_to(left)) == Status.PERMISSION_DENIED
            assert await status_of(gone, relay.transport.local_id, RESERVE) == Status.PERMISSION_DENIED
            members.add(gone.transport.local_id)  # its place is free for others meanwhile, so it must ask again
            assert await status_of(left, relay.transport.local_id, call_to(gone)) == Status.NO_RESERVATION

    run(scenario)
