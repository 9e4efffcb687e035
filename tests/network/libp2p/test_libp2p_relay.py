from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import time

import anyio
import pytest
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Status

from neuroshard.identity import Delegation, NodeIdentity, NodeKey, TokenSecret, Wallet
from neuroshard.membership.machine_orders import (
    ANSWER_LIMITS,
    MACHINE_KIND,
    REQUEST_LIMITS,
    MachineAnswer,
    MachineRequest,
    OrderMark,
    WalletOrders,
)
from neuroshard.messages import Frame, FrameLimits, TensorPart, TensorSpec
from neuroshard.network import Network, PeerRefusedError, PeerUnreachableError
from neuroshard.network.libp2p import NetworkOptions, hole_punching
from neuroshard.network.libp2p import relay as relay_module
from neuroshard.network.libp2p.addresses import PeerAddress
from neuroshard.network.libp2p.connections import Dialler
from neuroshard.network.libp2p.hole_punching import HolePuncher
from neuroshard.network.libp2p.muxer import BoundedMuxer
from neuroshard.network.libp2p.negotiation import confirm, proposal
from neuroshard.network.libp2p.relay import RelayLimits
from neuroshard.network.libp2p.relay_messages import HOP_PROTOCOL, encode_message, encoded_node_id, read_message
from neuroshard.network.libp2p.tls import TlsConnection
from neuroshard.status.machines import machine_status
from neuroshard.status.snapshot import ConnectionKind
from neuroshard.types import NodeId
from tests.worlds.claims import AFTER_EVERY_TEST, identity_of
from tests.worlds.clock import until
from tests.worlds.network_nodes import LOOPBACK, address_of, echo, lives, nodes, run
from tests.worlds.statuses import training_status


@dataclass(frozen=True)
class FarOptions(NetworkOptions):
    """Loopback that is treated like the internet."""

    @property
    def is_local(self) -> bool:
        return False

    @property
    def has_neighbours(self) -> bool:
        return True


@dataclass(frozen=True)
class AloneOptions(FarOptions):
    """As of a node in the internet, with no other one on its computer."""

    @property
    def has_neighbours(self) -> bool:
        return False


FAR = FarOptions(host="127.0.0.1", lan_discovery=False, port_mapping=False, body_connections=False)
ALONE = AloneOptions(host="127.0.0.1", lan_discovery=False, port_mapping=False, body_connections=False)
RELAY = FarOptions(
    host="127.0.0.1", lan_discovery=False, port_mapping=False, relay=False, serve_relay=True, body_connections=False
)


def circuits(network: Network) -> list[str]:
    return [address for address in network.transport.addresses() if "/p2p-circuit/" in address]


def kinds(network: Network) -> dict[str, ConnectionKind]:
    return {connection.peer: connection.kind for connection in network.transport.connections()}


@asynccontextmanager
async def behind_a_relay() -> AsyncIterator[tuple[Network, Network, Network]]:
    """A relay, a node that has a place there, and one that knows nobody."""
    async with nodes(1, RELAY) as (relay,), nodes(2, FAR, first=2) as (hidden, other):
        for network in (relay, hidden, other):
            network.transport.serve("echo", echo, FrameLimits(max_body_bytes=1024 * 1024))
        await hidden.transport.connect(address_of(relay))
        await until(lambda: bool(circuits(hidden)))
        yield relay, hidden, other


def test_a_node_is_reached_through_a_relay_by_who_it_is() -> None:
    async def scenario() -> None:
        async with behind_a_relay() as (relay, hidden, other):
            (address, *_) = circuits(hidden)
            assert address == f"{address_of(relay)}/p2p-circuit/p2p/{hidden.transport.local_id}"
            assert await other.transport.connect(address) == hidden.transport.local_id
            assert kinds(other) == {
                relay.transport.local_id: ConnectionKind.DIRECT,
                hidden.transport.local_id: ConnectionKind.RELAYED,
            }
            assert kinds(hidden)[other.transport.local_id] is ConnectionKind.RELAYED
            for near, far in ((other, hidden), (hidden, other)):  # encrypted from end to end, not by the relay
                circuit = near.transport._connections.of(far.transport.local_id)
                assert circuit is not None
                assert isinstance(circuit.secured_conn, TlsConnection)
            await lives_over(other, hidden)
            await lives_over(hidden, other)
            body = (TensorPart(TensorSpec("x", "uint8", (300_000,)), bytes(300_000)),)
            reply = await other.transport.request(
                hidden.transport.local_id,
                Frame("echo", {}, body),
                reply=FrameLimits(max_body_bytes=1024 * 1024),
                timeout_seconds=20,
            )
            assert len(reply.tensors[0].data) == 300_000
            other.gossip.subscribe("t", lambda *_: True)
            heard = hidden.gossip.subscribe("t", lambda *_: True)
            await until(lambda: bool(hidden.gossip.router._topics) and len(other.gossip.router._peers) == 2)
            await anyio.sleep(1.5)
            await other.gossip.publish("t", b"through the relay")
            with anyio.fail_after(60):
                assert await heard.receive() == b"through the relay"

    run(scenario)


def test_an_order_of_the_wallet_passes_through_a_relay_that_cannot_send_it_itself() -> None:
    wallet = Wallet.from_secret(TokenSecret("hex", bytes(32)))

    def orders_of(key: NodeKey) -> WalletOrders:
        identity = NodeIdentity(
            wallet.wallet_id, key.node_id, key, Delegation.issue(wallet, key.public_key, AFTER_EVERY_TEST)
        )
        return WalletOrders(wallet, identity, OrderMark(0, ""))

    async def scenario() -> None:
        async with behind_a_relay() as (relay, hidden, other):
            asker, asked = (orders_of(identity_of(number).key) for number in (3, 2))
            status = machine_status(training_status(), "hidden")

            async def answer(sender: NodeId, frame: Frame) -> Frame:
                await anyio.lowlevel.checkpoint()
                order = asked.check(sender, frame.read(MachineRequest), time())
                return Frame(
                    MACHINE_KIND, MachineAnswer(asked.identity.delegation.signed, status, order.number, message="Done.")
                )

            hidden.transport.serve(MACHINE_KIND, answer, REQUEST_LIMITS, for_anyone=True)
            await other.transport.connect(circuits(hidden)[0])
            there = hidden.transport.local_id
            order = Frame(MACHINE_KIND, asker.request("pause", there, 7, time()))
            reply = await other.transport.request(there, order, reply=ANSWER_LIMITS, timeout_seconds=10)
            said = reply.read(MachineAnswer)
            assert (said.newest, said.message) == (7, "Done.")
            assert asker.is_own(there, said, time())
            assert kinds(other)[there] is ConnectionKind.RELAYED
            with pytest.raises(PeerRefusedError, match="another node"):
                await relay.transport.request(there, order, reply=ANSWER_LIMITS, timeout_seconds=10)

    run(scenario)


async def lives_over(asker: Network, asked: Network) -> None:
    reply = await asker.transport.request(asked.transport.local_id, Frame("echo", {"x": 1}), timeout_seconds=10)
    assert reply.header == {"x": 1}


BODY_BYTES = 3 * 1024 * 1024
MIB = 1024 * 1024


@asynccontextmanager
async def circuit_for_bodies() -> AsyncIterator[tuple[Network, Network]]:
    """A node that has a place at a relay, and one that is connected with it through there."""
    far, server = (replace(options, body_connections=True) for options in (FAR, RELAY))
    async with nodes(1, server) as (relay,), nodes(2, far, first=2) as (hidden, other):
        for network in (hidden, other):
            network.transport.serve("echo", echo, FrameLimits(max_body_bytes=BODY_BYTES))
        await hidden.transport.connect(address_of(relay))
        await until(lambda: bool(circuits(hidden)))
        await other.transport.connect(circuits(hidden)[0])
        yield hidden, other


async def exchange_body(asker: Network, asked: Network) -> None:
    body = (TensorPart(TensorSpec("x", "uint8", (BODY_BYTES,)), bytes(BODY_BYTES)),)
    reply = FrameLimits(max_body_bytes=BODY_BYTES)
    peer = asked.transport.local_id
    answer = await asker.transport.request(peer, Frame("echo", {}, body), reply=reply, timeout_seconds=60)
    assert len(answer.tensors[0].data) == BODY_BYTES


def bulk_connections(network: Network, peer: Network) -> int:
    return {one.peer: one.bulk_connections for one in network.transport.connections()}[peer.transport.local_id]


def test_bodies_through_a_relay_have_one_circuit_of_their_own_until_a_hole_is_punched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_punch, upgrade = anyio.Event(), HolePuncher.upgrade

    async def upgrade_later(puncher: HolePuncher, peer: NodeId) -> None:
        await may_punch.wait()
        await upgrade(puncher, peer)

    monkeypatch.setattr(HolePuncher, "upgrade", upgrade_later)
    monkeypatch.setattr(hole_punching, "LEAVE_RELAY_SECONDS", 0.1)

    async def scenario() -> None:
        async with circuit_for_bodies() as (hidden, other):
            await exchange_body(hidden, other)  # it did not dial the first circuit, so it asks for the second
            await exchange_body(other, hidden)
            assert bulk_connections(hidden, other) == bulk_connections(other, hidden) == 1
            assert kinds(other)[hidden.transport.local_id] is ConnectionKind.RELAYED
            may_punch.set()
            await until(lambda: kinds(other)[hidden.transport.local_id] is ConnectionKind.PUNCHED)
            await until(lambda: bulk_connections(hidden, other) == bulk_connections(other, hidden) == 0)

    run(scenario)


async def never_punch(_: HolePuncher, __: NodeId) -> None:
    await anyio.sleep_forever()


def test_bodies_stay_on_streams_where_the_relay_allows_no_second_circuit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HolePuncher, "upgrade", never_punch)
    monkeypatch.setattr(relay_module, "RelayLimits", partial(RelayLimits, circuits_of_node=1))

    async def scenario() -> None:
        async with circuit_for_bodies() as (hidden, other):
            await exchange_body(hidden, other)
            await exchange_body(other, hidden)
            assert bulk_connections(hidden, other) == bulk_connections(other, hidden) == 0

    run(scenario)


def test_a_transfer_goes_on_through_another_relay_when_its_relay_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HolePuncher, "upgrade", never_punch)
    dial = Dialler.dial

    async def dial_relays_only(dialler: Dialler, address: PeerAddress) -> BoundedMuxer:
        if address.peer in {identity_of(number).node_id for number in (2, 3)}:
            raise PeerUnreachableError("its router lets nobody in")
        return await dial(dialler, address)

    monkeypatch.setattr(Dialler, "dial", dial_relays_only)

    async def scenario() -> None:
        far = replace(FAR, body_connections=True, upload_bytes_per_second=MIB)
        started, stopped = list[Network](), anyio.Event()

        async def serve_until_stopped() -> None:
            async with nodes(1, RELAY) as (relay,):
                started.append(relay)
                await stopped.wait()

        async with nodes(1, RELAY, first=5) as (second,), anyio.create_task_group() as tasks:
            tasks.start_soon(serve_until_stopped)
            await until(lambda: bool(started))
            (first,) = started
            async with nodes(2, far, first=2) as (hidden, other):
                heard = list[Frame]()

                async def note(_: NodeId, frame: Frame) -> Frame:
                    await anyio.lowlevel.checkpoint()
                    heard.append(frame)
                    return Frame("answer")

                hidden.transport.serve("note", note, FrameLimits(max_body_bytes=4 * MIB))
                for relay in (first, second):
                    await hidden.transport.connect(address_of(relay))
                await until(lambda: len(circuits(hidden)) == 2)
                first_id, peer = first.transport.local_id, hidden.transport.local_id
                await other.transport.connect(next(text for text in circuits(hidden) if first_id in text))
                other.transport._connections._contacts.learn_texts(peer, circuits(hidden), 1.0)  # as from a record

                async def stop() -> None:
                    connections = other.transport.connections
                    await until(lambda: any(one.peer == peer and one.bytes_sent > MIB for one in connections()))
                    stopped.set()

                tasks.start_soon(stop)
                body = (TensorPart(TensorSpec("x", "uint8", (4 * MIB,)), bytes(4 * MIB)),)
                await other.transport.request(peer, Frame("note", {}, body), timeout_seconds=60)
                assert [frame.tensors[0].data for frame in heard] == [bytes(4 * MIB)]
                assert first_id not in kinds(other)
                assert kinds(other)[peer] is ConnectionKind.RELAYED

    run(scenario)


def test_a_slow_relay_is_waited_for_and_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HolePuncher, "upgrade", never_punch)
    monkeypatch.setattr(relay_module, "RelayLimits", partial(RelayLimits, bytes_per_second=MIB, burst_seconds=0.5))

    async def scenario() -> None:
        async with circuit_for_bodies() as (hidden, other):
            began = anyio.current_time()
            await exchange_body(other, hidden)
            assert anyio.current_time() - began > 2 * (BODY_BYTES / MIB - 0.5) - 1  # there and back
            for near, far in ((hidden, other), (other, hidden)):
                assert near.reputation.score(far.transport.local_id) >= 0
                assert kinds(near)[far.transport.local_id] is ConnectionKind.RELAYED

    run(scenario)


def test_a_relay_brings_nobody_to_whom_it_was_not_asked_for() -> None:
    async def scenario() -> None:
        async with behind_a_relay() as (relay, hidden, other):
            stranger = identity_of(30).node_id
            with pytest.raises(PeerUnreachableError, match="204"):  # NO_RESERVATION
                await other.transport.connect(f"{address_of(relay)}/p2p-circuit/p2p/{stranger}")
            async with nodes(1, LOOPBACK, first=5) as (local,):
                with pytest.raises(PeerUnreachableError, match="switched off"):
                    await local.transport.connect(circuits(hidden)[0])
            async with nodes(1, FAR, first=6) as (impostor,):
                await impostor.transport.connect(address_of(relay))
                await until(lambda: bool(circuits(impostor)))
                wrong = circuits(impostor)[0].replace(impostor.transport.local_id, hidden.transport.local_id)
                assert await other.transport.connect(wrong) == hidden.transport.local_id  # its name leads to it alone
            assert stranger not in kinds(other)

    run(scenario)


def test_when_the_relay_ends_so_do_its_circuits_and_addresses() -> None:
    async def scenario() -> None:
        async with nodes(2, FAR, first=2) as (hidden, other):
            async with nodes(1, RELAY) as (relay,):
                await hidden.transport.connect(address_of(relay))
                await until(lambda: bool(circuits(hidden)))
                await other.transport.connect(circuits(hidden)[0])
            await until(lambda: kinds(other) == {} and kinds(hidden) == {})
            await until(lambda: circuits(hidden) == [])

    run(scenario)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (encode_message(HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=b"x" * 40))), Status.NO_RESERVATION),
        (encode_message(HopMessage(type=HopMessage.STATUS)), Status.UNEXPECTED_MESSAGE),
        (encode_message(HopMessage(type=HopMessage.CONNECT)), None),
        (b"\xff\xff\xff\xff", None),
        (b"\x20" + b"\xff" * 32, None),
        (b"\xff\x7f", None),
    ],
)
def test_a_relay_survives_whatever_it_is_told(said: bytes, status: Status.ValueType | None) -> None:
    async def scenario() -> None:
        async with behind_a_relay() as (relay, hidden, other):
            await other.transport.connect(address_of(relay))
            muxer = other.transport._connections.of(relay.transport.local_id)
            stream = await muxer.open_stream()
            await stream.write(proposal(HOP_PROTOCOL) + said, is_last=True)
            with anyio.fail_after(10):
                if status is None:
                    await stream.wait_reset()
                else:
                    await confirm(stream, HOP_PROTOCOL)
                    assert (await read_message(stream, HopMessage())).status == status
            await lives(other, relay)
            await other.transport.connect(circuits(hidden)[0])

    run(scenario)


def test_a_relay_gives_each_node_only_so_many_circuits() -> None:
    async def scenario() -> None:
        async with behind_a_relay() as (relay, hidden, other):
            await other.transport.connect(address_of(relay))
            muxer = other.transport._connections.of(relay.transport.local_id)
            question = HopMessage(type=HopMessage.CONNECT, peer=PeerId(id=encoded_node_id(hidden.transport.local_id)))
            answers = []
            for _ in range(52):
                stream = await muxer.open_stream()
                await stream.write(proposal(HOP_PROTOCOL) + encode_message(question))
                with anyio.fail_after(10):
                    await confirm(stream, HOP_PROTOCOL)
                    answers.append((await read_message(stream, HopMessage())).status)
            assert answers[0] == Status.OK
            assert answers[-1] == Status.RESOURCE_LIMIT_EXCEEDED
            assert answers.count(Status.OK) <= 48
            await lives(hidden, relay)

    run(scenario)


def test_two_that_met_through_a_relay_get_a_direct_connection_where_there_can_be_one() -> None:
    async def scenario() -> None:
        async with behind_a_relay() as (relay, hidden, other):
            await other.transport.connect(circuits(hidden)[0])
            await until(lambda: kinds(other).get(hidden.transport.local_id) is ConnectionKind.PUNCHED)
            await until(lambda: kinds(hidden).get(other.transport.local_id) is ConnectionKind.PUNCHED)
            await lives_over(other, hidden)
            await lives_over(hidden, other)
            assert kinds(hidden)[relay.transport.local_id] is ConnectionKind.DIRECT

    run(scenario)


def test_a_place_on_this_computer_is_dialled_only_for_its_owner() -> None:
    async def scenario() -> None:
        async with nodes(1) as (other,), nodes(1, ALONE, first=2) as (alone,):
            with pytest.raises(PeerUnreachableError, match="Only the owner"):
                await alone.transport.connect(address_of(other))
            assert await alone.transport.connect(address_of(other), is_given=True) == other.transport.local_id

    run(scenario)
